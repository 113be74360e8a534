"""`speculative_config`: vLLM's dict in, every key kept, carried out or refused by name."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import draft_config, draft_tensors, pack_w4a16, tiny_pair, tiny_verifier, w4a16_section, write

from specbench.checkpoint.load_config import LoadConfig
from specbench.errors import ConfigError
from specbench.pair import open_pair
from specbench.plan import resolve
from specbench.speculative import OTHER_METHODS, SpeculativeConfig, check_speculative_config, parse_speculative_config

EXAMPLE = {"method": "eagle3", "model": "RedHatAI/Qwen3-8B-speculator.eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}

# What vLLM 0.32.0's SpeculativeConfig takes from a user (its other fields are filled in by vLLM).
VLLM_KEYS = """
enforce_eager num_speculative_tokens model method draft_tensor_parallel_size quantization moe_backend attention_backend kv_cache_dtype
max_model_len revision code_revision index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop
use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config rejection_sample_method synthetic_acceptance_rates
synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk
""".split()


def test_every_key_of_vllm_is_a_field_and_its_defaults_are_accepted() -> None:
    assert sorted(f.name for f in fields(SpeculativeConfig)) == sorted(VLLM_KEYS)
    defaults = {f.name: f.default for f in fields(SpeculativeConfig)}
    assert parse_speculative_config(defaults) == SpeculativeConfig()
    assert parse_speculative_config(json.dumps(defaults)) == parse_speculative_config({}) == parse_speculative_config(None)


FORMS = (dict, json.dumps, lambda value: f"\n {json.dumps(value, indent=2)}\n", lambda value: SpeculativeConfig(**value))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: Any) -> None:
    config = parse_speculative_config(form(EXAMPLE))
    assert config.to_dict() == EXAMPLE
    assert (config.model, config.num_speculative_tokens, config.quantization, config.draft_load_config) == (EXAMPLE["model"], 3, None, None)


# value -> every word that the message must have
REFUSED: list[tuple[Any, tuple[str, ...]]] = [
    ("{'method': 'eagle3'}", ("no JSON", "line 1", "column 2")),
    ('{"model": "a", "model": "b"}', ("'model'", "twice")),
    ("[1]", ("[1]", "list", "JSON object")),
    (["eagle3"], ("['eagle3']", "list", "dict")),
    (7, ("7", "int")),
    ({"num_speculative_token": 3}, ("'num_speculative_token'", "nearest: 'num_speculative_tokens'")),
    ({"kv_cache_type": "auto"}, ("'kv_cache_type'", "nearest: 'kv_cache_dtype'")),
    ({"qqq": 1}, ("'qqq'", "known:", "draft_load_config")),
    ({"tensor_parallel_size": 2}, ("'tensor_parallel_size'", "verifier's", "'draft_tensor_parallel_size'")),
    ({"draft_model_config": {}}, ("'draft_model_config'", "vLLM fills in")),
    # types
    ({"num_speculative_tokens": "3"}, ("num_speculative_tokens", "'3'", "str", "integer")),
    ({"num_speculative_tokens": True}, ("num_speculative_tokens", "True", "bool", "integer")),
    ({"num_speculative_tokens": 3.0}, ("num_speculative_tokens", "3.0", "float", "integer")),
    ({"num_speculative_tokens": 0}, ("num_speculative_tokens", "0", "at least 1")),
    ({"num_speculative_tokens": -1}, ("num_speculative_tokens", "-1", "at least 1")),
    ({"max_model_len": 0}, ("max_model_len", "0", "at least 1")),
    ({"model": ["a"]}, ("model", "['a']", "list", "string")),
    ({"model": " "}, ("model", "' '", "non-empty")),
    ({"enforce_eager": "false"}, ("enforce_eager", "'false'", "str", "true or false")),
    ({"parallel_drafting": None}, ("parallel_drafting", "None", "true or false")),
    ('{"synthetic_acceptance_length": NaN}', ("synthetic_acceptance_length", "nan", "finite")),
    ({"synthetic_acceptance_rates": [0.9, "x"]}, ("synthetic_acceptance_rates", "list of finite numbers")),
    ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, ("num_speculative_tokens_per_batch_size", "[[1, 4]]", "[first batch size")),
    ({"rejection_sample_method": "typical"}, ("rejection_sample_method", "'typical'", "'standard', 'block', 'synthetic'")),
    ({"draft_load_config": "safetensors"}, ("draft_load_config", "'safetensors'", "str", "dict")),
    ({"draft_load_config": {"load_fromat": "pt"}}, ("draft_load_config", "'load_fromat'", "nearest: 'load_format'")),
    # contradictions
    ({"method": "eagle"}, ("method", "'eagle'", "EAGLE-3", "'eagle3'")),
    ({"method": "eagel3"}, ("method", "'eagel3'", "no method of vLLM", "nearest: 'eagle3'")),
    ({"method": "qwen3_next_mtp"}, ("method", "'qwen3_next_mtp'", "EAGLE-3")),
    ({"method": "eagle3", "prompt_lookup_max": 5}, ("prompt_lookup_max", "'ngram'", "'eagle3'")),
    ({"prompt_lookup_min": 1}, ("prompt_lookup_min", "'ngram'", "'eagle3'")),
    ({"use_heterogeneous_vocab": True}, ("use_heterogeneous_vocab", "'draft_model'")),
    ({"suffix_decoding_max_spec_factor": 2}, ("suffix_decoding_max_spec_factor", "'suffix'")),
    ({"dspark_draft_topk": 4}, ("dspark_draft_topk", "'dspark'")),
    ({"synthetic_acceptance_length": 2.5}, ("synthetic_acceptance_length", "'standard'", "'synthetic'")),
    ({"synthetic_acceptance_rates": [0.5], "rejection_sample_method": "block"}, ("synthetic_acceptance_rates", "'block'", "'synthetic'")),
    # what is not carried out
    ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}, ("rejection_sample_method", "'synthetic'", "standard")),
    ({"rejection_sample_method": "block"}, ("rejection_sample_method", "'block'", "standard")),
    ({"draft_sample_method": "probabilistic"}, ("draft_sample_method", "'probabilistic'", "greedy")),
    ({"draft_tensor_parallel_size": 2}, ("draft_tensor_parallel_size", "2", "1", "one device")),
    ({"parallel_drafting": True}, ("parallel_drafting", "True", "P-EAGLE")),
    ({"kv_cache_dtype": "fp8"}, ("kv_cache_dtype", "'fp8'", "auto")),
    ({"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 64, 2]]}, ("num_speculative_tokens_per_batch_size", "one number of tokens")),
    *(({"quantization": word}, ("quantization", repr(word), "null", "'none'")) for word in ("None", "null", "unquantized")),
    ({"quantization": "verifier"}, ("quantization", "'verifier'", "override")),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=[str(value)[:60] for value, _ in REFUSED])
def test_refused_by_name(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_speculative_config(value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_are_refused_with_what_belongs_to_them(method: str) -> None:
    with pytest.raises(ConfigError, match=f"method is {method!r}"):
        parse_speculative_config({"method": method, "prompt_lookup_max": 5})


@pytest.mark.parametrize(
    ("given_value", "kept", "overrides"),
    [
        (None, None, {}),
        ("none", "none", {"quantization": "none"}),
        ("unquant", "none", {"quantization": "none"}),
        ("compressed-tensors", "compressed-tensors", {"quantization": "compressed-tensors"}),
        ("gptq_marlin", "gptq_marlin", {"quantization": "gptq"}),
    ],
)
def test_three_states_of_quantization(given_value: str | None, kept: str | None, overrides: dict[str, str]) -> None:
    config = parse_speculative_config({"quantization": given_value})
    assert config.quantization == kept
    assert config.plan_overrides() == overrides


def test_load_config_unset_default_and_set_stay_apart() -> None:
    assert parse_speculative_config({"draft_load_config": None}).draft_load_config is None
    assert parse_speculative_config({"draft_load_config": {}}).draft_load_config == LoadConfig()
    ready = LoadConfig(load_format="safetensors")
    assert parse_speculative_config({"draft_load_config": ready}).draft_load_config is ready
    assert parse_speculative_config({"draft_load_config": {"load_format": "safetensors"}}).draft_load_config == ready


def test_settings_of_serving_engines_are_kept_and_named() -> None:
    config = parse_speculative_config({**EXAMPLE, "moe_backend": "marlin", "attention_backend": "FLASH_ATTN", "enforce_eager": False})
    assert set(config.not_applicable()) == {"moe_backend", "attention_backend", "enforce_eager"}
    assert all(config.not_applicable().values())
    assert config.to_dict()["moe_backend"] == "marlin"


TEXT = st.text(min_size=1).filter(lambda text: text.strip() != "")
ACCEPTED = st.fixed_dictionaries(
    {},
    optional={
        "model": TEXT,
        "method": st.sampled_from(["eagle3", None]),
        "num_speculative_tokens": st.integers(1, 10**30),
        "quantization": st.sampled_from([None, "none", "unquant", "awq", "gptq_marlin", "fp8"]),
        "revision": TEXT,
        "max_model_len": st.integers(1, 10**6),
        "draft_load_config": st.none()
        | st.fixed_dictionaries({}, optional={"load_format": st.sampled_from(["auto", "pt", "dummy"]), "ignore_patterns": st.lists(TEXT)}),
        "code_revision": TEXT,
        "enforce_eager": st.none() | st.booleans(),
        "attention_backend": TEXT,
        "moe_backend": TEXT,
        "disable_padded_drafter_batch": st.booleans(),
        "use_local_argmax_reduction": st.booleans(),
        "draft_tensor_parallel_size": st.sampled_from([None, 1]),
        "kv_cache_dtype": st.sampled_from([None, "auto"]),
        "suffix_decoding_max_spec_factor": st.sampled_from([1, 1.0]),
    },
)


@given(ACCEPTED)
def test_round_trip(value: dict[str, Any]) -> None:
    config = parse_speculative_config(value)
    assert parse_speculative_config(config.to_dict()) == config
    assert parse_speculative_config(json.dumps(config.to_dict())) == config
    assert set(config.to_dict()) <= set(value)
    assert parse_speculative_config(json.dumps(value)) == config


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)


@given(st.dictionaries(st.sampled_from(VLLM_KEYS), ANYTHING))
def test_any_values_are_read_or_refused(value: dict[str, Any]) -> None:
    try:
        config = parse_speculative_config(value)
    except ConfigError as error:
        assert "speculative_config" in str(error)
    else:
        assert parse_speculative_config(config.to_dict()) == config


def test_compared_with_the_pair(tmp_path: Path) -> None:
    pair = open_pair(*tiny_pair(tmp_path))
    check_speculative_config(parse_speculative_config({"model": pair.draft.name, "max_model_len": 512}), pair)
    with pytest.raises(ConfigError, match=r"draft_load_config is .*load_format=pt.*: the pair was opened with load_format=hf"):
        opened = replace(pair, draft_load=LoadConfig(load_format="hf"))
        check_speculative_config(parse_speculative_config({"draft_load_config": {"load_format": "pt"}}), opened)
    for value, words in [
        ({"model": "other/draft"}, ("model", "'other/draft'", pair.draft.name)),
        ({"revision": "v1"}, ("revision", "'v1'", "local folder")),
        ({"max_model_len": 513}, ("max_model_len", "513", "max_position_embeddings is 512", "at most")),
        ({"max_model_len": 256}, ("max_model_len", "256", "verifier", "max_position_embeddings is 512", "remove the key")),
    ]:
        with pytest.raises(ConfigError) as caught:
            check_speculative_config(parse_speculative_config(value), pair)
        for word in words:
            assert word in str(caught.value)


def test_quantization_is_an_override_of_the_plan(tmp_path: Path) -> None:
    """A plain draft stays plain when that is said; a packed one that is said to be plain, or to be another format, is refused."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    verifier = tiny_verifier(tmp_path / "verifier")
    write(plain, draft_config(), draft_tensors())
    write(packed, draft_config(quantization_config=w4a16_section()), pack_w4a16(draft_tensors()))

    def planned(draft: Path, quantization: str | None) -> Any:
        config = parse_speculative_config({"quantization": quantization})
        return resolve(open_pair(verifier, draft), overrides=config.plan_overrides())["quantization"]

    assert planned(plain, None) is None and planned(plain, "none") is None
    assert planned(packed, None) == planned(packed, "compressed-tensors") == w4a16_section()
    for draft, said in [(packed, "none"), (packed, "awq"), (plain, "compressed-tensors")]:
        with pytest.raises(ConfigError, match=said):
            planned(draft, said)

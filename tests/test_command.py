"""Commands for serving engines: what a shell or Python makes of them, and what their comments admit."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import HIDDEN, draft_config, draft_tensors, pack_w4a16, tiny_pair, tiny_verifier, tiny_w4a16_verifier, w4a16_section, write

from specbench.command import ENGINES, command
from specbench.errors import ConfigError
from specbench.pair import Pair, open_pair
from specbench.plan import resolve
from specbench.speculative import parse_speculative_config

SHELLS = ("vllm", "vllm-0.11.0", "sglang")


def arguments(text: str) -> list[str]:
    """The words that bash makes of a command."""
    script = 'vllm() { printf "%s\\0" vllm "$@"; }\npython() { printf "%s\\0" python "$@"; }\n' + text
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True, env={"PATH": "/nonexistent"})
    assert not done.stderr
    return done.stdout.split("\0")[:-1]


def options(text: str) -> dict[str, str]:
    words = arguments(text)
    start = next(i for i, word in enumerate(words) if word.startswith("--"))
    names, values = words[start::2], words[start + 1 :: 2]
    assert len(names) == len(values) == len(set(names)) and all(name.startswith("--") for name in names)
    return dict(zip(names, values, strict=True))


def keywords(call: ast.expr) -> dict[str, Any]:
    assert isinstance(call, ast.Call)
    return {k.arg or "": k.value if isinstance(k.value, ast.Call) else ast.literal_eval(k.value) for k in call.keywords}


def trtllm(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of LLM and of Eagle3DecodingConfig, as Python reads them."""
    last = ast.parse(text).body[-1]
    assert isinstance(last, ast.Assign)
    outer = keywords(last.value)
    return outer, keywords(outer.pop("speculative_config"))


def notes(text: str) -> str:
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    return "\n".join(line for line in lines if line.startswith("# note: "))


def flat(folder: Path, **changes: Any) -> Path:
    """The tiny draft as SpecForge writes it: flat config, midlayer.*."""
    config = draft_config()
    layer = config.pop("transformer_layer_config")
    for key in ("speculators_model_type", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"):
        del config[key]
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in draft_tensors().items()}
    return write(folder, {**layer, **config, "architectures": ["LlamaForCausalLMEagle3"], **changes}, tensors)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return open_pair(*tiny_pair(tmp_path / "it's $HOME & more", quantized=True))


def test_vllm(pair: Pair) -> None:
    text = command(pair, num_speculative_tokens=5)
    assert arguments(text)[:3] == ["vllm", "serve", pair.verifier.name]
    said = options(text)
    config = json.loads(said.pop("--speculative-config"))
    assert said == {"--dtype": "float32"}
    assert config == {"method": "eagle3", "model": pair.draft.name, "num_speculative_tokens": 5}
    assert notes(text) == ""


def test_sglang(pair: Pair) -> None:
    text = command(pair, "sglang", 5)
    assert arguments(text)[:3] == ["python", "-m", "sglang.launch_server"]
    assert options(text) == {
        "--model-path": pair.verifier.name,
        "--dtype": "float32",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": pair.draft.name,
        "--speculative-draft-model-quantization": "unquant",
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
    }
    assert "transformer_layer_config" in notes(text) and "norm_before_residual" in notes(text)


def test_trtllm(pair: Pair) -> None:
    text = command(pair, "trtllm", 5)
    outer, inner = trtllm(text)
    assert outer == {"model": pair.verifier.name, "dtype": "float32"}
    # Layers 2, 4, 5 by what enters them are 1, 3, 4 by what leaves.
    assert inner == {"max_draft_len": 5, "speculative_model": pair.draft.name, "eagle3_layers_to_capture": {1, 3, 4}}


def test_flat_draft_beside_a_plain_verifier_needs_no_notes(tmp_path: Path) -> None:
    pair = open_pair(tiny_verifier(tmp_path / "verifier"), flat(tmp_path / "draft"))
    assert {name: notes(command(pair, name)) for name in SHELLS} == {name: "" for name in SHELLS}
    assert "--speculative-draft-model-quantization" not in options(command(pair, "sglang"))
    assert notes(command(pair, "trtllm")) == "# note: eagle3_layers_to_capture counts outputs of layers; the plan's (2, 4, 5) count inputs"


def test_revisions_are_pinned_where_an_option_exists(pair: Pair) -> None:
    hub = Pair(replace(pair.verifier, name="org/verifier", revision="aaa"), replace(pair.draft, name="org/draft", revision="bbb"))
    said = options(command(hub))
    assert said["--revision"] == "aaa"
    assert json.loads(said["--speculative-config"])["revision"] == "bbb"
    said = options(command(hub, "sglang"))
    assert (said["--revision"], said["--speculative-draft-model-revision"]) == ("aaa", "bbb")
    text = command(hub, "trtllm")
    assert trtllm(text)[0]["revision"] == "aaa"
    assert "revision bbb" in notes(text)


def test_vllm_0_11_admits_that_it_takes_the_verifiers_quantization(pair: Pair, tmp_path: Path) -> None:
    said = notes(command(pair, "vllm-0.11.0"))
    assert "quantization becomes compressed-tensors" in said and "the plan has none" in said and "0.11.1" in said
    plain = open_pair(*tiny_pair(tmp_path / "plain"))
    assert notes(command(plain, "vllm-0.11.0")) == ""
    assert notes(command(resolve(pair, "vllm-0.11.0"), "vllm-0.11.0")) == "", "a plan under that engine's policy says the same"


def test_plan_that_no_option_can_ask_for(pair: Pair) -> None:
    said = notes(command(resolve(pair, "vllm-0.11.0")))
    assert "quantization becomes none, the plan has compressed-tensors" in said
    said = notes(command(resolve(pair, overrides={"rope_theta": 5e5, "norm_before_residual": False})))
    assert "rope becomes theta 10000, the plan has theta 500000" in said
    assert "norm_before_residual becomes True, the plan has False" in said


def test_quantized_draft_is_left_to_its_own_files(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", draft_config(quantization_config=w4a16_section()), pack_w4a16(draft_tensors()))
    pair = open_pair(tiny_w4a16_verifier(tmp_path / "verifier"), draft)
    assert "--speculative-draft-model-quantization" not in options(command(pair, "sglang"))
    named = {"quantization": "compressed-tensors"}
    assert options(command(pair, "sglang", speculative_config=named))["--speculative-draft-model-quantization"] == "compressed-tensors"
    assert json.loads(options(command(pair, speculative_config=named))["--speculative-config"])["quantization"] == "compressed-tensors"
    for plan in (pair, resolve(pair)):
        with pytest.raises(ConfigError, match="awq"):
            command(plan, speculative_config={"quantization": "awq"})


# config of a flat draft beside 8 layers, overrides -> word that each engine's notes must have (None: no note on layers)
LAYERS: list[tuple[dict[str, Any], dict[str, Any], dict[str, str | None], set[int] | None]] = [
    ({}, {}, {"vllm": None, "vllm-0.11.0": None, "sglang": None}, {1, 3, 4}),
    (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, {},
        {"vllm": None, "vllm-0.11.0": "aux_layers becomes (2, 4, 5)", "sglang": "becomes (2, 4, 5), the plan has (1, 3, 6)"}, {0, 2, 5},
    ),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, {},
        {"vllm": "(1, 3, 4)", "vllm-0.11.0": None, "sglang": None}, {1, 3, 4},
    ),
    (
        {}, {"aux_layers": (2, 3, 8)},
        {"vllm": "[2, 3, 8] at the top level", "vllm-0.11.0": "becomes (2, 4, 5)", "sglang": "becomes (2, 4, 5)"}, {1, 2, 7},
    ),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}, {"aux_layer_convention": "output"},
        {"vllm": "[3, 5, 7] at the top level", "sglang": "becomes (2, 4, 6), the plan has (3, 5, 7)"}, {2, 4, 6},
    ),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, {},
        {"vllm": None, "vllm-0.11.0": None, "sglang": "before PR 25454"}, {1, 3, 4},
    ),
    ({}, {"aux_layers": (0, 3, 8)}, {"vllm": "[0, 3, 8]", "sglang": "(0, 3, 8)", "trtllm": "the input of layer 0 has no number"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "overrides", "expected", "captured"), LAYERS)
def test_auxiliary_layers(
    tmp_path: Path, changes: dict[str, Any], overrides: dict[str, Any], expected: dict[str, str | None], captured: set[int] | None
) -> None:
    pair = open_pair(tiny_verifier(tmp_path / "verifier"), flat(tmp_path / "draft", **changes))
    plan = resolve(pair, overrides=overrides)
    for engine, word in expected.items():
        said = notes(command(plan, engine))
        assert said == "" if word is None else word in said, engine
    text = command(plan, "trtllm")
    assert trtllm(text)[1].get("eagle3_layers_to_capture") == captured
    assert "becomes" not in notes(text)


def test_draft_that_only_the_plan_can_load(tmp_path: Path) -> None:
    """Four states and no list of them: the files do not say which, and 0.11.0 always takes three."""
    tensors = {**draft_tensors(), "fc.weight": torch.zeros(HIDDEN, 4 * HIDDEN)}
    draft = write(tmp_path / "draft", draft_config(eagle_aux_hidden_state_layer_ids=None), tensors)
    plan = resolve(open_pair(tiny_verifier(tmp_path / "verifier"), draft), overrides={"aux_layers": (2, 3, 4, 5)})
    said = notes(command(plan))
    assert "cannot load this pair as its files are" in said and "fc reads 4 states" in said
    assert "cannot load this pair" in notes(command(plan, "vllm-0.11.0"))
    assert trtllm(command(plan, "trtllm"))[1]["eagle3_layers_to_capture"] == {1, 2, 3, 4}


def test_shorter_draft(tmp_path: Path) -> None:
    pair = open_pair(tiny_verifier(tmp_path / "verifier"), flat(tmp_path / "draft", max_position_embeddings=128))
    assert "128 is raised to the verifier's 512" in notes(command(pair)) and "128 is raised" in notes(command(pair, "sglang"))
    assert "--max-model-len 128" in notes(command(pair, "vllm-0.11.0"))


SERVING = {
    "num_speculative_tokens": 4, "max_model_len": 512, "attention_backend": "FLASH_ATTN", "enforce_eager": True, "kv_cache_dtype": "auto",
    "draft_load_config": {"load_format": "dummy", "use_tqdm_on_load": False},
}  # fmt: skip


def test_settings_of_engines_are_carried_or_named(pair: Pair) -> None:
    whole = json.loads(options(command(pair, speculative_config=SERVING))["--speculative-config"])
    assert whole == {"method": "eagle3", "model": pair.draft.name, **SERVING}
    assert parse_speculative_config(whole) == parse_speculative_config({"method": "eagle3", "model": pair.draft.name, **SERVING})
    left = {
        "vllm-0.11.0": ("attention_backend", "draft_load_config", "kv_cache_dtype"),
        "sglang": ("attention_backend", "enforce_eager", "max_model_len"),
        "trtllm": ("attention_backend", "enforce_eager", "max_model_len"),
    }
    for engine, names in left.items():
        said = notes(command(pair, engine, speculative_config=SERVING))
        carried = [key for key in SERVING if f"speculative_config.{key} " not in said]
        assert sorted(set(SERVING) - set(carried)) == sorted(names), engine
    old = json.loads(options(command(pair, "vllm-0.11.0", speculative_config=SERVING))["--speculative-config"])
    assert old == {"method": "eagle3", "model": pair.draft.name, "num_speculative_tokens": 4, "max_model_len": 512, "enforce_eager": True}
    text = command(pair, "sglang", speculative_config=SERVING)
    assert options(text)["--speculative-draft-load-format"] == "dummy"
    assert "use_tqdm_on_load" in notes(text)
    text = command(pair, "trtllm", speculative_config=SERVING)
    assert trtllm(text)[1]["load_format"] == "dummy"
    assert "use_tqdm_on_load" in notes(text)


def test_k_from_the_call_the_config_or_three(pair: Pair) -> None:
    def steps(*given: int, **config: Any) -> str:
        return options(command(pair, "sglang", *given, speculative_config=config))["--speculative-num-steps"]

    assert steps() == "3"
    assert steps(num_speculative_tokens=7) == "7"
    assert steps(2) == "2"
    assert steps(2, num_speculative_tokens=2) == "2"
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 2, .* is 7"):
        steps(2, num_speculative_tokens=7)
    with pytest.raises(ConfigError, match="num_speculative_tokens is 0"):
        steps(0)


def test_unknown_engine_and_another_draft(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"'tgi'.*vllm.*sglang.*trtllm"):
        command(pair, "tgi")
    with pytest.raises(ConfigError, match="other/draft"):
        command(pair, speculative_config={"model": "other/draft"})


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_in_a_checkpoint_leaves_its_quotes(tmp_path: Path, engine: str) -> None:
    """Names and config texts are data: they end no comment, no quote and no line."""
    evil = "x'\"\nvllm serve evil; `id` $(id) #"
    draft = flat(tmp_path / "draft", architectures=[evil], eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    opened = open_pair(tiny_w4a16_verifier(tmp_path / "verifier"), draft)
    pair = Pair(replace(opened.verifier, name=f"V {evil}"), replace(opened.draft, name=f"D {evil}"))
    text = command(resolve(pair, "vllm-0.11.0", overrides={"rope_theta": 5e5}), engine)
    if engine == "trtllm":
        outer, inner = trtllm(text)
        assert (outer["model"], inner["speculative_model"]) == (pair.verifier.name, pair.draft.name)
    else:
        words = arguments(text)
        assert pair.verifier.name in words and words.count("vllm") + words.count("python") == 1
        assert any(json.dumps(pair.draft.name) in word or pair.draft.name == word for word in words)


def test_load_configs_of_the_pair(tmp_path: Path) -> None:
    load = {"load_format": "safetensors", "download_dir": "/cache", "device": "cpu"}
    pair = open_pair(*tiny_pair(tmp_path), load_config=load, draft_load_config={"load_format": "hf"})
    said = options(command(pair))
    assert (said["--load-format"], said["--download-dir"]) == ("safetensors", "/cache")
    assert json.loads(said["--speculative-config"])["draft_load_config"] == {"load_format": "hf"}
    assert notes(command(pair)) == "# note: of the verifier's load config device is left out"
    said = options(command(pair, "sglang"))
    assert (said["--load-format"], said["--speculative-draft-load-format"]) == ("safetensors", "auto")
    assert "load_config becomes" in notes(command(pair, "vllm-0.11.0"))
    text = command(pair, "trtllm")
    assert "of the verifier's load config load_format, download_dir, device is left out" in notes(text)
    assert "of draft_load_config only load_format 'dummy' has an effect; left out: load_format" in notes(text)
    assert "load_format" not in trtllm(text)[1]
    with pytest.raises(ConfigError, match=r"draft_load_config is .*load_format=pt.* opened with load_format=hf"):
        command(pair, speculative_config={"draft_load_config": {"load_format": "pt"}})
    unset = open_pair(*tiny_pair(tmp_path / "unset"))
    assert "--speculative-draft-load-format" not in options(command(unset, "sglang"))


def test_config_of_the_pair_counts_where_the_call_has_none(tmp_path: Path) -> None:
    verifier, draft = tiny_verifier(tmp_path / "verifier"), write(tmp_path / "draft", draft_config(), draft_tensors())
    config = {"model": str(draft), "num_speculative_tokens": 4, "attention_backend": "FLASH_ATTN", "quantization": "none"}
    pair = open_pair(verifier, speculative_config=config)
    for plan in (pair, resolve(pair)):
        assert json.loads(options(command(plan))["--speculative-config"]) == {
            "method": "eagle3", "model": str(draft), "num_speculative_tokens": 4, "attention_backend": "FLASH_ATTN",
        }  # fmt: skip
        assert notes(command(plan)) == ""
    assert json.loads(options(command(pair, speculative_config={}))["--speculative-config"])["num_speculative_tokens"] == 3


def test_plain_draft_that_declares_a_quantization(tmp_path: Path) -> None:
    """No engine can be told that the section is stale; the comments say what each makes of it."""
    draft = write(tmp_path / "draft", draft_config(quantization_config=w4a16_section()), draft_tensors())
    pair = open_pair(tiny_w4a16_verifier(tmp_path / "verifier"), draft, speculative_config={"quantization": "none"})
    assert resolve(pair)["quantization"] is None
    for engine in ENGINES:
        assert "quantization becomes compressed-tensors pack-quantized W4, the plan has none" in notes(command(pair, engine)), engine

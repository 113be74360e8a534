"""Reported failures of loading and configuration, by id, each with its right outcome (kinds: load, quant as far as configs decide,
config).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects import EXAMPLES, LLAMA3, Shape, canonical_tensors, flat, midlayer, speculators
from tiny import VOCAB, tiny_verifier, tiny_w4a16_verifier, verifier_config, verifier_tensors, write
from torch import Tensor

import specbench as sb
from specbench.errors import CheckpointError, CheckpointFileError, ConfigError
from specbench.models.blocks import inverse_frequencies

TOKENS = torch.tensor([[3, 9, 27, 81, 243]])


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("cases") / "verifier")


def draft(
    folder: Path, config: dict[str, Any] | None = None, shape: Shape | None = None, tensors: dict[str, Tensor] | None = None, **more: Any
) -> Path:
    """D0: a flat midlayer draft, with config keys, shape or tensors changed; a key set to None is removed."""
    shape = shape or Shape()
    merged = {**flat(shape, "LlamaForCausalLMEagle3"), **(config or {})}
    stored = {midlayer(k): v for k, v in (canonical_tensors(shape) if tensors is None else tensors).items()} | more.get("extra", {})
    return write(folder, {k: v for k, v in merged.items() if v is not None}, stored)


@torch.inference_mode()
def logits(verifier: Path, folder: Path, **options: Any) -> Tensor:
    """Draft logits of five pairs on fixed states."""
    pair = sb.open_pair(verifier, folder)
    loaded = sb.load_draft(pair, verifier=sb.load_verifier(pair), **options)
    aux = torch.randn(1, 5, loaded.config.num_aux_layers * loaded.config.target_hidden_size, generator=torch.Generator().manual_seed(0))
    states = loaded(TOKENS, loaded.fuse(aux), loaded.step(torch.arange(5)[None], 5), loaded.new_cache(5))
    return loaded.logits(states)


def lossless(verifier: Path, folder: Path, new: int = 16, prompt: int = 4, **options: Any) -> sb.text.Generations:
    pair = sb.open_pair(verifier, folder)
    target = sb.load_verifier(pair)
    loaded = sb.load_draft(pair, verifier=target, **options)
    prompts = [list(range(5, 5 + prompt))]
    plain = sb.generate(target, None, prompts, num_speculative_tokens=0, max_new_tokens=new)
    speculative = sb.generate(target, loaded, prompts, num_speculative_tokens=3, max_new_tokens=new)
    assert plain.token_ids == speculative.token_ids
    return speculative


def refused(verifier: Path, folder: Path, *words: str, kind: type[Exception] = ConfigError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        sb.load_draft(sb.open_pair(verifier, folder), **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


def test_b001_architecture_of_a_plain_model_around_eagle3_tensors(verifier: Path, tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "draft_vocab_size": None})
    plan = sb.resolve(sb.open_pair(verifier, folder))
    assert plan["draft_vocab_size"] == 64
    assert [w for w in plan.warnings if "architectures" in w]
    sb.load_draft(plan.pair)


def test_b002_every_spelling_of_the_architecture(verifier: Path, tmp_path: Path) -> None:
    names = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "EagleLlamaForCausalLM", None, "FooForCausalLM"]
    outputs = [logits(verifier, draft(tmp_path / str(i), {"architectures": [n] if n else None})) for i, n in enumerate(names)]
    assert all(torch.equal(outputs[0], o) for o in outputs[1:])
    foo = sb.resolve(sb.open_pair(verifier, tmp_path / "5"))
    assert any("FooForCausalLM" in w for w in foo.warnings)
    tiny_verifier(tmp_path / "plain", layers=1, architectures=["FooForCausalLM"])
    refused(verifier, tmp_path / "plain", "not an EAGLE-3 draft", "Eagle3LlamaForCausalLM")


def test_b003_head_dim_is_not_hidden_over_heads(verifier: Path, tmp_path: Path) -> None:
    wide = Shape(heads=8, kv_heads=4, head_dim=16)
    assert sb.resolve(sb.open_pair(verifier, draft(tmp_path / "a", {"head_dim": 16}, wide)))["head_dim"] == 16
    plan = sb.resolve(sb.open_pair(verifier, draft(tmp_path / "b", {}, wide)))
    assert plan["head_dim"] == 16 and any("inferred" in w for w in plan.warnings)
    assert torch.equal(logits(verifier, tmp_path / "a"), logits(verifier, tmp_path / "b"))
    refused(verifier, draft(tmp_path / "c", {"head_dim": 8}, wide), "q_proj", "[128, 128]", "[64, 128]", kind=CheckpointError)


def test_b005_own_embedding_or_the_verifiers(verifier: Path, tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", {}, Shape(own_embedding=True))
    pair = sb.open_pair(verifier, folder)
    assert sb.resolve(pair)["embed_tokens"] == "draft"
    assert sb.resolve(pair, overrides={"embed_tokens": "verifier"})["embed_tokens"] == "verifier"
    with pytest.warns(UserWarning, match="mean cosine of"):
        own = logits(verifier, folder)
    borrowed = logits(verifier, folder, overrides={"embed_tokens": "verifier"})
    assert not torch.equal(own, borrowed)
    assert lossless(verifier, folder).token_ids == lossless(verifier, folder, overrides={"embed_tokens": "verifier"}).token_ids


def test_b006_an_embedding_of_another_width_is_never_shared(verifier: Path, tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", {"target_hidden_size": 64}, Shape(hidden=32, heads=2, own_embedding=True))
    for policy in ("draft", "vllm-0.11.0"):
        assert sb.resolve(sb.open_pair(verifier, folder), policy)["embed_tokens"] == "draft"
    refused(verifier, folder, "[256, 32]", "[256, 64]", overrides={"embed_tokens": "verifier"})
    lossless(verifier, folder)


@torch.inference_mode()
def test_b007_proposals_are_mapped(verifier: Path, tmp_path: Path) -> None:
    from specbench.decode.draft import EagleDraft

    pair = sb.open_pair(verifier, draft(tmp_path / "d"))
    loaded = sb.load_draft(pair)
    chain = EagleDraft(loaded)
    chain.begin(1, 300)
    chain.extend(TOKENS, torch.randn(1, 5, 192), torch.arange(5)[None], torch.tensor([4]), 0, 5, True)
    proposals = chain.propose(200, torch.tensor([6]), 6).tokens
    assert bool((proposals % 4 == 0).all()) and proposals.max() > 64
    expanded = loaded.expand(torch.randn(64)).softmax(-1)
    assert expanded.shape == (256,) and bool((expanded[torch.arange(256) % 4 != 0] == 0).all()) and (expanded > 0).sum() == 64


def test_b010_zero_maps(verifier: Path, tmp_path: Path) -> None:
    full = Shape(draft_vocab=VOCAB)
    zeros = canonical_tensors(full) | {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    loaded = sb.load_draft(sb.open_pair(verifier, draft(tmp_path / "a", {}, full, zeros)))
    assert torch.equal(loaded.to_target(torch.arange(VOCAB)), torch.arange(VOCAB))
    wrong = canonical_tensors(Shape()) | {"d2t": torch.zeros(64, dtype=torch.int64)}
    refused(verifier, draft(tmp_path / "b", {}, None, wrong), "t2d", "d2t", kind=CheckpointError)


def test_b011_every_conflicting_vocabulary_number_is_named(verifier: Path, tmp_path: Path) -> None:
    tensors = canonical_tensors(Shape())
    tensors["d2t"] = tensors["d2t"][:50]
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.arange(50) * 4, True)
    message = refused(
        verifier, draft(tmp_path / "d", {}, None, tensors), "draft_vocab_size in config.json 64", "rows of lm_head 64", "entries of d2t 50"
    )
    assert "t2d" in message


def test_b013_layer_counts(verifier: Path, tmp_path: Path) -> None:
    plan = sb.resolve(sb.open_pair(verifier, draft(tmp_path / "a", {"num_hidden_layers": 8})))
    assert plan["num_hidden_layers"] == 1 and any("config.json says 8" in w for w in plan.warnings)
    two = Shape(layers=2)
    lossless(verifier, write(tmp_path / "b", speculators(two), canonical_tensors(two)))
    config = speculators(two)
    config["transformer_layer_config"]["num_hidden_layers"] = 1
    refused(verifier, write(tmp_path / "c", config, canonical_tensors(two)), "num_hidden_layers 1", "layers.1.self_attn.q_proj.weight")


@pytest.mark.parametrize("case", ["none", "verifier itself", "ordinary decoder"])
def test_b014_no_draft_at_all(verifier: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.load.fill", lambda *a, **k: pytest.fail("weights were read"))
    chosen = {"none": None, "verifier itself": verifier, "ordinary decoder": tiny_verifier(tmp_path / "one", layers=1)}[case]
    with pytest.raises(ConfigError, match="fc"):
        sb.load_draft(sb.open_pair(verifier, chosen))


def sharded(folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    config = verifier_config()
    (folder / "config.json").write_text(json.dumps(config))
    tensors, weight_map = verifier_tensors(config), {}
    for i, names in enumerate([sorted(tensors)[j::3] for j in range(3)]):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("damage", ["missing", "empty", "lying index"])
def test_b015_a_damaged_shard_is_named_from_headers(tmp_path: Path, damage: str) -> None:
    folder, second = sharded(tmp_path / "v"), tmp_path / "v" / "model-00002-of-00003.safetensors"
    expected = second.name
    if damage == "missing":
        second.unlink()
    elif damage == "empty":
        second.write_bytes(b"")
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.extra.weight"] = second.name
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        expected = "model.extra.weight"
    with pytest.raises(CheckpointFileError, match=expected):
        sb.open_pair(folder, draft(tmp_path / "d"))


def test_b017_tied_heads(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    tied = sb.load_verifier(sb.open_pair(tiny_verifier(tmp_path / "tied", tie_word_embeddings=True), folder))
    assert tied.lm_head.weight is tied.embed_tokens.weight
    config = verifier_config()
    headless = {k: v for k, v in verifier_tensors(config).items() if k != "lm_head.weight"}
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        sb.load_verifier(sb.open_pair(write(tmp_path / "headless", config, headless), folder))
    both = write(tmp_path / "both", verifier_config(tie_word_embeddings=True), verifier_tensors(config))
    with pytest.warns(UserWarning, match="stored head is used"):
        loaded = sb.load_verifier(sb.open_pair(both, folder))
    assert torch.equal(loaded.lm_head.weight, verifier_tensors(config)["lm_head.weight"])


@pytest.mark.parametrize("key", [True, False, None])
@pytest.mark.parametrize("bias", [True, False])
def test_b018_fc_bias_by_presence(verifier: Path, tmp_path: Path, key: bool | None, bias: bool) -> None:
    folder = draft(tmp_path / "d", {"eagle_fc_bias": key}, Shape(fc_bias=bias))
    plan = sb.resolve(sb.open_pair(verifier, folder))
    assert plan["fc_bias"] == bias
    assert any("eagle_fc_bias" in w for w in plan.warnings) == (key is not None and key != bias)
    loaded = sb.load_draft(plan.pair)
    aux = torch.randn(1, 2, 192)
    stored = canonical_tensors(Shape(fc_bias=bias))
    expected = aux @ stored["fc.weight"].T + (stored["fc.bias"] if bias else 0)
    assert torch.allclose(loaded.fuse(aux), expected, atol=1e-5)


def test_b019_valid_drafts_that_leave_keys_out(verifier: Path, tmp_path: Path) -> None:
    assert sb.resolve(sb.open_pair(verifier, draft(tmp_path / "a", {"rope_theta": 5e5})))["rope"].theta == 5e5
    plan = sb.resolve(
        sb.open_pair(
            verifier, write(tmp_path / "b", speculators(Shape(), eagle_aux_hidden_state_layer_ids=None), canonical_tensors(Shape()))
        )
    )
    assert plan["aux_layers"] == (2, 4, 5) and any("guessed" in w for w in plan.warnings)
    full = Shape(draft_vocab=VOCAB, maps=False)
    for folder in (tmp_path / "a", tmp_path / "b", draft(tmp_path / "c", {}, full)):
        lossless(verifier, folder)


def test_b021_bin_files(verifier: Path, tmp_path: Path) -> None:
    example = next(e for e in EXAMPLES if e.suffix == "bin")
    folder = example.write(tmp_path / "d")
    (folder / "notes.safetensors.json").write_text("{}")
    loaded = sb.load_draft(sb.open_pair(verifier, folder))
    assert torch.equal(loaded.fc.weight, canonical_tensors(example.shape)["fc.weight"])
    both = replace(example, suffix="safetensors").write(tmp_path / "both")
    other = {midlayer(k): v for k, v in (canonical_tensors(example.shape) | {"fc.weight": torch.zeros(64, 192)}).items()}
    torch.save(other, both / "pytorch_model.bin")
    assert torch.equal(sb.load_draft(sb.open_pair(verifier, both)).fc.weight, canonical_tensors(example.shape)["fc.weight"])


FOREIGN_SECTIONS: dict[str, dict[str, Any]] = {
    "W4A16": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}, "ignore": ["lm_head"]},
    "FP8": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": ["lm_head"]},
    "NVFP4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}, "ignore": ["lm_head"]},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "ModelOpt": {},
}


@pytest.mark.parametrize("layout", ["specforge-nested-ids", "speculators-old", "speculators-two-layers", "speculators-qwen3-windows"])
@pytest.mark.parametrize("verifier_format", FOREIGN_SECTIONS)
def test_b023_every_layout_beside_every_format(tmp_path: Path, layout: str, verifier_format: str) -> None:
    """The draft declares nothing, so it is plain, whatever the verifier declares."""
    section = FOREIGN_SECTIONS[verifier_format]
    folder = tiny_verifier(tmp_path / "v", **({"quantization_config": section} if section else {}))
    if not section:
        (folder / "hf_quant_config.json").write_text(
            json.dumps(
                {
                    "producer": {"name": "modelopt"},
                    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
                }
            )
        )
    example = next(e for e in EXAMPLES if e.name == layout)
    pair = sb.open_pair(folder, example.write(tmp_path / "d"))
    plan = sb.resolve(pair)
    assert plan["quantization"] is None and plan["edge_quantization"] is None
    assert plan.settings["quantization"].verifier != "none"
    loaded = sb.load_draft(pair)
    assert torch.equal(loaded.layers[0].mlp.down_proj.weight, canonical_tensors(example.shape)["layers.0.mlp.down_proj.weight"])


def test_b022_plain_draft_beside_a_packed_verifier(tmp_path: Path) -> None:
    packed = tiny_w4a16_verifier(tmp_path / "v")
    plan = sb.resolve(sb.open_pair(packed, draft(tmp_path / "d", {"torch_dtype": "bfloat16"})))
    row = plan.to_frame().set_index("setting").loc["quantization"]
    assert row["value"] == "none" and row["verifier"] == "compressed-tensors pack-quantized W4"
    lossless(packed, tmp_path / "d")


def test_b024_what_is_unset_stays_with_the_draft(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path / "v", quantization_config=FOREIGN_SECTIONS["AWQ"])
    plan = sb.resolve(sb.open_pair(folder, draft(tmp_path / "d")))
    source = plan.settings["quantization"].source
    assert plan["quantization"] is None and "declares nothing" in source and "only plain .weight tensors" in source
    refused(folder, tmp_path / "d", "'awq' was asked for", "declares none", overrides={"quantization": "awq"})


def test_b034_none_is_not_unset(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path / "v", quantization_config=FOREIGN_SECTIONS["GPTQ"])
    pair = sb.open_pair(folder, draft(tmp_path / "d"))
    assert sb.resolve(pair, overrides={"quantization": "none"})["quantization"] is None
    tensors = canonical_tensors(Shape())
    down = tensors.pop("layers.0.mlp.down_proj.weight")
    packed = {"midlayer.mlp.down_proj.qweight": torch.zeros(128 // 8, down.shape[0], dtype=torch.int32)}
    refused(
        folder,
        draft(tmp_path / "p", {}, None, tensors, extra=packed),
        "'none' was asked for",
        "qweight",
        overrides={"quantization": "none"},
    )
    refused(folder, tmp_path / "p", "declares no quantization", "qweight")


@pytest.mark.parametrize("nested", [{"quant_algo": None, "kv_cache_quant_algo": None}, {}])
def test_b036_an_empty_quantization_file_declares_nothing(verifier: Path, tmp_path: Path, nested: dict[str, Any]) -> None:
    folder = draft(tmp_path / "d")
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": nested}))
    assert sb.resolve(sb.open_pair(verifier, folder))["quantization"] is None
    lossless(verifier, folder)


def test_b041_packed_tensors_without_a_section_are_refused(tmp_path: Path) -> None:
    folder = tiny_w4a16_verifier(tmp_path / "v")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"(?s)unexpected.*weight_packed.*missing"):
        sb.load_verifier(sb.open_pair(folder, draft(tmp_path / "d")))


def test_b046_the_drafts_own_load_settings(verifier: Path, tmp_path: Path) -> None:
    tensors = canonical_tensors(Shape()) | {"fc.weight": torch.full((64, 192), 0.5)}
    folder = draft(tmp_path / "d", {}, None, tensors)
    pair = sb.open_pair(verifier, folder, load_config={"load_format": "dummy"}, draft_load_config={"load_format": "safetensors"})
    assert bool((sb.load_draft(pair).fc.weight == 0.5).all())
    unset = sb.open_pair(verifier, folder, load_config={"load_format": "dummy"})
    assert "inherited" in sb.resolve(unset).settings["load_format"].note
    assert not bool((sb.load_draft(unset).fc.weight == 0.5).any())


@pytest.mark.parametrize("size", [2, 4])
def test_b048_tensor_parallel_drafts_are_refused(verifier: Path, tmp_path: Path, size: int) -> None:
    folder = draft(tmp_path / "d")
    sb.open_pair(verifier, speculative_config={"model": str(folder), "draft_tensor_parallel_size": 1})
    with pytest.raises(ConfigError, match=f"draft_tensor_parallel_size.*{size}"):
        sb.open_pair(verifier, speculative_config={"model": str(folder), "draft_tensor_parallel_size": size})


def test_b049_a_draft_with_a_short_rotary_table(verifier: Path, tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", {"max_position_embeddings": 16})
    for prompt in (20, 14):
        assert lossless(verifier, folder, new=12, prompt=prompt).rounds_past_draft_limit > 0
    assert lossless(verifier, folder, new=4, prompt=2).rounds_past_draft_limit == 0


def test_b051_the_drafts_length_is_its_own(tmp_path: Path) -> None:
    yarn = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    folder = tiny_verifier(tmp_path / "v", max_position_embeddings=1024, rope_parameters=yarn)
    plan = sb.resolve(sb.open_pair(folder, draft(tmp_path / "d")))
    setting = plan.settings["max_position_embeddings"]
    assert (setting.value, setting.verifier) == (512, 1024) and "extended" in setting.note
    assert plan["rope"].kind == "default"
    lossless(folder, tmp_path / "d", new=8, prompt=200)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6),
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, None),
        ({}, 1e4),
    ],
)
def test_b053_where_the_rotary_base_is(verifier: Path, tmp_path: Path, keys: dict[str, Any], theta: float | None) -> None:
    folder = draft(tmp_path / "d", keys)
    if theta is None:
        refused(verifier, folder, "1000000", "10000")
        assert sb.resolve(sb.open_pair(verifier, folder), overrides={"rope_theta": 1e4})["rope"].theta == 1e4
        return
    setting = sb.resolve(sb.open_pair(verifier, folder)).settings["rope"]
    assert setting.value.theta == theta and ("default" in setting.source) == (not keys)


def test_b055_rotary_scalings(verifier: Path, tmp_path: Path) -> None:
    scaling = {"factor": 32.0, "original_max_position_embeddings": 64}
    new = sb.resolve(sb.open_pair(verifier, draft(tmp_path / "a", {"rope_scaling": {"rope_type": "yarn", **scaling}})))["rope"]
    old = sb.resolve(sb.open_pair(verifier, draft(tmp_path / "b", {"rope_scaling": {"type": "yarn", **scaling}})))["rope"]
    assert new == old and new.kind == "yarn"
    own = tiny_verifier(tmp_path / "v", rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", **scaling})
    loaded = sb.load_verifier(sb.open_pair(own, tmp_path / "a"))
    assert torch.equal(inverse_frequencies(new, 16)[0], inverse_frequencies(loaded.config.rope, 16)[0])
    refused(verifier, draft(tmp_path / "c", {"rope_scaling": {"rope_type": "foo", **scaling}}), "'foo'", "yarn")
    assert sb.resolve(sb.open_pair(verifier, draft(tmp_path / "e", {"rope_scaling": LLAMA3})))["rope"].kind == "llama3"


@torch.inference_mode()
def test_b056_two_conventions_one_set_of_states(verifier: Path, tmp_path: Path) -> None:
    outputs = draft(tmp_path / "a", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}})
    inputs = draft(tmp_path / "b", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}})
    plans = [
        sb.resolve(sb.open_pair(verifier, outputs), overrides={"aux_layer_convention": "output"}),
        sb.resolve(sb.open_pair(verifier, inputs), overrides={"aux_layer_convention": "input"}),
    ]
    assert plans[0]["aux_layers"] == plans[1]["aux_layers"] == (2, 4, 7)
    setting = plans[0].settings["aux_layers"]
    assert "output" in setting.note
    loaded = sb.load_verifier(plans[0].pair)
    _, aux = loaded(TOKENS, loaded.step(torch.arange(5)[None], 5), loaded.new_cache(5), (2, 4, 7))
    from transformers import AutoModelForCausalLM

    states = AutoModelForCausalLM.from_pretrained(verifier)(TOKENS, output_hidden_states=True).hidden_states
    assert torch.allclose(aux, torch.cat([states[i] for i in (2, 4, 7)], -1), atol=1e-4)
    undecided = sb.resolve(sb.open_pair(verifier, inputs))
    assert any("undecidable" in w for w in undecided.warnings)
    lossless(verifier, outputs, overrides={"aux_layer_convention": "input"})


def test_b057_guessed_taps_are_said_to_be_guessed(verifier: Path, tmp_path: Path) -> None:
    plan = sb.resolve(sb.open_pair(verifier, draft(tmp_path / "d")))
    assert plan["aux_layers"] == (2, 4, 5)
    assert any("guessed" in w and "eagle_aux_hidden_state_layer_ids" in w for w in plan.warnings)
    refused(verifier, tmp_path / "d", "fc reads 3 states", "2 ids", overrides={"aux_layers": (2, 5)})


@pytest.mark.parametrize("count", [1, 2, 5])
def test_b058_default_taps_on_shallow_verifiers(tmp_path: Path, count: int) -> None:
    refused(tiny_verifier(tmp_path / "v", layers=count), draft(tmp_path / "d"), f"beside {count} layers", f"0..{count}")


def test_b058_explicit_taps_out_of_range(verifier: Path, tmp_path: Path) -> None:
    refused(verifier, draft(tmp_path / "a", {"eagle_aux_hidden_state_layer_ids": [2, 8, 9]}), "[9]", "0..8")
    refused(verifier, draft(tmp_path / "b", {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}), "distinct")


def test_b060_another_verifiers_draft(verifier: Path, tmp_path: Path) -> None:
    narrow = Shape(hidden=32, heads=2, own_embedding=True)
    lossless(verifier, draft(tmp_path / "a", {"target_hidden_size": 64}, narrow))
    refused(verifier, draft(tmp_path / "b", {}, replace(narrow, target=32)), "expects a verifier of hidden size 32", "has 64")


def test_b061_query_and_key_norms(verifier: Path, tmp_path: Path) -> None:
    tensors = canonical_tensors(Shape(qk_norm=True))
    with_norms = logits(verifier, draft(tmp_path / "a", {}, None, tensors))
    without = logits(
        verifier, draft(tmp_path / "b", {}, None, {k: v for k, v in tensors.items() if "q_norm" not in k and "k_norm" not in k})
    )
    assert not torch.allclose(with_norms, without, atol=1e-2)


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("family", ["flat", "speculators"])
def test_b063_norm_before_residual(verifier: Path, tmp_path: Path, family: str, flag: bool | None) -> None:
    tensors = canonical_tensors(Shape())
    tensors["layers.0.hidden_norm.weight"] = torch.full((64,), 2.0)
    if family == "flat":
        folder = draft(tmp_path / "d", {"norm_before_residual": flag}, None, tensors)
    else:
        folder = write(tmp_path / "d", speculators(Shape(), norm_before_residual=flag), tensors)
    setting = sb.resolve(sb.open_pair(verifier, folder)).settings["norm_before_residual"]
    assert setting.value == (flag if flag is not None else family == "speculators")
    assert ("default" in setting.source) == (flag is None)
    forced = {value: logits(verifier, folder, overrides={"norm_before_residual": value}) for value in (True, False)}
    assert torch.equal(logits(verifier, folder), forced[setting.value]) and not torch.allclose(forced[True], forced[False], atol=1e-2)


def test_b063_sizes_under_text_config(tmp_path: Path) -> None:
    config = verifier_config()
    tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in verifier_tensors(config).items()}
    folder = write(tmp_path / "v", {"architectures": ["X"], "model_type": "x_vl", "text_config": config}, tensors)
    plan = sb.resolve(sb.open_pair(folder, draft(tmp_path / "d")))
    assert plan["target_hidden_size"] == 64 and plan["aux_layers"] == (2, 4, 5)


def test_b064_norms_before_fc(verifier: Path, tmp_path: Path) -> None:
    joint, each = Shape(fc_input_norm="joint"), Shape(fc_input_norm="each")
    refused(verifier, draft(tmp_path / "a", {"norm_before_fc": True, "fc_norm": True}, joint), "exclude")
    refused(verifier, draft(tmp_path / "b", {"fc_norm": True}), "fc_norm", "absent")
    refused(verifier, draft(tmp_path / "c", {}, each), "fc_norm", "stored")
    lossless(verifier, draft(tmp_path / "d", {"norm_before_fc": True}, joint))
    lossless(verifier, draft(tmp_path / "e", {"fc_norm": True}, each))


def test_b065_differently_padded_vocabularies(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    def with_tokenizer(folder: Path, entries: int) -> Path:
        Tokenizer(models.WordLevel({f"t{i}": i for i in range(entries)}, unk_token="t0")).save(str(folder / "tokenizer.json"))
        return folder

    folder = with_tokenizer(tiny_verifier(tmp_path / "v", vocab_size=272), 250)
    path = draft(tmp_path / "d")
    pair = sb.open_pair(folder, path)
    assert "padded" in sb.resolve(pair).settings["vocab_size"].note
    loaded = sb.load_draft(pair)
    assert loaded.unproposable is not None
    assert loaded.to_target(torch.arange(64))[loaded.unproposable].tolist() == [252]
    assert bool((loaded.logits(torch.randn(1, 3, 64))[..., loaded.unproposable] == float("-inf")).all())
    refused(with_tokenizer(tiny_verifier(tmp_path / "w", vocab_size=272), 260), path, "260", "256")


def test_b068_dtypes_meet_in_the_verifiers(tmp_path: Path) -> None:
    folder = tiny_verifier(tmp_path / "v", dtype="bfloat16")
    half = {k: v.half() if v.is_floating_point() else v for k, v in canonical_tensors(Shape()).items()}
    plan = sb.resolve(sb.open_pair(folder, draft(tmp_path / "a", {"torch_dtype": "float16"}, None, half)))
    assert plan["dtype"] == "bfloat16" and "float16" in plan.settings["dtype"].note
    assert sb.load_draft(plan.pair).fc.weight.dtype == torch.bfloat16
    short = canonical_tensors(Shape())
    short["d2t"] = short["d2t"].int()
    loaded = sb.load_draft(sb.open_pair(folder, draft(tmp_path / "b", {}, None, short)))
    assert loaded.d2t.dtype == torch.int64 and torch.equal(loaded.d2t, canonical_tensors(Shape())["d2t"])
    big = canonical_tensors(Shape())
    big["fc.weight"][0, 0] = 1e6
    refused(
        folder, draft(tmp_path / "c", {"torch_dtype": "float32"}, None, big), "fc.weight", "float16", kind=CheckpointError, dtype="float16"
    )

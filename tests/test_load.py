"""Executing a plan: the old engine's KeyError and why it arises, values, sharing, damaged drafts, memory."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import draft_config, draft_tensors, tiny_draft, tiny_verifier, tiny_w4a16_verifier, verifier_config, verifier_tensors, write

import specbench as sb
from specbench.errors import CheckpointError, CheckpointKeyError, ConfigError
from specbench.quant.linear import Linear

OLD_ENGINE = "vllm-0.11.0"


def pair_of(tiny, verifier="verifier", draft=None):
    return sb.open_pair(tiny[verifier], draft or tiny["draft"])


@pytest.fixture
def draft_with(tmp_path):
    """A draft folder whose tensors are passed through `change`."""

    def make(change, **config):
        return write(tmp_path / "draft", draft_config(**config), change(draft_tensors()))

    return make


# A plain draft beside a quantized verifier -----------------------------------------------------------------------------------------------


def test_the_old_engine_meets_a_key_error_at_the_first_packed_module(tiny):
    with pytest.raises(KeyError) as caught:
        sb.load_draft(pair_of(tiny, "w4a16"), OLD_ENGINE, device="cpu")
    error = caught.value
    assert error.args == ("layers.0.mlp.down_proj.weight",)
    assert isinstance(error, CheckpointKeyError) and error.tensor == "layers.0.mlp.down_proj.weight"
    assert error.module_parameters == tuple(f"layers.0.mlp.down_proj.weight_{leaf}" for leaf in ("packed", "scale", "shape"))


def test_the_same_draft_beside_a_plain_verifier_loads_under_the_old_engine(tiny):
    draft = sb.load_draft(pair_of(tiny), OLD_ENGINE, device="cpu")
    assert torch.equal(draft.layers[0].mlp.down_proj.weight, draft_tensors()["layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize("verifier", ["verifier", "w4a16"])
def test_reading_the_drafts_own_files_loads_beside_both(tiny, verifier):
    draft = sb.load_draft(pair_of(tiny, verifier), device="cpu")
    stored = draft_tensors()
    layer = draft.layers[0]
    fused = torch.cat([stored[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(layer.self_attn.qkv_proj.weight, fused)
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([stored[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    for name, parameter in {
        "layers.0.mlp.down_proj.weight": layer.mlp.down_proj.weight, "layers.0.self_attn.o_proj.weight": layer.self_attn.o_proj.weight,
        "layers.0.input_layernorm.weight": layer.input_layernorm.weight, "layers.0.hidden_norm.weight": layer.hidden_norm.weight,
        "fc.weight": draft.fc.weight, "norm.weight": draft.norm.weight, "lm_head.weight": draft.lm_head.weight, "d2t": draft.d2t,
    }.items():  # fmt: skip
        assert torch.equal(parameter, stored[name]), name
    assert draft.aux_layers == (2, 4, 5)


def test_the_key_is_the_first_tensor_that_finds_no_parameter_whatever_it_is_called(tiny, tmp_path):
    """Files iterate in name order: without down_proj the next projection is met, under the fused name that is looked up for it."""
    stored = {name: value for name, value in draft_tensors().items() if "down_proj" not in name}
    pair = pair_of(tiny, "w4a16", write(tmp_path / "a", draft_config(), stored))
    with pytest.raises(KeyError) as caught:
        sb.load_draft(pair, OLD_ENGINE, device="cpu")
    assert (caught.value.args[0], caught.value.tensor) == ("layers.0.mlp.gate_up_proj.weight", "layers.0.mlp.gate_proj.weight")
    stored = draft_tensors() | {"layers.0.a.weight": torch.zeros(1)}
    with pytest.raises(KeyError) as caught:
        sb.load_draft(pair_of(tiny, "w4a16", write(tmp_path / "b", draft_config(), stored)), OLD_ENGINE, device="cpu")
    assert caught.value.args[0] == "layers.0.a.weight"


def test_only_packed_modules_cause_it(tiny, tmp_path):
    """The same section with the draft's layers on its ignore list builds plain modules, and nothing is missed."""
    folder = tiny_w4a16_verifier(tmp_path / "v")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:model.layers.8.*"]  # the draft's layer follows the verifier's eight
    (folder / "config.json").write_text(json.dumps(config))
    sb.load_draft(sb.open_pair(folder, tiny["draft"]), OLD_ENGINE, device="cpu")
    config["quantization_config"]["ignore"][-1] = "re:model.layers.8.mlp.*"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(KeyError) as caught:
        sb.load_draft(sb.open_pair(folder, tiny["draft"]), OLD_ENGINE, device="cpu")
    assert (caught.value.args[0], caught.value.tensor) == ("layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.k_proj.weight")


def test_the_draft_of_a_4_bit_pair_decodes(tiny):
    pair = pair_of(tiny, "w4a16")
    verifier = sb.load_verifier(pair, device="cpu")
    draft = sb.load_draft(pair, device="cpu", verifier=verifier)
    plain = sb.generate(verifier, None, [[5, 6, 7]], num_speculative_tokens=0, max_new_tokens=12)
    speculative = sb.generate(verifier, draft, [[5, 6, 7]], num_speculative_tokens=3, max_new_tokens=12)
    assert plain.token_ids == speculative.token_ids


# What is shared --------------------------------------------------------------------------------------------------------------------------


def test_a_borrowed_embedding_is_the_verifiers_own_storage(tiny):
    verifier = sb.load_verifier(pair_of(tiny), device="cpu")
    draft = sb.load_draft(pair_of(tiny), device="cpu", verifier=verifier)
    assert draft.embed_tokens.weight.data_ptr() == verifier.embed_tokens.weight.data_ptr()
    alone = sb.load_draft(pair_of(tiny), device="cpu")
    assert alone.embed_tokens.weight.data_ptr() != verifier.embed_tokens.weight.data_ptr()
    assert torch.equal(alone.embed_tokens.weight, verifier.embed_tokens.weight)


def test_a_draft_with_an_embedding_of_its_own_keeps_it(tiny, draft_with):
    own = torch.randn(256, 64)
    pair = pair_of(tiny, draft=draft_with(lambda tensors: tensors | {"embed_tokens.weight": own}))
    verifier = sb.load_verifier(pair, device="cpu")
    assert torch.equal(sb.load_draft(pair, device="cpu", verifier=verifier).embed_tokens.weight, own)
    thrown_away = sb.load_draft(pair, OLD_ENGINE, device="cpu", verifier=verifier)
    assert thrown_away.embed_tokens is verifier.embed_tokens


@pytest.mark.parametrize("stored", [False, True])
def test_tied_heads_are_one_tensor_unless_the_file_holds_two(tiny, tmp_path, stored):
    config = verifier_config(tie_word_embeddings=True)
    tensors = verifier_tensors(config)
    if stored:
        tensors["lm_head.weight"] = torch.randn(256, 64)
    pair = sb.open_pair(write(tmp_path / "v", config, tensors), tiny["draft"])
    if stored:
        with pytest.warns(UserWarning, match="the stored head is used"):
            verifier = sb.load_verifier(pair, device="cpu")
        assert torch.equal(verifier.lm_head.weight, tensors["lm_head.weight"])
    else:
        verifier = sb.load_verifier(pair, device="cpu")
        assert verifier.lm_head.weight.data_ptr() == verifier.embed_tokens.weight.data_ptr()


def test_an_untied_verifier_without_a_head_is_refused(tiny, tmp_path):
    tensors = verifier_tensors(verifier_config())
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head.weight"):
        sb.load_verifier(sb.open_pair(write(tmp_path / "v", verifier_config(), tensors), tiny["draft"]), device="cpu")


# Damaged or contradictory drafts ---------------------------------------------------------------------------------------------------------


def shifted(tensors):
    return tensors | {"d2t": tensors["d2t"] + 1}


def absolute(tensors):
    return tensors | {"d2t": tensors["d2t"] + torch.arange(64)}


def repeated(tensors):
    return tensors | {"d2t": tensors["d2t"].index_fill(0, torch.tensor([1]), -1)}


def negative(tensors):
    return tensors | {"d2t": tensors["d2t"] - 5}


def unmarked(tensors):
    return tensors | {"t2d": tensors["t2d"].roll(1)}


def marked_more(tensors):
    return tensors | {"t2d": torch.ones(256, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shifted, "t2d marks 64 ids, d2t leads to 64"),
        (absolute, "found 0..315.*offsets, not ids"),
        (repeated, "63 distinct of 64"),
        (negative, "found -5..247"),
        (unmarked, "t2d marks 64 ids"),
        (marked_more, "t2d marks 256 ids, d2t leads to 64"),
    ],
)
def test_maps_that_disagree_are_refused(tiny, draft_with, change, message):
    with pytest.raises(CheckpointError, match=message):
        sb.load_draft(pair_of(tiny, draft=draft_with(change)), device="cpu")


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.self_attn.k_proj.weight", "norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_refused_and_named(tiny, draft_with, name, value):
    def damage(tensors):
        tensors[name].view(-1)[-1] = value
        return tensors

    pair = pair_of(tiny, draft=draft_with(damage))
    with pytest.raises(CheckpointError, match=rf"{name} holds values that are not finite"):
        sb.load_draft(pair, device="cpu")
    sb.load_draft(pair, OLD_ENGINE, device="cpu")


def test_a_borrowed_embedding_that_is_not_finite_is_refused(tiny, tmp_path):
    tensors = verifier_tensors(verifier_config())
    tensors["model.embed_tokens.weight"][3, 3] = float("nan")
    pair = sb.open_pair(write(tmp_path / "v", verifier_config(), tensors), tiny["draft"])
    with pytest.raises(CheckpointError, match="embed_tokens.weight holds values that are not finite"):
        sb.load_verifier(pair, device="cpu")
    with pytest.raises(CheckpointError, match="embed_tokens.weight holds values that are not finite"):
        sb.load_draft(pair, device="cpu")


def test_missing_and_unexpected_tensors_are_refused_before_a_weight_is_read(tiny, draft_with, monkeypatch):
    monkeypatch.setattr("os.preadv", lambda *_: pytest.fail("a weight was read"))
    up = "layers.0.mlp.up_proj.weight"
    for name, value, message in (
        ("layers.0.self_attn.o_proj.weight", None, r"missing \(1\): layers.0.self_attn.o_proj.weight"),
        ("layers.0.mlp.extra_proj.weight", torch.zeros(1), r"unexpected \(1\): layers.0.mlp.extra_proj.weight"),
        (up, torch.zeros(100, 64), r"up_proj.weight: stored \[100, 64\], expected \[128, 64\]"),
        (up, torch.zeros(128, 64, dtype=torch.int8), "up_proj.weight: stored I8, expected float32"),
    ):
        changed = {k: v for k, v in (draft_tensors() | {name: value}).items() if v is not None}
        with pytest.raises(CheckpointError, match=message):
            sb.load_draft(pair_of(tiny, draft=draft_with(lambda _, changed=changed: changed)), device="cpu")


def test_a_file_that_changed_after_it_was_opened_is_noticed(tiny, tmp_path):
    pair = pair_of(tiny, draft=tiny_draft(tmp_path / "draft"))
    path = tmp_path / "draft" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OSError, match="model.safetensors"):
        sb.load_draft(pair, device="cpu")


# Dtypes, devices, shards, end-of-sequence ids --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_is_the_verifiers_unless_asked(tiny, tmp_path, dtype):
    pair = sb.open_pair(tiny_verifier(tmp_path / "v", dtype=dtype), tiny["draft"])
    draft = sb.load_draft(pair, device="cpu")
    assert {p.dtype for p in draft.parameters()} == {getattr(torch, dtype), torch.int64}
    assert torch.equal(draft.fc.weight, draft_tensors()["fc.weight"].to(getattr(torch, dtype)))
    assert sb.load_draft(pair, device="cpu", dtype="float32").fc.weight.dtype == torch.float32


def test_a_dtype_that_is_none_is_refused(tiny):
    for name in ("int8", "float33", "Tensor"):
        with pytest.raises(ConfigError, match=f"dtype is '{name}' \\(requested\\)"):
            sb.load_draft(pair_of(tiny), device="cpu", dtype=name)


def test_shards_and_a_single_file_load_alike(tiny, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(draft_config()))
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(draft_tensors())}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in draft_tensors().items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one, other = sb.load_draft(pair_of(tiny), device="cpu"), sb.load_draft(pair_of(tiny, draft=folder), device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("eos", "ids"), [(2, {2}), ([2, 7], {2, 7}), (None, set())])
def test_where_decoding_ends(tiny, tmp_path, eos, ids):
    pair = sb.open_pair(tiny_verifier(tmp_path / "v", eos_token_id=eos), tiny["draft"])
    assert sb.load_verifier(pair, device="cpu").eos_ids == ids


def test_generation_config_decides_where_decoding_ends(tiny, tmp_path):
    """As transformers' generate: Llama 3 Instruct names one id in config.json and the turn's end only there."""
    folder = tiny_verifier(tmp_path / "v", eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert sb.load_verifier(sb.open_pair(folder, tiny["draft"]), device="cpu").eos_ids == {2, 9}
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert sb.load_verifier(sb.open_pair(folder, tiny["draft"]), device="cpu").eos_ids == {2}


def test_no_parameter_is_left_without_memory_and_none_is_trained(tiny):
    pair = pair_of(tiny, "w4a16")
    verifier = sb.load_verifier(pair, device="cpu")
    draft = sb.load_draft(pair, device="cpu", verifier=verifier)
    for model in (verifier, draft):
        assert not model.training
        assert all(not p.is_meta and not p.requires_grad for p in model.parameters())
        packed = [m for m in model.modules() if isinstance(m, Linear) and m.scheme is not None]
        assert all(m.kernel is not None and not list(m.parameters()) for m in packed)


def test_the_file_of_this_test_is_the_file_that_is_read(tiny):
    """What `draft_tensors` gives is what lies on disk; the other tests compare with it."""
    stored = load_file(tiny["draft"] / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in draft_tensors().items()) and len(stored) == len(draft_tensors())

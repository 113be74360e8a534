"""Reported failures, by id: what the doctor finds in the files alone, with the code, the severity and the values that disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects import Shape, canonical_tensors, speculators
from doctored import (
    absolute_map,
    attention_only,
    both_heads,
    both_kinds,
    changed,
    damaged,
    draft,
    eagle_1,
    edit_config,
    empty_quantization,
    full_zero_map,
    headless,
    literal_ignore,
    lying_modelopt,
    medusa,
    mixed,
    only_bin,
    packed_head,
    qk_norms,
    quantized_draft,
    quantized_verifier,
    regular_ignore,
    rotated,
    short_map,
    stray_order,
    tokenizer,
    two_layers,
    wide,
    with_riders,
    without,
    zero_map,
)
from stored import BY_NAME, GROUP32, INT4, Case, ct, fp8, gptq, pack_quantized, shuffled_order
from tiny import VOCAB, tiny_draft, tiny_verifier, verifier_config, verifier_tensors, write

import specbench as sb
from specbench.doctor.findings import Report
from specbench.errors import ConfigError

ONLY_SAFETENSORS = {"load_format": "safetensors"}


def plain(folder: Path) -> Path:
    return tiny_verifier(folder)


def right(folder: Path) -> Path:
    return draft(folder)


@dataclass(frozen=True)
class Reported:
    """verifier, draft: how their folders are made. codes: finding -> (severity, words of its evidence or sentence, or of who is affected)."""

    name: str
    codes: dict[str, tuple[str, ...]]
    draft: Callable[[Path], Path] = right
    verifier: Callable[[Path], Path] = plain
    options: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()  # further codes above info


EIGHT_BITS = Case(
    "head", ct("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), lambda w: pack_quantized(w, 8, w.shape[1])
)
EIGHT_BITS.section.update(ignore=[])
EIGHT_BITS.section["config_groups"]["group_0"]["targets"] = ["re:.*lm_head"]
LAYERS_ALONE = Case("layers", ct("pack-quantized", INT4 | GROUP32), lambda w: pack_quantized(w, 4, 32))
LAYERS_ALONE.section["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*", "re:.*self_attn.*"]
REORDERED = Case(
    "order", BY_NAME["GPTQ desc_act"].section | {"modules_in_block_to_not_quantize": ["fc"]},
    lambda w: gptq(w, 32, 1, 4, shuffled_order(w.shape[1], 32)),
)  # fmt: skip

CASES = (
    Reported("B001", {"architecture-unknown": ("warning", "Qwen3ForCausalLM"), "architecture-rewritten": ("info", "vLLM 0.32.0", "q_norm"),
        "architecture-unregistered": ("info", "SGLang")},
        changed(architectures=["Qwen3ForCausalLM"], model_type="qwen3", draft_vocab_size=None, eagle_config=None)),
    Reported("B002 known elsewhere", {"architecture-unregistered": ("info", "Eagle3DraftModel")}, changed(architectures=["Eagle3DraftModel"]), also=("architecture-unknown",)),
    Reported("B002 absent", {"architecture-unknown": ("warning", "absent")}, changed(architectures=None)),
    Reported("B002 unknown", {"architecture-unknown": ("warning", "FooForCausalLM")}, changed(architectures=["FooForCausalLM"])),
    Reported("B002 unknown, another model", {"not-eagle3": ("error", "FooForCausalLM")}, lambda f: tiny_verifier(f, layers=1, architectures=["FooForCausalLM"])),
    Reported("B003 explicit", {}, wide(head_dim=16)),
    Reported("B003 inferred", {"head-dim-inferred": ("warning", "16", "128")}, wide()),
    Reported("B003 wrong", {"shape-mismatch": ("error", "[128, 128]", "[64, 128]")}, wide(head_dim=8)),
    Reported("B005 headers", {"embedding-own": ("info", "embed_tokens")}, changed(Shape(own_embedding=True))),
    Reported("B005 values", {"embedding-unlike": ("warning", "cosine")}, changed(Shape(own_embedding=True)), options={"values": True}),
    Reported("B006", {"embedding-own": ("info",)}, changed(Shape(hidden=32, heads=2, own_embedding=True), target_hidden_size=64)),
    Reported("B007", {}, options={"values": True}),
    Reported("B007 no map", {"map-missing": ("error", "64", "256")}, without("d2t", "t2d")),
    Reported("B007 mask alone", {"map-from-mask": ("warning", "t2d"), "map-missing": ("info", "vLLM 0.32.0")}, without("d2t")),
    Reported("B010 a", {"map-identity": ("info", "all zero")}, full_zero_map, options={"values": True}),
    Reported("B010 b", {"map-invalid": ("error", "d2t", "t2d")}, zero_map, options={"values": True}),
    Reported("B010 absolute", {"map-invalid": ("error", "ids, not offsets")}, absolute_map, options={"values": True}),
    Reported("B011", {"vocabulary-sizes": ("error", "draft_vocab_size in config.json 64", "rows of lm_head 64", "entries of d2t 50", "t2d")}, short_map),
    Reported("B013 a", {"layer-count": ("warning", "8", "1"), "layers-invented": ("info", "vLLM 0.32.0")}, changed(num_hidden_layers=8)),
    Reported("B013 b", {"layers-unbuilt": ("info", "vLLM 0.11.0")}, lambda f: write(f, speculators(Shape(layers=2)), canonical_tensors(Shape(layers=2)))),
    Reported("B013 c", {"layers-unread": ("error", "layers.1")}, two_layers),
    Reported("B014 a decoder", {"not-eagle3": ("error", "fc.weight")}, lambda f: tiny_verifier(f, layers=1)),
    Reported("B015 missing", {"missing-shard": ("error", "model-00002-of-00003.safetensors")}, verifier=damaged("missing")),
    Reported("B015 empty", {"damaged-file": ("error", "model-00002-of-00003.safetensors", "0 bytes")}, verifier=damaged("empty")),
    Reported("B015 lying", {"index-mismatch": ("error", "model.extra.weight")}, verifier=damaged("lying")),
    Reported("B015 path", {"index-outside": ("error", "../elsewhere.safetensors")}, verifier=damaged("path")),
    Reported("B017 tied", {"head-tied": ("info", "tie_word_embeddings")}, verifier=lambda f: tiny_verifier(f, tie_word_embeddings=True)),
    Reported("B017 headless", {"verifier-head-missing": ("error", "lm_head")}, verifier=headless),
    Reported("B017 both", {"tied-flag": ("warning", "lm_head.weight")}, verifier=both_heads),
    *(Reported(f"B018 {key} {bias}", {} if key in (None, bias) else {"switch-contradicted": ("warning", "eagle_fc_bias")},
        changed(Shape(fc_bias=bias), eagle_fc_bias=key)) for key in (True, False, None) for bias in (True, False)),
    Reported("B019 one rotary base", {}, changed(rope_theta=5e5), lambda f: tiny_verifier(f, rope_theta=5e5)),
    Reported("B019 no ids", {"aux-layers-guessed": ("warning", "eagle_aux_hidden_state_layer_ids")},
        lambda f: write(f, speculators(Shape(), eagle_aux_hidden_state_layer_ids=None), canonical_tensors(Shape()))),
    Reported("B019 full vocabulary", {"map-identity": ("info",)}, changed(Shape(draft_vocab=VOCAB, maps=False))),
    Reported("B021 bin", {"pickles": ("info", "pytorch_model.bin")}, only_bin),
    Reported("B021 both", {"other-weights": ("info", "pytorch_model.bin")}, both_kinds),
    Reported("B021 bin, safetensors asked for", {"load-format-conflict": ("error", "pytorch_model.bin")}, only_bin, options={"load_config": ONLY_SAFETENSORS}),
    Reported("B021 bin, its own load format", {"load-format-conflict": ("info", "vLLM 0.11.0", "Cannot find any model weights")}, only_bin,
        options={"load_config": ONLY_SAFETENSORS, "draft_load_config": {"load_format": "auto"}}),
    Reported("B022", {"quantization-from-verifier": ("info", "vLLM 0.11.0", "layers.0.mlp.down_proj.weight", "pack-quantized")},
        verifier=lambda f: quantized_verifier(f, "W4A16")),
    Reported("B024", {"quantization-from-verifier": ("info", "awq")}, verifier=lambda f: quantized_verifier(f, "AWQ")),
    Reported("B025", {"quantization-ignored": ("info", "vLLM 0.11.0", "vLLM 0.10.2")},
        lambda f: quantized_draft(f, Case("x", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": []}, lambda w: fp8(w, "tensor", static=True, scalar=True)),
            modules=lambda n: n.endswith("_proj") or n == "fc")),
    Reported("B026", {"quantization-ignored": ("info", "vLLM 0.11.0", "lm_head.weight_packed")}, lambda f: quantized_draft(f, EIGHT_BITS, modules=lambda n: n == "lm_head")),
    Reported("B029", {"quantization-ignored": ("info", "vLLM 0.11.0")}, lambda f: quantized_draft(f, LAYERS_ALONE)),
    Reported("B030", {}, verifier=regular_ignore),
    Reported("B030 literal", {"quantization-contradicted": ("error", "self_attn")}, verifier=literal_ignore),
    Reported("B032", {"foreign-tensors": ("info", "mtp.")}, verifier=with_riders),
    Reported("B034", {}, verifier=lambda f: quantized_verifier(f, "GPTQ v1"), options={"speculative_config": {"quantization": "none"}}),
    Reported("B034 packed", {"quantization-request": ("error", "'none' was asked for", "qweight")},
        lambda f: quantized_draft(f, "GPTQ v1"), options={"speculative_config": {"quantization": "none"}}),
    Reported("B035", {"quantization-ignored": ("info", "KeyError", "down_proj.g_idx", "gptq")}, lambda f: quantized_draft(f, REORDERED)),
    Reported("B036 null", {"quantization-empty": ("info", "hf_quant_config.json")}, empty_quantization({"quant_algo": None, "kv_cache_quant_algo": None})),
    Reported("B036 empty", {"quantization-empty": ("info", "hf_quant_config.json")}, empty_quantization({})),
    Reported("B037", {"quantization-from-verifier": ("info", "NVFP4", "AssertionError")}, verifier=lambda f: quantized_verifier(f, "ModelOpt NVFP4")),
    Reported("B037 lying", {"quantization-contradicted": ("error", "modelopt-fp8", "U8")}, verifier=lying_modelopt),
    Reported("B041", {"quantization-undeclared": ("error", "56 modules", "weight_packed")}, verifier=lambda f: quantized_verifier(f, "W4A16", {})),
    Reported("B041 in the draft", {"quantization-undeclared": ("error", "weight_packed")}, lambda f: quantized_draft(f, "W4A16", {})),
    Reported("B042 unset", {}), Reported("B042 none", {}, options={"speculative_config": {"quantization": "none"}}),
    Reported("B042 as the verifier", {"quantization-request": ("error", "'awq'", "declares none")},
        verifier=lambda f: quantized_verifier(f, "AWQ"), options={"overrides": {"quantization": "verifier"}}),
    Reported("B043", {"kv-cache-quantized": ("info", "float")}, verifier=lambda f: quantized_verifier(f, "FP8 channel",
        {**BY_NAME["FP8 channel"].section, "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}})),
    Reported("B044", {"verifier-head-quantized": ("info", "lm_head"), "head-borrowed": ("info",)},
        lambda f: draft(f, {"draft_vocab_size": None}, Shape(own_head=False, draft_vocab=VOCAB, maps=False)), packed_head),
    Reported("B045", {"quantization-contradicted": ("error", "24 modules", "mlp")}, verifier=attention_only),
    Reported("B045 order", {"order-stored": ("info", "g_idx")}, verifier=stray_order),
    Reported("B046", {"load-config-ignored": ("info", "vLLM 0.30.0 (Model Runner V2)", "vLLM 0.11.0")},
        options={"load_config": {"load_format": "dummy"}, "draft_load_config": {"load_format": "safetensors"}}),
    Reported("B046 unset", {"random-weights": ("warning", "dummy")}, options={"load_config": {"load_format": "dummy"}}),
    Reported("B049", {"positions-short": ("warning", "16", "512", "vLLM 0.17.0")}, changed(max_position_embeddings=16)),
    Reported("B051", {"positions-short": ("warning", "512", "1024")}, verifier=lambda f: tiny_verifier(f, max_position_embeddings=1024,
        rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512})),
    Reported("B053 a", {"rope-differs": ("info", "1e+06")}, changed(rope_theta=None, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})),
    Reported("B053 c", {"rope-conflict": ("error", "1000000", "10000")}, changed(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})),
    Reported("B053 d", {"rope-default": ("info", "10000")}, changed(rope_theta=None)),
    Reported("B053 d, another base", {"rope-default": ("warning", "10000")}, changed(rope_theta=None), lambda f: tiny_verifier(f, rope_theta=5e5)),
    Reported("B055 yarn", {"rope-differs": ("info", "yarn")}, changed(rope_scaling={"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64})),
    Reported("B055 foo", {"rope-unsupported": ("error", "'foo'")}, changed(rope_scaling={"rope_type": "foo", "factor": 32.0})),
    Reported("B055 incomplete", {"config-value": ("error", "rope_scaling.factor")}, changed(rope_scaling={"rope_type": "yarn"})),
    Reported("B056 outputs", {"aux-layers-moved": ("info", "vLLM 0.32.0", "(1, 3, 6)")}, changed(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]})),
    Reported("B056 undecidable", {"aux-layers-ambiguous": ("warning", "undecidable")}, changed(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 7]})),
    Reported("B057", {"aux-layers-guessed": ("warning", "eagle_aux_hidden_state_layer_ids", "(2, 4, 5)")}, changed(eagle_config=None)),
    Reported("B058 shallow", {"aux-layers-range": ("error", "beside 2 layers")}, changed(eagle_config=None), lambda f: tiny_verifier(f, layers=2)),
    Reported("B058 outside", {"aux-layers-range": ("error", "[9]", "0..8")}, changed(eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 8, 9])),
    Reported("B058 count", {"aux-layers-count": ("error", "3 states", "2 ids")}, changed(eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 5])),
    Reported("B060 a", {}, changed(Shape(hidden=32, heads=2, own_embedding=True), target_hidden_size=64)),
    Reported("B060 b", {"verifier-hidden-size": ("error", "expects a verifier of hidden size 32", "has 64")},
        lambda f: draft(f, {}, Shape(hidden=32, heads=2, own_embedding=True, target=32)), also=("fc-width",)),
    Reported("B061", {"qk-norms-unread": ("info", "vLLM 0.32.0", "q_norm")}, qk_norms),
    Reported("B063", {"norm-before-residual-absent": ("warning", "norm_before_residual")},
        lambda f: write(f, speculators(Shape(), norm_before_residual=None), canonical_tensors(Shape()))),
    Reported("B063 text_config", {}, verifier=lambda f: write(f, {"architectures": ["X"], "model_type": "x_vl", "text_config": verifier_config()},
        {k.replace("model.", "model.language_model.", 1): v for k, v in verifier_tensors(verifier_config()).items()})),
    Reported("B064 both", {"norms-before-fc": ("error", "exclude")}, changed(Shape(fc_input_norm="joint"), norm_before_fc=True, fc_norm=True)),
    Reported("B064 flag alone", {"norms-before-fc": ("error", "fc_norm", "absent")}, changed(fc_norm=True)),
    Reported("B064 tensors alone", {"norms-before-fc": ("error", "fc_norm", "stored")}, changed(Shape(fc_input_norm="each"))),
    Reported("B065", {"vocabulary-padded": ("info", "256", "272")}, verifier=lambda f: tokenizer(tiny_verifier(f, vocab_size=272), 250)),
    Reported("B065 too large", {"tokenizer-too-large": ("error", "260", "256")}, verifier=lambda f: tokenizer(tiny_verifier(f, vocab_size=272), 260)),
    Reported("B068", {"dtype-cast": ("info", "float16")}, changed(torch_dtype="float16")),
    Reported("declared, but plain", {"quantization-contradicted": ("error", "stores plain weights only", "pack-quantized", "F32 [64, 128]")},
        changed(quantization_config=BY_NAME["W4A16"].section)),
    Reported("declared fp8, but plain", {"quantization-contradicted": ("error", "stores plain weights only", "fp8")},
        changed(quantization_config=BY_NAME["fp8 dynamic"].section)),
    Reported("a vocabulary larger than the verifier's", {"vocabulary-sizes": ("error", "larger", "64", "32")},
        changed(), lambda f: tiny_verifier(f, vocab_size=32)),
    Reported("a mask of another vocabulary", {"vocabulary-sizes": ("warning", "256", "272")}, changed(vocab_size=272), lambda f: tiny_verifier(f, vocab_size=272)),
    Reported("another activation", {"activation": ("error", "gelu")}, changed(hidden_act="gelu")),
    Reported("heads that do not divide", {"config-value": ("error", "num_key_value_heads", "3")}, changed(num_key_value_heads=3)),
    Reported("beyond the draft's length", {"options-conflict": ("error", "max_model_len", "1024", "512")},
        verifier=lambda f: tiny_verifier(f, max_position_embeddings=1024), options={"speculative_config": {"max_model_len": 1024}}),
    Reported("EAGLE-1", {"other-method": ("error", "EAGLE-1")}, eagle_1),
    Reported("Medusa", {"other-method": ("error", "Medusa")}, medusa),
    Reported("P-EAGLE", {"other-method": ("error", "P-EAGLE")}, lambda f: draft(f, extra={"mask_hidden": torch.zeros(1, 1, 192)})),
    Reported("DFlash", {"other-method": ("error", "DFlash")}, changed(dflash_config={"target_layer_ids": [1]})),
    Reported("MTP", {"other-method": ("error", "MTP")}, lambda f: draft(f, extra={"mtp.fc.weight": torch.zeros(4, 4)})),
    Reported("rotated", {"rotated-verifier": ("warning", "transform_config")}, verifier=rotated),
    Reported("mixed", {"quantization-mixed": ("info", "W4A16", "W8A16")}, verifier=mixed),
    Reported("other tokenizer", {"tokenizers-differ": ("error", "other ids")}, lambda f: tokenizer(draft(f), 250, 1), lambda f: tokenizer(tiny_verifier(f), 250)),
    Reported("another verifier", {"another-verifier": ("warning", "Qwen3ForCausalLM")},
        changed(speculators_config={"verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "x/y"}})),
    Reported("unknown method", {"quantization-unknown": ("warning", "quark")}, verifier=lambda f: edit_config(tiny_verifier(f), quantization_config={"quant_method": "quark"})),
    Reported("config twice", {"duplicate-keys": ("warning", "hidden_size")},
        lambda f: (draft(f) / "config.json").write_text((f / "config.json").read_text()[:-1] + ', "hidden_size": 64}') and f),
    Reported("no dtype", {"dtype-absent": ("info", "dtype")}, verifier=lambda f: edit_config(tiny_verifier(f), dtype=None)),
)  # fmt: skip


def look(case: Reported, folder: Path) -> Report:
    return sb.diagnose(case.verifier(folder / "v"), case.draft(folder / "d"), **case.options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_reported_failure_has_its_finding_and_no_other_alarm(case: Reported, tmp_path: Path) -> None:
    report = look(case, tmp_path)
    for code, (severity, *words) in case.codes.items():
        assert code in report, f"{code} is missing\n{report}"
        found = report[code]
        assert found.severity == severity, str(report)
        said = f"{found.sentence} {' '.join(map(str, found.evidence))} {' '.join(f'{one.engine} {one.sees}' for one in found.affected)}"
        assert all(word in said for word in words), said
    alarms = {finding.code for finding in report.at_least("warning")}
    assert alarms == {code for code, (severity, *_) in case.codes.items() if severity != "info"} | set(case.also), str(report)


@pytest.mark.parametrize("which", ["none", "the verifier"])
def test_b014_no_draft_at_all(which: str, tmp_path: Path) -> None:
    folder = plain(tmp_path / "v")
    report = sb.diagnose(folder, None if which == "none" else folder)
    assert report.codes == ("no-draft",) and report.exit_code() == 2


def test_b048_a_tensor_parallel_draft_is_refused_by_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        sb.diagnose(plain(tmp_path / "v"), right(tmp_path / "d"), speculative_config={"draft_tensor_parallel_size": 2})


def test_b023_every_format_beside_the_tiny_draft_is_named(tmp_path: Path) -> None:
    for name in ("W4A16", "FP8 channel", "NVFP4A16", "ModelOpt NVFP4", "AWQ", "GPTQ v1"):
        report = sb.diagnose(quantized_verifier(tmp_path / name, name), tiny_draft(tmp_path / f"{name}-d"))
        assert report.draft["quantization"] == "none" and not report.at_least("warning")

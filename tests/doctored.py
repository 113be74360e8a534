"""Drafts and verifiers with one thing wrong, for tests of the doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dialects import Shape, canonical_tensors, flat, midlayer, speculators
from hub_server import shards
from safetensors.torch import load_file, save_file
from stored import BY_NAME, Case, gptq, nvfp4, pack_quantized, store
from tiny import VOCAB, tiny_verifier, verifier_config, verifier_tensors, write
from torch import Tensor

PROJECTIONS = lambda name: name.endswith("_proj")  # noqa: E731
# D0 as its makers should have written it: the layer ids, and a rotary base.
IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "rope_theta": 10000.0}


def draft(
    folder: Path, config: dict[str, Any] | None = None, shape: Shape | None = None, tensors: dict[str, Tensor] | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """A flat midlayer draft with `IDS`; a key of `config` set to None is removed."""
    shape = shape or Shape()
    merged = {**flat(shape, "LlamaForCausalLMEagle3"), **IDS, **(config or {})}
    stored = {midlayer(k): v for k, v in (canonical_tensors(shape) if tensors is None else tensors).items()} | (extra or {})
    return write(folder, {k: v for k, v in merged.items() if v is not None}, stored)


def quantized_draft(
    folder: Path, case: str | Case, section: dict[str, Any] | None = None, modules: Any = PROJECTIONS, **config: Any
) -> Path:
    case = BY_NAME[case] if isinstance(case, str) else case
    tensors, _ = store(canonical_tensors(Shape()), case, modules)
    declared = case.section if section is None else section
    return draft(folder, {"quantization_config": declared or None, "torch_dtype": "bfloat16", **config}, None, tensors)


def quantized_verifier(
    folder: Path, case: str | Case, section: dict[str, Any] | None = None, modules: Any = PROJECTIONS, **changes: Any
) -> Path:
    """V0 with its projections stored as `case` says; `section` stands in place of what the case declares, {} declares nothing."""
    case = BY_NAME[case] if isinstance(case, str) else case
    declared = case.section if section is None else section
    config = verifier_config(dtype="bfloat16", **changes)
    tensors, _ = store(verifier_tensors(config, 0, torch.bfloat16), case, modules)
    if case.file == "config.json":
        return write(folder, {**config, **({"quantization_config": declared} if declared else {})}, tensors)
    write(folder, config, tensors)
    (folder / case.file).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": declared}))
    return folder


def sharded_verifier(folder: Path, count: int = 3, layers: int = 8) -> Path:
    return shards(tiny_verifier(folder, layers=layers), count)


def edit_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def wide(**config: Any) -> Callable[[Path], Path]:
    return lambda folder: draft(folder, config, Shape(heads=8, kv_heads=4, head_dim=16))


def changed(shape: Shape | None = None, **config: Any) -> Callable[[Path], Path]:
    return lambda folder: draft(folder, config, shape)


def short_map(folder: Path) -> Path:
    tensors = canonical_tensors(Shape())
    tensors["d2t"] = tensors["d2t"][:50]
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.arange(50) * 4, True)
    return draft(folder, tensors=tensors)


def zero_map(folder: Path) -> Path:
    return draft(folder, tensors=canonical_tensors(Shape()) | {"d2t": torch.zeros(64, dtype=torch.int64)})


def absolute_map(folder: Path) -> Path:
    return draft(folder, tensors=canonical_tensors(Shape()) | {"d2t": torch.arange(64) * 4})


def full_zero_map(folder: Path) -> Path:
    shape = Shape(draft_vocab=VOCAB)
    zeros = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    return draft(folder, shape=shape, tensors=canonical_tensors(shape) | zeros)


def without(*names: str) -> Callable[[Path], Path]:
    return lambda folder: draft(folder, tensors={k: v for k, v in canonical_tensors(Shape()).items() if k not in names})


def two_layers(folder: Path) -> Path:
    config = speculators(Shape(layers=2))
    config["transformer_layer_config"]["num_hidden_layers"] = 1
    return write(folder, config, canonical_tensors(Shape(layers=2)))


def damaged(how: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        sharded_verifier(folder)
        second, index = folder / "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
        if how == "missing":
            second.unlink()
        elif how == "empty":
            second.write_bytes(b"")
        else:
            content = json.loads(index.read_text())
            content["weight_map"]["model.extra.weight"] = second.name if how == "lying" else "../elsewhere.safetensors"
            index.write_text(json.dumps(content))
        return folder

    return make


def headless(folder: Path) -> Path:
    config = verifier_config()
    return write(folder, config, {k: v for k, v in verifier_tensors(config).items() if k != "lm_head.weight"})


def both_heads(folder: Path) -> Path:
    return write(folder, verifier_config(tie_word_embeddings=True), verifier_tensors(verifier_config()))


def only_bin(folder: Path) -> Path:
    draft(folder)
    torch.save({midlayer(k): v for k, v in canonical_tensors(Shape()).items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "notes.safetensors.json").write_text("{}")
    return folder


def both_kinds(folder: Path) -> Path:
    draft(folder)
    torch.save({}, folder / "pytorch_model.bin")
    return folder


def empty_quantization(content: dict[str, Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (draft(folder) / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": content}))
        return folder

    return make


def literal_ignore(folder: Path) -> Path:
    case = BY_NAME["W4A16"]
    return quantized_verifier(folder, case, {**case.section, "ignore": [".*self_attn.*", "lm_head"]}, lambda name: ".mlp." in name)


def regular_ignore(folder: Path) -> Path:
    case = BY_NAME["W4A16"]
    return quantized_verifier(folder, case, {**case.section, "ignore": ["re:.*self_attn.*", "re:.*lm_head"]}, lambda name: ".mlp." in name)


def attention_only(folder: Path) -> Path:
    case = BY_NAME["W8A8 dynamic"]
    group = {**case.section["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}
    return quantized_verifier(folder, case, {**case.section, "config_groups": {"group_0": group}})


def stray_order(folder: Path) -> Path:
    leaves = lambda w: ({k: v for k, v in gptq(w, 32)[0].items() if k != "g_idx"}, gptq(w, 32)[1])  # noqa: E731
    quantized_verifier(folder, Case("x", BY_NAME["GPTQ v1"].section, leaves))
    stray = {"model.layers.3.mlp.down_proj.g_idx": (torch.arange(128) // 32).to(torch.int32)}
    save_file(load_file(folder / "model.safetensors") | stray, folder / "model.safetensors")
    return folder


def lying_modelopt(folder: Path) -> Path:
    case = Case("x", BY_NAME["ModelOpt FP8"].section, lambda w: nvfp4(w, True, modelopt=True), file="hf_quant_config.json")
    return quantized_verifier(folder, case)


def packed_head(folder: Path) -> Path:
    case = BY_NAME["ModelOpt NVFP4"]
    everything = Case("x", {**case.section, "exclude_modules": []}, case.write, file="hf_quant_config.json")
    return quantized_verifier(folder, everything, None, lambda name: name.endswith("_proj") or name == "lm_head")


def with_riders(folder: Path) -> Path:
    quantized_verifier(folder, "W4A16")
    riders = {f"mtp.{k}": v for k, v in canonical_tensors(Shape()).items() if v.is_floating_point()}
    save_file(load_file(folder / "model.safetensors") | riders, folder / "model.safetensors")
    return folder


def rotated(folder: Path) -> Path:
    folded = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_output"}]}}}
    return quantized_verifier(folder, "W4A16", {**BY_NAME["W4A16"].section, "transform_config": folded})


def mixed(folder: Path) -> Path:
    groups = {"group_0": {**BY_NAME["W4A16"].section["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]}}
    groups["group_1"] = {**BY_NAME["W8A16 channel"].section["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}
    case = Case("x", {**BY_NAME["W4A16"].section, "config_groups": groups}, lambda w: pack_quantized(w, 4, 32))
    quantized_verifier(folder, case, modules=lambda name: ".mlp." in name)
    config = verifier_config(dtype="bfloat16", quantization_config=case.section)
    tensors, _ = store(verifier_tensors(config, 0, torch.bfloat16), case, lambda name: ".mlp." in name)
    tensors, _ = store(tensors, BY_NAME["W8A16 channel"], lambda name: "self_attn" in name and name.endswith("_proj"))
    return write(folder, config, tensors)


def tokenizer(folder: Path, entries: int, shift: int = 0) -> Path:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"t{i}": (i + shift) % entries for i in range(entries)}, unk_token="t0")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def qk_norms(folder: Path) -> Path:
    return draft(folder, tensors=canonical_tensors(Shape(qk_norm=True)))


def eagle_1(folder: Path) -> Path:
    tensors = canonical_tensors(Shape(states=2, layers=2, maps=False, draft_vocab=VOCAB))
    moved = {k.replace("layers.1.", "layers.0."): v for k, v in tensors.items() if not k.startswith("layers.0.")}
    return write(folder, flat(Shape(), "LlamaForCausalLM", draft_vocab_size=None), moved)


def medusa(folder: Path) -> Path:
    tensors = {f"medusa_head.{i}.0.linear.weight": torch.zeros(64, 64) for i in range(3)}
    return write(folder, {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 64, "vocab_size": VOCAB}, tensors)

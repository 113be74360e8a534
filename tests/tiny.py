"""Tiny seeded checkpoints with real names and configs, written to disk: verifiers and an EAGLE-3 draft in the speculators layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB = 64, 128, 4, 2, 16, 256, 64


def verifier_config(layers: int = 8, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1, "dtype": "float32", **changes,
    }  # fmt: skip


def verifier_tensors(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    h, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d

    def matrix(out: int, width: int) -> Tensor:
        return (torch.randn(out, width, generator=g) / width**0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=g)).to(dtype)

    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], h, generator=g).to(dtype), "model.norm.weight": norm(h)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        sizes = {
            "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner),
        }  # fmt: skip
        for name, (out, width) in sizes.items():
            tensors[f"{p}{name}.weight"] = matrix(out, width)
            qkv, attention = name[-6:] in ("q_proj", "k_proj", "v_proj"), name.startswith("self_attn")
            if (config["model_type"] == "qwen2" and qkv) or config.get("attention_bias" if attention else "mlp_bias"):
                tensors[f"{p}{name}.bias"] = 0.1 * torch.randn(out, generator=g).to(dtype)
        tensors[f"{p}input_layernorm.weight"] = norm(h)
        tensors[f"{p}post_attention_layernorm.weight"] = norm(h)
        if config["model_type"] == "qwen3":
            tensors[f"{p}self_attn.q_norm.weight"] = norm(d)
            tensors[f"{p}self_attn.k_norm.weight"] = norm(d)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 3 * matrix(config["vocab_size"], h)
    return tensors


def draft_config(**changes: Any) -> dict[str, Any]:
    layer = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "transformer_layer_config": layer, "dtype": "float32",
        **changes,
    }  # fmt: skip


def draft_tensors(seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def matrix(out: int, width: int) -> Tensor:
        return (torch.randn(out, width, generator=g) / width**0.5).to(dtype)

    p = "layers.0."
    tensors = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        f"{p}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{p}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{p}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{p}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        f"{p}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{p}mlp.up_proj.weight": matrix(INNER, HIDDEN),
        f"{p}mlp.down_proj.weight": matrix(HIDDEN, INNER),
        "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN),
    }
    for name in (f"{p}input_layernorm", f"{p}hidden_norm", f"{p}post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = (1 + 0.1 * torch.randn(HIDDEN, generator=g)).to(dtype)
    target = torch.arange(DRAFT_VOCAB) * (VOCAB // DRAFT_VOCAB)
    tensors["d2t"] = target - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, target, True)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint folder: config.json and one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_verifier(folder: Path, seed: int = 0, **changes: Any) -> Path:
    config = verifier_config(**changes)
    return write(folder, config, verifier_tensors(config, seed, getattr(torch, config["dtype"])))


def tiny_draft(folder: Path, seed: int = 1, **changes: Any) -> Path:
    config = draft_config(**changes)
    return write(folder, config, draft_tensors(seed, getattr(torch, config["dtype"])))


def pack_w4a16(tensors: dict[str, Tensor], group: int = 32) -> dict[str, Tensor]:
    """Every projection of the decoder layers as compressed-tensors pack-quantized, 4 bits, symmetric; the rest as it is."""
    packed = {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = weight
            continue
        stem = name.removesuffix("weight")
        grouped = weight.float().view(weight.shape[0], -1, group)
        scale = (grouped.abs().amax(-1) / 7).clamp_min(1e-8).to(weight.dtype)
        levels = (grouped / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8).view_as(weight)
        packed[f"{stem}weight_packed"] = pack_to_int32(levels, 4)
        packed[f"{stem}weight_scale"] = scale
        packed[f"{stem}weight_shape"] = torch.tensor(weight.shape)
    return packed


def w4a16_section(group: int = 32, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group_0}, **changes,
    }  # fmt: skip


def tiny_w4a16_verifier(folder: Path, seed: int = 0, group: int = 32, **changes: Any) -> Path:
    config = verifier_config(quantization_config=w4a16_section(group), **changes)
    return write(folder, config, pack_w4a16(verifier_tensors(config, seed, getattr(torch, config["dtype"])), group))


def tiny_pair(folder: Path, quantized: bool = False, **changes: Any) -> tuple[Path, Path]:
    """Verifier and draft folders below `folder`."""
    make = tiny_w4a16_verifier if quantized else tiny_verifier
    return make(folder / "verifier", **changes), tiny_draft(folder / "draft")

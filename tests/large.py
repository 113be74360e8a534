"""Headers of full-size checkpoints over sparse files: Qwen3-8B as W4A16 with group 128, and a draft in the speculators format."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from tiny import w4a16_section

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, LAYERS, VOCAB, DRAFT_VOCAB = 4096, 12288, 32, 8, 128, 36, 151936, 32000
BYTES = {"BF16": 2, "I32": 4, "I64": 8, "BOOL": 1}
Header = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


def sparse(path: Path, tensors: Header) -> None:
    """A safetensors file whose data are a hole."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)


def layer_config() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH,
        "vocab_size": VOCAB, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip


def projections(hidden: int) -> dict[str, tuple[int, int]]:
    q, kv = HEADS * WIDTH, KV_HEADS * WIDTH
    return {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (HIDDEN, q), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip


def write_verifier(folder: Path, shards: int) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "dtype": "bfloat16",
    } | layer_config()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": w4a16_section(128)}))
    tensors: Header = {
        "model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)), "lm_head.weight": ("BF16", (VOCAB, HIDDEN)),
        "model.norm.weight": ("BF16", (HIDDEN,)),
    }  # fmt: skip
    for index in range(LAYERS):
        p = f"model.layers.{index}."
        for name, (out, width) in projections(HIDDEN).items():
            tensors[f"{p}{name}.weight_packed"] = ("I32", (out, width // 8))
            tensors[f"{p}{name}.weight_scale"] = ("BF16", (out, width // 128))
            tensors[f"{p}{name}.weight_shape"] = ("I64", (2,))
        tensors |= {f"{p}{name}.weight": ("BF16", (HIDDEN,)) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{p}self_attn.{name}.weight": ("BF16", (WIDTH,)) for name in ("q_norm", "k_norm")}
    names, weight_map = list(tensors), {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        sparse(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_draft(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "dtype": "bfloat16",
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **layer_config()},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors: Header = {
        "fc.weight": ("BF16", (HIDDEN, 3 * HIDDEN)), "lm_head.weight": ("BF16", (DRAFT_VOCAB, HIDDEN)), "norm.weight": ("BF16", (HIDDEN,)),
        "d2t": ("I64", (DRAFT_VOCAB,)), "t2d": ("BOOL", (VOCAB,)),
    }  # fmt: skip
    for name, (out, width) in projections(2 * HIDDEN).items():
        tensors[f"layers.0.{name}.weight"] = ("BF16", (out, width))
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors |= {f"layers.0.{name}.weight": ("BF16", (HIDDEN,)) for name in norms}
    sparse(folder / "model.safetensors", tensors)
    return folder

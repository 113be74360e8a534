"""Tiny random models of transformers, a seeded one per family, as checkpoint folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LAYERS, WINDOW = 6, 8
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
EVERY_SECOND = ["full_attention", "sliding_attention"] * (LAYERS // 2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": EVERY_SECOND},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "mistral": {"sliding_window": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "layer_types": EVERY_SECOND},
}


def random_model(family: str, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A seeded model whose greedy text varies."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | changes))
    config.initializer_range = 0.25
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms, biases and sinks begin as zeros or ones, which hide what is left out
            parameter.data.add_(0.2 * torch.randn(parameter.shape))
        if name == "lm_head.weight":
            parameter.data.mul_(2)
    return model


def saved(family: str, folder: Path, **changes: Any) -> Path:
    random_model(family, **changes).save_pretrained(folder)
    return folder

"""The draft's checkpoint: the speculators layout, written atomically, and the verifier tensors that training reads.

What enters: a trained draft, its vocabulary, the verifier's config. What leaves: config.json and model.safetensors.
It does not know training.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from draft import Draft
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

AUX_LAYERS = (2, 15, 27)


def read_verifier(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config, and the plain tensors outside the layers plus those of the last layer."""
    config = json.loads((folder / "config.json").read_text())
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if not name.startswith("model.layers.") or name.startswith(last):
                    tensors[name] = file.get_tensor(name)
    return config, tensors


def draft_config(draft: Draft, verifier: dict[str, Any], verifier_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct") -> dict[str, Any]:
    """config.json of the draft, every choice written out."""
    c = draft.config
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": c.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "embed_requires_grad": False,
        "fc_norm": False,
        "has_no_defaults_at_init": False,
        "norm_before_fc": False,
        "norm_before_residual": c.norm_before_residual,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": verifier_name},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "hidden_size": c.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": c.intermediate_size,
            "max_position_embeddings": verifier["max_position_embeddings"],
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": c.num_attention_heads,
            "num_hidden_layers": c.num_hidden_layers,
            "num_key_value_heads": c.num_key_value_heads,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
            "rope_theta": c.rope_theta,
            "tie_word_embeddings": False,
            "vocab_size": verifier["vocab_size"],
        },
    }


def draft_tensors(draft: Draft, vocabulary: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """bf16 weights, d2t (int64 offsets: target id = draft id + d2t) and t2d (bool mask over target ids)."""
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in draft.named_parameters()}
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[vocabulary] = True
    return {**tensors, "d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": mask}


def save_draft(draft: Draft, vocabulary: Tensor, verifier: dict[str, Any], out: Path) -> None:
    """Write config.json and model.safetensors into `out`, each by rename."""
    weights, config = out / "model.safetensors", out / "config.json"
    save_file(draft_tensors(draft, vocabulary, verifier["vocab_size"]), f"{weights}.partial", metadata={"format": "pt"})
    os.replace(f"{weights}.partial", weights)
    Path(f"{config}.partial").write_text(json.dumps(draft_config(draft, verifier), indent=2) + "\n")
    os.replace(f"{config}.partial", config)


def read_vocabulary(folder: Path) -> Tensor:
    """Target ids of a saved draft's vocabulary: int64 [draft_vocab_size]."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        offsets = file.get_tensor("d2t")
    return offsets + torch.arange(len(offsets))


def load_weights(draft: Draft, folder: Path) -> None:
    """Fill `draft` from a saved checkpoint; layers that it lacks stay as they are."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys() if name not in ("d2t", "t2d")}
    layers = {int(name.split(".")[1]) for name in saved if name.startswith("layers.")}
    begun = {name: p for name, p in draft.state_dict().items() if name.startswith("layers.") and int(name.split(".")[1]) not in layers}
    draft.load_state_dict({**begun, **saved})


def versions() -> dict[str, str]:
    """Python and the packages that shape the result."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

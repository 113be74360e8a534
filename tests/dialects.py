"""One tiny draft per public family, with its real tensor names and config keys, written to disk. `tensors` are canonical; `stored` renames them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import DRAFT_VOCAB, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, write
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """What distinguishes one draft from another."""

    hidden: int = HIDDEN
    target: int = HIDDEN
    states: int = 3
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    layers: int = 1
    draft_vocab: int = DRAFT_VOCAB
    qk_norm: bool = False
    bias: bool = False
    fc_bias: bool = False
    fc_input_norm: str = "none"
    aux: bool = True
    own_embedding: bool = False
    own_head: bool = True
    maps: bool = True


def canonical_tensors(s: Shape, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def matrix(out: int, width: int) -> Tensor:
        return torch.randn(out, width, generator=g) / width**0.5

    def vector(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=g)

    t: dict[str, Tensor] = {}
    if s.aux:
        t["fc.weight"] = matrix(s.hidden, s.states * s.target)
        if s.fc_bias:
            t["fc.bias"] = vector(s.hidden)
    if s.fc_input_norm == "joint":
        t["input_norm.weight"] = vector(s.states * s.target)
    if s.fc_input_norm == "each":
        t |= {f"fc_norm.{i}.weight": vector(s.target) for i in range(s.states)}
    for i in range(s.layers):
        p, width = f"layers.{i}.", 2 * s.hidden if i == 0 else s.hidden
        for name, rows in (("q_proj", s.heads), ("k_proj", s.kv_heads), ("v_proj", s.kv_heads)):
            t[f"{p}self_attn.{name}.weight"] = matrix(rows * s.head_dim, width)
            if s.bias:
                t[f"{p}self_attn.{name}.bias"] = vector(rows * s.head_dim)
        t[f"{p}self_attn.o_proj.weight"] = matrix(s.hidden, s.heads * s.head_dim)
        if s.qk_norm:
            t |= {f"{p}self_attn.{name}.weight": 2 * vector(s.head_dim) for name in ("q_norm", "k_norm")}
        t |= {f"{p}mlp.{name}.weight": matrix(INNER, s.hidden) for name in ("gate_proj", "up_proj")}
        t[f"{p}mlp.down_proj.weight"] = matrix(s.hidden, INNER)
        t |= {f"{p}{name}.weight": vector(s.hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        if i == 0 and s.aux:
            t[f"{p}hidden_norm.weight"] = vector(s.hidden)
    t["norm.weight"] = vector(s.hidden)
    if s.own_head:
        t["lm_head.weight"] = matrix(s.draft_vocab, s.hidden)
    if s.own_embedding:
        t["embed_tokens.weight"] = torch.randn(VOCAB, s.hidden, generator=g)
    if s.maps:
        target = torch.arange(s.draft_vocab) * (VOCAB // s.draft_vocab)
        t["d2t"] = target - torch.arange(s.draft_vocab)
        t["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, target, True)
    return t


def layer_keys(s: Shape, **extra: Any) -> dict[str, Any]:
    return {
        "hidden_size": s.hidden, "intermediate_size": INNER, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 512, **extra,
    }  # fmt: skip


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def under_model(name: str) -> str:
    return name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}"


def same(name: str) -> str:
    return name


@dataclass(frozen=True)
class Example:
    """A family's draft. expect: settings that the plan must resolve to. math: arguments of `restate.draft_states` that differ from the defaults."""

    name: str
    shape: Shape
    config: Callable[[Shape], dict[str, Any]]
    stored: Callable[[str], str] = same
    drop: tuple[str, ...] = ()
    expect: dict[str, Any] = field(default_factory=dict)
    math: dict[str, Any] = field(default_factory=dict)
    suffix: str = "safetensors"

    def write(self, folder: Path, **changes: Any) -> Path:
        tensors = {self.stored(name): value for name, value in canonical_tensors(self.shape).items() if name not in self.drop}
        config = {**self.config(self.shape), **changes}
        if self.suffix == "safetensors":
            return write(folder, config, tensors)
        folder = write(folder, config, {})
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder


def speculators(s: Shape, **top: Any) -> dict[str, Any]:
    layer = layer_keys(s, head_dim=s.head_dim, model_type="llama", rope_theta=10000.0) | top.pop("layer", {})
    return {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": s.draft_vocab, "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "transformer_layer_config": layer, "dtype": "float32", **top,
    }  # fmt: skip


def flat(s: Shape, architecture: str, **extra: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "draft_vocab_size": s.draft_vocab,
        "torch_dtype": "float32",
        **layer_keys(s),
        **extra,
    }


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
WIDE = Shape(heads=8, kv_heads=4, head_dim=16)  # heads * head_dim is 128, not the hidden size

EXAMPLES: tuple[Example, ...] = (
    Example(
        "safeailab-bin", Shape(), lambda s: flat(s, "LlamaForCausalLM", num_hidden_layers=40, max_position_embeddings=2048, tie_word_embeddings=False),
        midlayer, expect={"family": "safeailab", "num_hidden_layers": 1, "norm_before_residual": False, "aux_layers": (2, 4, 5), "d2t": "draft"},
        suffix="bin",
    ),
    Example("safeailab", Shape(), lambda s: flat(s, "LlamaForCausalLM"), midlayer, expect={"family": "safeailab", "embed_tokens": "verifier"}),
    Example(
        "safeailab-70b", Shape(hidden=32, heads=2, own_embedding=True), lambda s: flat(s, "LlamaForCausalLM", target_hidden_size=64), midlayer,
        expect={"embed_tokens": "draft", "target_hidden_size": 64},
    ),
    Example(
        "safeailab-full-vocabulary", Shape(draft_vocab=VOCAB, maps=False), lambda s: flat(s, "LlamaForCausalLM"), midlayer, expect={"d2t": "identity"},
    ),
    Example(
        "specforge-nested-ids", WIDE,
        lambda s: flat(s, "LlamaForCausalLMEagle3", head_dim=16, rope_theta=500000.0, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        midlayer, expect={"family": "specforge", "aux_layers": (2, 4, 5), "head_dim": 16}, math={"theta": 500000.0},
    ),
    Example(
        "specforge-yarn", Shape(), lambda s: flat(s, "LlamaForCausalLMEagle3", rope_theta=10000.0, rope_scaling=YARN), midlayer, math={"scaling": YARN},
    ),
    Example(
        "specforge-mrope", Shape(draft_vocab=VOCAB),
        lambda s: flat(s, "LlamaForCausalLMEagle3", rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}), midlayer, expect={"d2t": "draft"},
    ),
    Example("speculators-old", Shape(), lambda s: {
        **speculators(s, architectures=["Eagle3Speculator"], norm_before_residual=False, target_hidden_size=None, auto_map={"": "eagle3.X"}),
        "eagle_aux_hidden_state_layer_ids": None,
    }, expect={"family": "speculators", "norm_before_residual": False, "aux_layers": (2, 4, 5)}),
    Example("speculators-old-true", Shape(), lambda s: speculators(s, architectures=["Eagle3Speculator"]), math={"norm_before_residual": True}),
    Example(
        "speculators-new", Shape(own_embedding=True, fc_input_norm="joint"), lambda s: speculators(s, norm_before_fc=True, fc_norm=False, norm_output=True),
        expect={"embed_tokens": "draft", "fc_input_norm": "joint", "norm_output": True}, math={"norm_before_residual": True, "norm_output": True},
    ),
    Example(
        "speculators-four-states", Shape(states=4), lambda s: speculators(s, eagle_aux_hidden_state_layer_ids=[2, 4, 6, 8]),
        expect={"aux_layers": (2, 4, 6, 8)}, math={"norm_before_residual": True},
    ),
    Example(
        "speculators-two-layers", Shape(layers=2), lambda s: speculators(s), expect={"num_hidden_layers": 2},
        math={"norm_before_residual": True, "windows": (None, None)},
    ),
    Example(
        "speculators-qwen3-windows", Shape(layers=2, qk_norm=True, head_dim=32, heads=4, kv_heads=2),
        lambda s: speculators(s, architectures=["Eagle3Qwen3ForCausalLM"], layer={
            "model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "rope_theta": None,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        }),
        expect={"qk_norm": True, "windows": (None, 4)}, math={"norm_before_residual": True, "theta": 1e6, "windows": (None, 4)},
    ),
    Example(
        "angelslim", Shape(own_embedding=True),
        lambda s: flat(s, "Eagle3LlamaForCausalLM", head_dim=16, rope_theta=1000000, target_model_type="qwen3", modal_type="LLM", tie_word_embeddings=True),
        midlayer, expect={"family": "angelslim"}, math={"theta": 1e6},
    ),
    Example(
        "modelopt", Shape(), lambda s: flat(s, "LlamaForCausalLMEagle3", head_dim=16, rope_scaling=LLAMA3, eagle_config={
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True, "use_mtp_layernorm": False, "parallel_draft_step": 1,
        }), drop=("t2d",), expect={"family": "modelopt", "aux_layers": (2, 4, 5)}, math={"scaling": LLAMA3},
    ),
    Example(
        "modelopt-boundary-ids", Shape(fc_input_norm="joint"),
        lambda s: flat(s, "LlamaForCausalLMEagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [4, 6, 8], "norm_before_fc": True}),
        drop=("t2d",), expect={"aux_layers": (4, 6, 8), "fc_input_norm": "joint"},
    ),
    Example(
        "modelopt-without-aux", Shape(aux=False, states=1),
        lambda s: flat(s, "LlamaForCausalLMEagle3", eagle_config={"use_aux_hidden_state": False}), drop=("t2d",),
        expect={"use_fc": False, "use_hidden_norm": False, "aux_layers": (9,)},
    ),
    Example(
        "nemo-eagle-3.1", Shape(fc_input_norm="each", own_embedding=True),
        lambda s: flat(s, "LlamaEagle3DraftModel", fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 4, 5]), under_model,
        expect={"family": "nemo", "fc_input_norm": "each", "norm_output": True}, math={"norm_output": True},
    ),
    Example(
        "biases", Shape(bias=True, fc_bias=True), lambda s: flat(s, "LlamaForCausalLMEagle3", attention_bias=True), midlayer,
        expect={"attention_bias": True, "fc_bias": True},
    ),
    Example(
        "borrowed-head", Shape(own_head=False, draft_vocab=VOCAB, maps=False), lambda s: flat(s, "LlamaForCausalLMEagle3", draft_vocab_size=None), midlayer,
        expect={"lm_head": "verifier", "d2t": "identity"},
    ),
)  # fmt: skip

"""An independent fp64 restatement of the EAGLE-3 draft: whole sequences, no cache, no fused layers, straight from canonical tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(theta: float, head_dim: int, scaling: dict[str, Any] | None) -> tuple[Tensor, float]:
    """Inverse frequencies and the factor on cos and sin: default, llama3 and yarn written out from their papers."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kind = (scaling or {}).get("rope_type", "default")
    if scaling is None or kind == "default":
        return inverse, 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    if kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
        blend = (original / wavelength - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
        mixed = (1 - blend) * inverse / factor + blend * inverse
        return torch.where(wavelength > low, inverse / factor, torch.where(wavelength < high, inverse, mixed)), 1.0
    assert kind == "yarn"

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low_d, high_d = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low_d) / max(high_d - low_d, 0.001)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), 0.1 * math.log(factor) + 1.0


def rotate(x: Tensor, positions: Tensor, inverse: Tensor, factor: float) -> Tensor:
    """x: [n, heads, d]."""
    angles = positions.double()[:, None] * inverse
    cos, sin = (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def draft_states(
    t: dict[str, Tensor],
    tokens: Tensor,
    hidden: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    norm_before_residual: bool,
    theta: float,
    scaling: dict[str, Any] | None = None,
    norm_output: bool = False,
    windows: tuple[int | None, ...] = (None,),
) -> Tensor:
    """States [n, hidden] of pairs (token i + 1, state i) at positions 0 .. n - 1; `hidden` is already fused (see `fuse`)."""
    t = {k: v.double() for k, v in t.items() if v.is_floating_point()}
    n, positions = len(tokens), torch.arange(len(tokens))
    inverse, factor = frequencies(theta, head_dim, scaling)
    embedded, x = t["embed_tokens.weight"][tokens], hidden.double()
    count = 1 + max(int(k.split(".")[1]) for k in t if k.startswith("layers."))
    for i in range(count):
        p = f"layers.{i}."
        if i == 0:
            normed = norm(x, t[p + "hidden_norm.weight"], eps) if p + "hidden_norm.weight" in t else x
            inputs = torch.cat((norm(embedded, t[p + "input_layernorm.weight"], eps), normed), -1)
            residual = normed if norm_before_residual else x
        else:
            inputs, residual = norm(x, t[p + "input_layernorm.weight"], eps), x

        def project(name: str, value: Tensor, p: str = p) -> Tensor:
            out = value @ t[f"{p}{name}.weight"].T
            return out + t[f"{p}{name}.bias"] if f"{p}{name}.bias" in t else out

        q = project("self_attn.q_proj", inputs).view(n, heads, head_dim)
        k = project("self_attn.k_proj", inputs).view(n, kv_heads, head_dim)
        v = project("self_attn.v_proj", inputs).view(n, kv_heads, head_dim)
        if p + "self_attn.q_norm.weight" in t:
            q, k = norm(q, t[p + "self_attn.q_norm.weight"], eps), norm(k, t[p + "self_attn.k_norm.weight"], eps)
        q, k = rotate(q, positions, inverse, factor), rotate(k, positions, inverse, factor)
        k, v = k.repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        seen = positions[None] <= positions[:, None]
        if windows[i] is not None:
            seen &= positions[None] > positions[:, None] - windows[i]
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).reshape(n, -1)
        x = residual + project("self_attn.o_proj", attended)
        inner = norm(x, t[p + "post_attention_layernorm.weight"], eps)
        gate = project("mlp.gate_proj", inner)
        x = x + project("mlp.down_proj", gate / (1 + torch.exp(-gate)) * project("mlp.up_proj", inner))
    return norm(x, t["norm.weight"], eps) if norm_output else x


def fuse(t: dict[str, Tensor], aux: Tensor, eps: float) -> Tensor:
    """Auxiliary states [n, K * target_hidden] to [n, hidden]."""
    aux = aux.double()
    if "input_norm.weight" in t:
        aux = norm(aux, t["input_norm.weight"].double(), eps)
    count = sum(k.startswith("fc_norm.") for k in t)
    if count:
        aux = torch.cat([norm(c, t[f"fc_norm.{i}.weight"].double(), eps) for i, c in enumerate(aux.chunk(count, -1))], -1)
    if "fc.weight" not in t:
        return aux
    out = aux @ t["fc.weight"].double().T
    return out + t["fc.bias"].double() if "fc.bias" in t else out


def logits(t: dict[str, Tensor], states: Tensor, eps: float, norm_output: bool = False) -> Tensor:
    """Scores over the draft vocabulary."""
    states = states if norm_output else norm(states, t["norm.weight"].double(), eps)
    return states @ t["lm_head.weight"].double().T

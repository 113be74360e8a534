"""The pieces that verifier and draft share: rotary tables, attention over a static cache, the gated MLP.

What enters: activations and weights of one layer. What leaves: activations. It does not know which model a layer
belongs to, where weights came from, or how they are quantized (a `Linear` hides that).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checkpoint.rope import Rope
from ..quant.linear import Linear
from .cache import Cache, LayerCache, Step

FEW_ROWS = 16  # up to here calls cost more than arithmetic


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in fp32, output in the input's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False)
        self.shape = (size,)
        self.eps = eps
        self.padded: Tensor | None = None  # the weight, then zeros: see `forward`

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.numel() > FEW_ROWS * self.shape[0]:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        # F.rms_norm is ten small operators on a CPU, F.layer_norm one. Over (x, -x) the mean is zero and the variance x's mean square.
        if self.padded is None:
            self.padded = torch.cat((self.weight.data, torch.zeros_like(self.weight.data)))
        size = self.shape[0]
        return torch.layer_norm(torch.cat((x, x.neg()), -1), (2 * size,), self.padded, None, self.eps).narrow(-1, 0, size).contiguous()


def rotary_table(rope: Rope, head_dim: int, length: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Cosines and signed sines for every position.

    Returns [2, length, head_dim]; row 0 is cos, row 1 is sin with its first half negated, so that rotation is
    `x * cos + swap_halves(x) * sin`. Angles are computed in fp64 and rounded once to `dtype`.
    """
    inverse_frequency, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse_frequency  # [length, d / 2]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(device, dtype)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """fp64 [head_dim / 2] and the factor on cos and sin; scalings are transformers' own (modeling_rope_utils)."""
    if rope.kind == "default":
        return rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=rope.max_positions,
        rope_parameters={"rope_theta": rope.theta, "rope_type": rope.kind, **dict(rope.parameters)},
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
    return frequencies.double(), float(factor)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embedding. x: [b, n, heads, d]; rotary: two of [b, n, heads, d] (see `rotary_table`)."""
    cosines, sines = rotary
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)


class Attention(nn.Module):
    """Grouped-query attention with fused q, k, v over a static cache."""

    def __init__(
        self,
        qkv_proj: Linear,
        o_proj: Linear,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = qkv_proj, o_proj
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_norm: RMSNorm | None = norms[0] if norms else None
        self.k_norm: RMSNorm | None = norms[1] if norms else None
        self.scale = head_dim**-0.5
        self.window = window

    def forward(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x: [b * n, width]; returns [b * n, hidden]. Rows in two dimensions: every layer is then spared some views."""
        batch, n = step.size()
        heads, kv_heads, width = self.heads, self.kv_heads, self.head_dim
        qkv = self.qkv_proj(x).view(batch, n, heads + 2 * kv_heads, width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 2)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), 2)
        qkv = rotate(qkv, step.rotary)  # values too, by nothing: one tensor to write then
        q, kv = qkv.split((heads, 2 * kv_heads), 2)
        keys, values = cache.update(kv, step)
        if step.causal and (self.window is None or self.window >= n):
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, is_causal=n > 1, scale=self.scale, enable_gqa=heads != kv_heads
            ).transpose(1, 2)
            return self.o_proj(attended.reshape(batch * n, heads * width))
        # The heads that share keys become rows of one head: nothing is repeated, and a CPU does it in half the time.
        group = heads // kv_heads
        if n == 1:
            q = q.view(batch, kv_heads, group, width)
        else:
            q = q.view(batch, n, kv_heads, group, width).transpose(1, 2).reshape(batch, kv_heads, n * group, width)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=step.mask(self.window, group), scale=self.scale)
        if n > 1:
            attended = attended.view(batch, kv_heads, n, group, width).transpose(1, 2)
        return self.o_proj(attended.reshape(batch * n, heads * width))


class MLP(nn.Module):
    """SwiGLU with fused gate and up."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        gate, up = both.split(both.shape[-1] // 2, -1)
        return self.down_proj(F.silu(gate) * up)


class Placed(nn.Module):
    """What a model of several layers over caches knows about place: its caches, and the rotary table of its own settings."""

    config: Any  # sizes by their transformers names, and `rope`
    norm: RMSNorm

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.kv_cache_dtype: torch.dtype | None = None  # what keys and values are rounded to; None keeps the compute dtype
        self.rotary: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def new_cache(self, length: int, batch: int = 1) -> Cache:
        """A cache of `length` slots for `batch` sequences, in the model's dtype."""
        c = self.config
        return Cache(c.num_hidden_layers, batch, length, c.num_key_value_heads, c.head_dim, self.dtype, self.device, self.kv_cache_dtype)

    def step(
        self,
        positions: Tensor,
        limit: int,
        *,
        row: int = 0,
        masked: bool = True,
        causal: bool = False,
        slots: Tensor | None = None,
        seen: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Step:
        """Place of the next tokens (see `Step`); positions int64 [b, n], and slots where they differ.

        The rotary table reaches past max_position_embeddings where it must, as vLLM's since 0.28: a draft's own may be far below its
        verifier's.
        """
        if self.rotary is None or self.rotary.shape[1] < limit:
            length = max(limit + limit // 2, self.config.max_position_embeddings)  # half more, not to rebuild it for every token
            self.rotary = rotary_table(self.config.rope, self.config.head_dim, length, self.dtype, self.device)
            self.still = self.rotary.new_tensor([1.0, 0.0]).view(2, 1, 1, 1, 1)  # for values: they turn by nothing
        c = self.config
        rotary = self.rotary[:, positions][..., None, :].expand(-1, -1, -1, c.num_attention_heads + c.num_key_value_heads, -1)
        still = self.still.expand(-1, *positions.shape, c.num_key_value_heads, c.head_dim)
        cosines, sines = torch.cat((rotary, still), 3)
        return Step(positions, positions if slots is None else slots, row, limit, (cosines, sines), masked, causal, seen, key_positions)

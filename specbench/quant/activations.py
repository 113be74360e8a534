"""Quantize the inputs of a linear layer as its scheme says.

What enters: activations [rows, in] and a scheme's `Activations`. What leaves: narrow integers or floats with their scales. It does not know
weights. Rules: compressed-tensors 0.20 and vLLM (symmetric int8 over [-127, 127] of the largest magnitude; fp8 e4m3 over 448; NVFP4 in
groups of 16 with fp8 scales).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scheme import Activations

F8_MAX = 448.0
FP4_MAX = 6.0


def quantize_input(
    x: Tensor, how: Activations, input_scale: Tensor | None, input_zero_point: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [rows, in] to narrow values, scales and zero points.

    Returns:
        q: int8 or e4m3 [rows, in]. scale: fp32, broadcastable over [rows, in] ([rows, 1], [1, 1] or one a group, expanded). zero_point: or
        None.
    """
    x = x.float()
    if how.kind == "int8":
        return _int8(x, how, input_scale, input_zero_point)
    if not how.dynamic and input_scale is not None:
        scale = input_scale.float().reshape(-1).max().reshape(1, 1)
    elif how.group_size is not None and how.kind == "fp8":
        grouped = x.view(x.shape[0], -1, how.group_size)
        scale = (grouped.abs().amax(-1) / F8_MAX).clamp_min(1e-12).repeat_interleave(how.group_size, 1)
    else:
        scale = (x.abs().amax(-1, keepdim=True) / F8_MAX).clamp_min(1e-12)
    return (x / scale).clamp(-F8_MAX, F8_MAX).to(torch.float8_e4m3fn), scale, None


def _int8(x: Tensor, how: Activations, input_scale: Tensor | None, input_zero_point: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if not how.dynamic and input_scale is not None:
        scale = input_scale.float().reshape(-1).max().reshape(1, 1)
        zero = None if input_zero_point is None else input_zero_point.float().reshape(-1)[0].reshape(1, 1)
    elif how.symmetric:
        scale, zero = (x.abs().amax(-1, keepdim=True) / 127.0).clamp_min(1e-12), None
    else:
        low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
        scale = ((high - low) / 255.0).clamp_min(1e-12)
        zero = (-128 - low / scale).round()
    q = x / scale
    q = (q if zero is None else q + zero).round().clamp(-128, 127)
    return q.to(torch.int8), scale, zero


def fake_quantize(x: Tensor, how: Activations, input_scale: Tensor | None, input_zero_point: Tensor | None = None) -> Tensor:
    """x [..., in] as its narrow form stands for it, in x's dtype: the reference of every kernel that quantizes its input."""
    rows = x.reshape(-1, x.shape[-1])
    if how.kind == "nvfp4":
        return _nvfp4(rows.float(), how.group_size or 16, input_scale).to(x.dtype).view_as(x)
    q, scale, zero = quantize_input(rows, how, input_scale, input_zero_point)
    value = q.float() if zero is None else q.float() - zero
    return (value * scale).to(x.dtype).view_as(x)


def _nvfp4(x: Tensor, group: int, global_scale: Tensor | None) -> Tensor:
    """Groups of e2m1 numbers under e4m3 scales under one fp32 scale (`global_scale` multiplies; one a row where it is None)."""
    grouped = x.view(x.shape[0], -1, group)
    top = grouped.abs().amax(-1, keepdim=True)
    multiplier = (
        FP4_MAX * F8_MAX / x.abs().amax(-1)[:, None, None].clamp_min(1e-12) if global_scale is None else global_scale.float().reshape(-1)[0]
    )
    scale = (top / FP4_MAX * multiplier).clamp(max=F8_MAX).to(torch.float8_e4m3fn).float() / multiplier
    units = torch.where(scale > 0, grouped / scale.clamp_min(1e-30), torch.zeros_like(grouped))
    return (round_fp4(units) * scale).view_as(x)


def round_fp4(x: Tensor) -> Tensor:
    """Nearest e2m1 number, ties to even, saturating at 6."""
    size = x.abs().clamp(max=FP4_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.sign(x) * (size / step).round() * step

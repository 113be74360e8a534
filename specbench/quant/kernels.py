"""Which matrix product runs for a scheme on a device; always with a dequantizing reference.

What enters: the stored integers and scales of one linear layer. What leaves: a kernel object, `kernel(x) -> x @ W.T`, which
holds the weights in the form that it multiplies. It does not know modules, files or models.

`int4` has the kernels of packed 4-bit weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .activations import fake_quantize, quantize_input
from .formats import Levels, dequantize
from .int4 import PackedInt4Cpu, PackedInt4Cuda, cpu_int4_layout
from .products import multiplies_bf16, product, widened
from .scheme import Activations, Scheme

EXPAND_ROWS = 64  # from here expanding int8 weights and multiplying in the activations' dtype beats the operator for them
WIDEN_ROWS = 24  # the same in fp32, where bf16 is slow
PACKED_GROUP_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Inputs:
    """How a layer quantizes its input, with the stored scale and zero point of static schemes."""

    how: Activations
    scale: Tensor | None = None
    zero_point: Tensor | None = None


class Dequantized:
    """The reference: weights expanded once, kept in the activations' dtype; inputs quantized and read back where the scheme says so."""

    name = "dequantized"

    def __init__(self, weight: Tensor, inputs: Inputs | None = None) -> None:
        self.weight, self.inputs = weight, inputs

    def __call__(self, x: Tensor) -> Tensor:
        if self.inputs is not None:
            x = fake_quantize(x, self.inputs.how, self.inputs.scale, self.inputs.zero_point)
        return product(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)

    def nbytes(self) -> int:
        return self.weight.nbytes


class Int8Weights:
    """W8A16 with one scale a row: int8 in memory, multiplied by torch's int8 operator for few rows, expanded for prefill."""

    name = "int8-weights"

    def __init__(self, levels: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.levels, self.scales, self.dtype = levels.contiguous(), scales.reshape(-1).to(dtype), dtype

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not multiplies_bf16() and rows.shape[0] >= WIDEN_ROWS:
            out = widened(rows, self.levels) * self.scales
        elif rows.shape[0] >= EXPAND_ROWS:
            out = F.linear(rows, self.levels.to(self.dtype)) * self.scales
        else:
            out = torch.ops.aten._weight_int8pack_mm(rows, self.levels, self.scales)
        return out.view(*x.shape[:-1], -1)

    def nbytes(self) -> int:
        return self.levels.nbytes + self.scales.nbytes


class Int8Matmul:
    """W8A8: int8 inputs times int8 weights, exact 32-bit sums, then scales."""

    name = "int8-matmul"
    MIN_ROWS_CUDA = 32  # cuBLASLt refuses 16 rows and fewer

    def __init__(self, levels: Tensor, scales: Tensor, inputs: Inputs, dtype: torch.dtype) -> None:
        self.weight_t = levels.contiguous().t()  # [in, out]
        self.scales, self.inputs, self.dtype = scales.float().reshape(1, -1), inputs, dtype

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        q, scale, _ = quantize_input(rows, self.inputs.how, self.inputs.scale)
        count = q.shape[0]
        if q.is_cuda and count < self.MIN_ROWS_CUDA:
            q = F.pad(q, (0, 0, 0, self.MIN_ROWS_CUDA - count))
        sums = torch._int_mm(q, self.weight_t)[:count]
        return (sums.float() * scale * self.scales).to(self.dtype).view(*x.shape[:-1], -1)

    def nbytes(self) -> int:
        return self.weight_t.nbytes + self.scales.nbytes


class Fp8Matmul:
    """FP8 inputs times FP8 weights through torch's scaled product: one scale a tensor, or one a row on both sides."""

    name = "fp8-matmul"

    def __init__(self, weight: Tensor, scales: Tensor, inputs: Inputs, dtype: torch.dtype) -> None:
        self.weight, self.scales, self.inputs, self.dtype = weight.contiguous(), scales.float().reshape(1, -1), inputs, dtype

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        q, scale, _ = quantize_input(rows, self.inputs.how, self.inputs.scale)
        scales = (scale.expand(q.shape[0], 1).contiguous(), self.scales.expand(1, self.weight.shape[0]).contiguous())
        out = torch._scaled_mm(q, self.weight.t(), *scales, out_dtype=torch.bfloat16)
        return out.to(self.dtype).view(*x.shape[:-1], -1)

    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes


class Reordered:
    """A kernel over columns sorted by group (GPTQ desc_act, actorder "group"): inputs are gathered in the same order."""

    def __init__(self, kernel: Kernel, columns: Tensor) -> None:
        self.kernel, self.columns = kernel, columns
        self.name: str = f"{kernel.name} reordered"

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernel(x[..., self.columns])

    def nbytes(self) -> int:
        return self.kernel.nbytes() + self.columns.nbytes


Kernel = Dequantized | Int8Weights | Int8Matmul | Fp8Matmul | PackedInt4Cpu | PackedInt4Cuda | Reordered


def select_kernel(parts: list[Levels | Tensor], scheme: Scheme, inputs: Inputs | None, dtype: torch.dtype, packed: bool = True) -> Kernel:
    """The kernel for the expanded shards of one layer, stacked along their outputs, multiplying activations of `dtype` on their device.

    The packed operators compute in bf16; other activations take the reference, which is also what `packed=False` asks for.
    """
    levels = _stacked(parts)
    if packed and levels is not None and levels.order is not None and _equal_groups(levels.order, levels.scales.shape[1]):
        columns = levels.order.argsort(stable=True)
        sorted_levels = Levels(levels.levels[:, columns].contiguous(), levels.scales, levels.zero_points)
        kernel = _packed_kernel(sorted_levels, scheme, inputs, dtype)
        if kernel is not None:
            return Reordered(kernel, columns)
    elif packed and levels is not None and levels.order is None:
        kernel = _packed_kernel(levels, scheme, inputs, dtype)
        if kernel is not None:
            return kernel
    return Dequantized(torch.cat([dequantize(part, dtype) for part in parts]), inputs)


def fp8_kernel(weight: Tensor, scales: list[Tensor], rows: tuple[int, ...], inputs: Inputs, dtype: torch.dtype) -> Kernel | None:
    """The scaled product for e4m3 weights [out, in] with one scale a row or a shard; None where the device or the scheme has none."""
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (8, 9):
        return None  # torch has the operator for CPUs as well: 16 times slower there than expanded bf16 weights (3072 x 576, 4 rows)
    if inputs.how.group_size is not None or dtype != torch.bfloat16 or any(n % 16 for n in weight.shape):
        return None
    spread = [s.reshape(-1).expand(n) if s.numel() == 1 else s.reshape(-1) for s, n in zip(scales, rows, strict=True)]
    return Fp8Matmul(weight, torch.cat(spread), inputs, dtype)


def _stacked(parts: list[Levels | Tensor]) -> Levels | None:
    """Shards as one, or None where they are not integers or order their columns differently."""
    found = [part for part in parts if isinstance(part, Levels)]
    if len(found) != len(parts):
        return None
    first = found[0]
    for other in found[1:]:
        same = other.order is first.order or (other.order is not None and first.order is not None and torch.equal(other.order, first.order))
        if not same or (other.zero_points is None) != (first.zero_points is None):
            return None
    zero_points = None if first.zero_points is None else torch.cat([p.zero_points for p in found if p.zero_points is not None])
    return Levels(torch.cat([p.levels for p in found]), torch.cat([p.scales for p in found]), zero_points, first.order)


def _equal_groups(order: Tensor, groups: int) -> bool:
    """Whether every group has the same number of columns, so that columns sorted by group are consecutive groups."""
    return bool((torch.bincount(order, minlength=groups) * groups == len(order)).all())


def _packed_kernel(levels: Levels, scheme: Scheme, inputs: Inputs | None, dtype: torch.dtype) -> Kernel | None:
    out_features, in_features = levels.levels.shape
    group_size, device = in_features // levels.scales.shape[1], levels.levels.device
    if scheme.bits == 8 and levels.scales.shape[1] == 1 and levels.zero_points is None:
        if inputs is not None and inputs.how.kind == "int8" and inputs.how.symmetric:
            return Int8Matmul(levels.levels, levels.scales, inputs, dtype) if in_features % 8 == 0 and out_features % 8 == 0 else None
        if inputs is None and dtype == torch.bfloat16 and device.type == "cpu":
            return Int8Weights(levels.levels, levels.scales, dtype)
    if scheme.bits != 4 or inputs is not None or dtype != torch.bfloat16 or group_size not in PACKED_GROUP_SIZES:
        return None
    arguments = (levels.levels, levels.scales, levels.zero_points, dtype)
    if device.type == "cpu":
        layout = cpu_int4_layout()
        return PackedInt4Cpu(*arguments) if layout is not None and out_features % layout[0] == 0 else None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        if out_features % 8 == 0 and in_features % (PackedInt4Cuda.INNER_K_TILES * 16) == 0:
            return PackedInt4Cuda(*arguments)
    return None

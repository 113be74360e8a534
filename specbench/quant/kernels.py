"""Which matrix product runs for a scheme on a device; always with a dequantizing reference.

What enters: the stored integers and scales of one linear layer. What leaves: a kernel object, `kernel(x) -> x @ W.T`, which
holds the weights in the form that it multiplies. It does not know modules, files or models.

The packed int4 operators are private to torch and carry no stability promise, so their layout is probed once on this
machine: where they are missing, or lay their bytes in a way that does not read back, the reference runs instead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats import dequantize

# Rows from which expanding the weights once and multiplying in the activations' dtype beats the packed operator.
# Measured with `python -m specbench.bench.kernels` on 2 cores with AVX512; the CUDA operator keeps its lead longer.
PREFILL_ROWS = {"cpu": 64, "cuda": 128}
PACKED_GROUP_SIZES = (32, 64, 128, 256)


class Dequantized:
    """The reference: weights expanded once, kept in the activations' dtype."""

    name = "dequantized"

    def __init__(self, levels: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = dequantize(levels, scales, zero_points, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def nbytes(self) -> int:
        return self.weight.nbytes


class PackedInt4Cpu:
    """Weights stay 4-bit in memory: torch's int4 operator for few rows, expand-and-multiply for prefill."""

    name = "int4-packed-cpu"

    def __init__(self, levels: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = levels.shape
        self.group_size = self.in_features // scales.shape[1]
        layout = cpu_int4_layout()
        if layout is None:
            raise RuntimeError("torch's int4 operator for CPU is missing here, or its layout is unknown")
        self.block, self.order = layout
        unsigned = levels.to(torch.int32) + 8
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1)
        self.scales_and_zeros = scales_and_zeros(scales, zero_points, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] >= PREFILL_ROWS["cpu"]:
            return F.linear(x, self.expand())
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group_size, self.scales_and_zeros)
        return out.view(*x.shape[:-1], self.out_features)

    def expand(self) -> Tensor:
        """Weights [out, in] in the activations' dtype, read back from the packed bytes."""
        blocks = self.packed.view(self.out_features // self.block, self.in_features, self.block // 2)
        nibbles = torch.cat((blocks & 15, blocks >> 4), -1)  # [blocks, in, block]
        levels = nibbles[..., self.order].transpose(1, 2).reshape(self.out_features, -1, self.group_size)
        scale, zero = self.scales_and_zeros.permute(2, 1, 0)[..., None]  # [out, groups, 1]
        weight = (levels.to(scale.dtype) - 8) * scale
        return (weight + zero).view(self.out_features, self.in_features)

    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes


class PackedInt4Cuda:
    """The CUDA sibling of `PackedInt4Cpu` (tensor cores, compute capability 8.0 or newer, bf16 activations)."""

    name = "int4-packed-cuda"
    INNER_K_TILES = 8

    def __init__(self, levels: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = levels.shape
        self.group_size = self.in_features // scales.shape[1]
        unsigned = (levels.to(torch.int32) + 8).to(torch.uint8)
        pairs = (unsigned[:, ::2] << 4) | unsigned[:, 1::2]
        self.packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), self.INNER_K_TILES)
        self.scales_and_zeros = scales_and_zeros(scales, zero_points, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        out = torch.ops.aten._weight_int4pack_mm(rows, self.packed, self.group_size, self.scales_and_zeros)
        return out.view(*x.shape[:-1], self.out_features)

    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes


Kernel = Dequantized | PackedInt4Cpu | PackedInt4Cuda


def scales_and_zeros(scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The operators' [groups, out, 2] form: value = (q - 8) * scale + zero with q in 0..15."""
    zeros = torch.zeros_like(scales) if zero_points is None else -zero_points.to(scales.dtype) * scales
    return torch.stack((scales.t(), zeros.t()), -1).to(dtype).contiguous()


def select_kernel(
    levels: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype, packed: bool = True
) -> Kernel:
    """The kernel for 4-bit levels [out, in] on their device, multiplying activations of `dtype`.

    The packed operators compute in bf16; fp32 and fp16 activations take the reference, which is also what `packed=False` asks
    for.
    """
    out_features, in_features = levels.shape
    group_size = in_features // scales.shape[1]
    packable = packed and dtype == torch.bfloat16 and group_size in PACKED_GROUP_SIZES
    if packable and levels.device.type == "cpu":
        layout = cpu_int4_layout()
        if layout is not None and out_features % layout[0] == 0:
            return PackedInt4Cpu(levels, scales, zero_points, dtype)
    if packable and levels.device.type == "cuda" and torch.cuda.get_device_capability(levels.device) >= (8, 0):
        if out_features % 8 == 0 and in_features % (PackedInt4Cuda.INNER_K_TILES * 16) == 0:
            return PackedInt4Cuda(levels, scales, zero_points, dtype)
    return Dequantized(levels, scales, zero_points, dtype)


@cache
def cpu_int4_layout() -> tuple[int, list[int]] | None:
    """How this machine's CPU operator lays out packed rows, found by packing known patterns.

    Returns:
        (block, order): rows are packed in blocks of `block`; with low nibbles then high nibbles of a block side by side, row n of
        the block is nibble `order[n]`. None where the operator is missing or the layout is another one.
    """
    if not hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu"):
        return None
    for block in (64, 32):
        rows = torch.arange(block, dtype=torch.int32)
        digits = [rows % 16, rows // 16]
        read = []
        for digit in digits:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(digit[:, None].expand(block, 32).contiguous(), 1)
            columns = packed.reshape(32, block // 2)
            if not bool((columns == columns[0]).all()):
                break
            read.append(torch.cat((columns[0] & 15, columns[0] >> 4)).long())
        if len(read) == 2 and sorted((read[0] + 16 * read[1]).tolist()) == list(range(block)):
            order = torch.empty(block, dtype=torch.long)
            order[read[0] + 16 * read[1]] = torch.arange(block)
            return block, order.tolist()
    return None

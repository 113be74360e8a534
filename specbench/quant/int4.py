"""4-bit weights that stay packed in memory, multiplied by torch's int4 operators, on a CPU and on CUDA.

What enters: integers -8..7 of a linear layer with a scale (and zero point) per group of inputs. What leaves: kernel objects,
`kernel(x) -> x @ W.T` in bf16. It does not know schemes, modules or files.

The operators are private to torch and carry no stability promise, so the CPU's layout is probed once on this machine: where it is missing,
or lays its bytes in a way that does not read back, `kernels.select_kernel` takes the reference instead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .products import multiplies_bf16

# Rows from which expanding the weights and multiplying in bf16 is faster than the packed operator, whose time grows with every row. On 2
# cores with AVX512, a layer of a 135M model: 4.5 against 3.8 ms at 64 rows, 6.8 against 7.3 at 128, 14.5 against 23 at 512.
EXPAND_ROWS = 128
EXPANDED_AT_ONCE = 1 << 20  # weights; 2 MB stay in a core's cache between being expanded and being multiplied


class PackedInt4Cpu:
    """torch's int4 operator for few rows; for prefill, block after block of the weights is expanded and multiplied."""

    name = "int4-packed-cpu"

    def __init__(self, levels: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = levels.shape
        self.group_size = self.in_features // scales.shape[1]
        layout = cpu_int4_layout()
        if layout is None:
            raise RuntimeError("torch's int4 operator for CPU is missing here, or its layout is unknown")
        self.block, order = layout
        # None: nibbles lie in the order of the outputs already
        self.order = None if order == list(range(self.block)) else torch.tensor(order)
        self.symmetric = zero_points is None
        unsigned = levels.to(torch.int32) + 8
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1)
        self.scales_and_zeros = scales_and_zeros(scales, zero_points, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.shape[0] >= EXPAND_ROWS:
            out = self._expanded(rows)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group_size, self.scales_and_zeros)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)

    def _expanded(self, rows: Tensor) -> Tensor:
        dtype, rows = rows.dtype, rows if multiplies_bf16() else rows.float()
        out = rows.new_empty(rows.shape[0], self.out_features)
        step = max(1, EXPANDED_AT_ONCE // (self.in_features * self.block))
        for start in range(0, self.out_features // self.block, step):
            weights = self.blocks(start, start + step).transpose(0, 1).reshape(self.in_features, -1)
            torch.mm(rows, weights.to(rows.dtype), out=out[:, start * self.block :][:, : weights.shape[1]])
        return self._outputs(out.unflatten(1, (-1, self.block))).flatten(1).to(dtype)

    def blocks(self, start: int, stop: int) -> Tensor:
        """Weights of output blocks, [stop - start, in, block] in the activations' dtype, outputs in the order of nibbles."""
        packed = self.packed.view(-1, self.in_features, self.block // 2)[start:stop]
        levels = torch.stack((packed & 15, packed >> 4), 2).view(torch.int8).sub_(8)
        pairs = self.scales_and_zeros.unflatten(1, (-1, self.block))[:, start:stop]  # [groups, blocks, block, 2]
        if self.order is not None:
            pairs = pairs[:, :, self.order.argsort()]
        scale, zero = pairs.permute(3, 1, 0, 2)[..., None, :].contiguous()  # [blocks, groups, 1, block]
        weights = levels.to(scale.dtype).view(len(packed), -1, self.group_size, self.block).mul_(scale)
        return (weights if self.symmetric else weights.add_(zero)).view(len(packed), self.in_features, self.block)

    def _outputs(self, blocks: Tensor) -> Tensor:
        """The last dimension from the order of nibbles to that of outputs."""
        return blocks if self.order is None else blocks[..., self.order]

    def expand(self) -> Tensor:
        """Weights [out, in] in the activations' dtype, read back from the packed bytes."""
        every = self.blocks(0, self.out_features // self.block)
        return self._outputs(every).transpose(1, 2).reshape(self.out_features, self.in_features)

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


def scales_and_zeros(scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The operators' [groups, out, 2] form: value = (q - 8) * scale + zero with q in 0..15."""
    zeros = torch.zeros_like(scales) if zero_points is None else -zero_points.to(scales.dtype) * scales
    return torch.stack((scales.t(), zeros.t()), -1).to(dtype).contiguous()


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
            wanted = torch.randint(16, (2 * block, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(wanted, 1)
            if torch.equal(unpack_cpu_int4(packed, 2 * block, 64, block, order.tolist()).int(), wanted):
                return block, order.tolist()
    return None


def unpack_cpu_int4(packed: Tensor, rows: int, columns: int, block: int, order: list[int]) -> Tensor:
    """Levels 0..15, uint8 [rows, columns], from the CPU operator's bytes (see `cpu_int4_layout`)."""
    blocks = packed.view(rows // block, columns, block // 2)
    nibbles = torch.cat((blocks & 15, blocks >> 4), -1)  # [blocks, columns, block]
    return nibbles[..., order].transpose(1, 2).reshape(rows, columns)

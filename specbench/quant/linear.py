"""One linear layer: parameters as on disk while loading, then packed for a kernel.

What enters: sizes, a scheme and, later, the stored tensors. What leaves: `x @ W.T + b`. It does not know which model it sits in
or which file fills it. Several projections that read the same input (q, k, v; gate, up) are one layer with shards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .formats import layout, unpack_levels
from .kernels import Kernel, select_kernel
from .scheme import Scheme


class Linear(nn.Module):
    """A linear layer whose parameters are named and shaped as its format stores them.

    Args:
        name: the layer's checkpoint name, for messages.
        in_features: input width.
        out_features: output width of each shard; a single entry for an ordinary layer.
        scheme: how weights are stored; None for plain.
        dtype: dtype of plain weights, scales and bias.
        bias: whether the layer adds one.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, name: str, in_features: int, out_features: tuple[int, ...], scheme: Scheme | None, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__()
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self.scheme, self.dtype = scheme, dtype
        self.slots = layout(scheme, in_features, sum(out_features), dtype, name)
        for leaf, slot in self.slots.items():
            shape = slot.shape if slot.shard_dim is not None or len(out_features) == 1 else (len(out_features), *slot.shape)
            self.register_parameter(leaf, _frozen(torch.empty(shape, dtype=slot.dtype, device="meta")))
        self.register_parameter("bias", _frozen(torch.empty(sum(out_features), dtype=dtype, device="meta")) if bias else None)
        self.kernel: Kernel | None = None

    def shard(self, leaf: str, index: int) -> Tensor:
        """The part of parameter `leaf` that shard `index` fills, as a view."""
        parameter: Tensor = getattr(self, leaf)
        if len(self.out_features) == 1:
            return parameter
        slot = self.slots.get(leaf)
        if slot is not None and slot.shard_dim is None:
            return parameter[index]
        dim = 0 if slot is None else slot.shard_dim or 0
        rows_per_unit = sum(self.out_features) // parameter.shape[dim]
        start = sum(self.out_features[:index]) // rows_per_unit
        return parameter.narrow(dim, start, self.out_features[index] // rows_per_unit)

    @torch.no_grad()
    def finish(self, packed: bool = True) -> None:
        """Replace the stored tensors of a quantized layer by what its kernel multiplies."""
        if self.scheme is None:
            return
        stored = {leaf: getattr(self, leaf).data for leaf in self.slots}
        levels, scales, zero_points = unpack_levels(self.scheme, stored, sum(self.out_features), self.in_features, self.name)
        self.kernel = select_kernel(levels, scales, zero_points, self.dtype, packed)
        for leaf in self.slots:
            self.register_parameter(leaf, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel is None:
            return F.linear(x, self.weight, self.bias)
        out = self.kernel(x)
        return out if self.bias is None else out + self.bias


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

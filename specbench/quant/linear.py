"""One linear layer: parameters as on disk while loading, then packed for a kernel.

What enters: sizes, a scheme and, later, the stored tensors. What leaves: `x @ W.T + b`. It does not know which model it sits in
or which file fills it. Several projections that read the same input (q, k, v; gate, up) are one layer with shards.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from .formats import expand, layout
from .kernels import Inputs, Kernel, fp8_kernel, select_kernel
from .products import product
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
            if slot.shard_dim is not None:
                rows = (sum(self._extent(leaf, i) for i in range(len(out_features))),)
                slot = replace(slot, shape=slot.shape[: slot.shard_dim] + rows + slot.shape[slot.shard_dim + 1 :])
            shape = slot.shape if slot.shard_dim is not None or len(out_features) == 1 else (len(out_features), *slot.shape)
            self.register_parameter(leaf, _frozen(torch.empty(shape, dtype=slot.dtype, device="meta")))
        self.register_parameter("bias", _frozen(torch.empty(sum(out_features), dtype=dtype, device="meta")) if bias else None)
        self.kernel: Kernel | None = None

    def initial(self, leaf: str) -> float:
        """What parameter `leaf` holds until a file fills it (see `formats.Slot`)."""
        slot = self.slots.get(leaf)
        return 0.0 if slot is None or slot.initial is None else slot.initial

    def shard(self, leaf: str, index: int) -> Tensor:
        """The part of parameter `leaf` that shard `index` fills, as a view."""
        parameter: Tensor = getattr(self, leaf)
        if len(self.out_features) == 1:
            return parameter
        slot = self.slots.get(leaf)
        if slot is not None and slot.shard_dim is None:
            return parameter[index]
        dim = 0 if slot is None else slot.shard_dim or 0
        start = sum(self._extent(leaf, i) for i in range(index))
        return parameter.narrow(dim, start, self._extent(leaf, index))

    def _extent(self, leaf: str, index: int) -> int:
        """How long shard `index` is along the dimension in which shards of `leaf` join: outputs, words of outputs, or blocks of them."""
        rows, slot = self.out_features[index], self.slots.get(leaf)
        if slot is None or slot.shard_dim is None:
            return rows
        if self.scheme is not None and self.scheme.block is not None and leaf.startswith("weight_scale"):
            return -(-rows // self.scheme.block[0])
        return rows * slot.shape[slot.shard_dim] // sum(self.out_features)

    @torch.no_grad()
    def finish(self, packed: bool = True, strict: bool = True) -> None:
        """Replace the stored tensors of a quantized layer by what its kernel multiplies.

        Args:
            packed: keep weights narrow in memory where a kernel multiplies them so; False expands them.
            strict: refuse scales that are not finite and positive; an engine's policy multiplies whatever is there.

        Raises:
            CheckpointError: unusable scales, or an index of groups out of range.
        """
        if self.scheme is None or self.kernel is not None:  # a borrowed head has been finished by its owner
            return
        shards = [self._stored(i) for i in range(len(self.out_features))]
        expanded = [
            expand(self.scheme, stored, self.in_features, n, self.name, strict) for stored, n in zip(shards, self.out_features, strict=True)
        ]
        inputs = self._inputs(shards)
        self.kernel = self._fp8_kernel(shards, inputs) if packed else None
        if self.kernel is None:
            self.kernel = select_kernel(expanded, self.scheme, inputs, self.dtype, packed)
        for leaf in self.slots:
            self.register_parameter(leaf, None)

    def _stored(self, index: int) -> dict[str, Tensor]:
        return {leaf: self.shard(leaf, index).data for leaf in self.slots if getattr(self, leaf) is not None}

    def _inputs(self, shards: list[dict[str, Tensor]]) -> Inputs | None:
        """Static scales of fused shards are of one input; the largest serves all, as vLLM does."""
        if self.scheme is None or self.scheme.activations is None:
            return None
        scales = [s["input_scale"].float().reshape(-1) for s in shards if "input_scale" in s]
        global_scales = [s["input_global_scale"].float().reshape(-1) for s in shards if "input_global_scale" in s]
        if self.scheme.format == "modelopt-nvfp4":  # stored as a divisor: amax / (6 * 448)
            global_scales, scales = [1.0 / torch.cat(scales).max().reshape(1)], []
        zero_points = [s["input_zero_point"] for s in shards if "input_zero_point" in s]
        scale = torch.cat(scales).max().reshape(1) if scales else torch.cat(global_scales).min().reshape(1) if global_scales else None
        return Inputs(self.scheme.activations, scale, zero_points[0] if zero_points else None)

    def _fp8_kernel(self, shards: list[dict[str, Tensor]], inputs: Inputs | None) -> Kernel | None:
        weight = getattr(self, "weight", None)
        if inputs is None or inputs.how.kind != "fp8" or weight is None or "weight_scale" not in self.slots or self.scheme is None:
            return None
        if self.scheme.strategy not in ("tensor", "channel"):
            return None
        return fp8_kernel(weight.data, [s["weight_scale"] for s in shards], self.out_features, inputs, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]; returns [..., out]."""
        if self.kernel is None:
            # As rows: for a slice of a [B, n, in] tensor, F.linear would take a batched product that copies the whole weight.
            rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
            out = product(rows, self.weight, self.bias)
            return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
        out = self.kernel(x)
        return out if self.bias is None else out + self.bias


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)

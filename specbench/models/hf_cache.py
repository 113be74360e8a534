"""A key/value cache for transformers models that behaves as ours: static tensors, written at slots, rolled back by looking away.

What enters: keys and values of one layer, as a transformers attention hands them over, and the `Step` of the pass. What leaves: keys and
values of every slot below the step's limit. It does not know models, masks or acceptance.

To transformers it is a cache that holds nothing: during a prompt pass a model then builds its own causal masks, and in any other pass the
masks are given. Sliding-window layers keep all slots, so that a roll-back finds what it needs; the mask is what slides.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from .cache import Step, gather_slots, move_row, write_slots


class SlotCache(transformers.Cache):
    """Caches of all layers of one model, each [batch, heads, length, dim] in the dtype and on the device of the first keys that come, whose
    heads and sizes may differ from layer to layer.

    rounded_to: a narrower dtype that keys and values pass through.
    """

    def __init__(self, batch: int, length: int, rounded_to: torch.dtype | None = None) -> None:
        super().__init__(layers=[])
        self.batch, self.length, self.rounded_to = batch, length, rounded_to
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys, values
        self.step: Step | None = None  # of the pass that is under way

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [b, heads, n, dim] of layer `layer_idx`; return those of all visible slots [b, heads, limit, dim]."""
        assert self.step is not None, "a pass names its step first"
        if layer_idx not in self.tensors:
            self.tensors[layer_idx] = self._allocate(key_states), self._allocate(value_states)
        keys, values = self.tensors[layer_idx]
        return self._write(keys, key_states), self._write(values, value_states)

    def _allocate(self, new: Tensor) -> Tensor:
        return new.new_zeros(self.batch, new.shape[1], self.length, new.shape[3])

    def _write(self, held: Tensor, new: Tensor) -> Tensor:
        assert self.step is not None
        slots = self.step.slots.to(held.device)
        return write_slots(held, new.transpose(1, 2), slots, self.step.row, self.step.limit, self.rounded_to)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` over row `target`."""
        for tensor in self._all():
            move_row(tensor, source, target, length)

    def gather(self, sources: Tensor, targets: Tensor) -> None:
        """In every row b of the first ones, copy slots sources[b] [b, n] to slots targets[b]; read before written."""
        for tensor in self._all():
            gather_slots(tensor, sources.to(tensor.device), targets.to(tensor.device))

    def nbytes(self) -> int:
        """Bytes of what is allocated: nothing before the first pass."""
        return sum(tensor.nbytes for tensor in self._all())

    def sizes(self) -> list[tuple[int, int]]:
        """Heads and their width, of keys and values of every layer."""
        return [(tensor.shape[1], tensor.shape[3]) for tensor in self._all()]

    def _all(self) -> list[Tensor]:
        return [tensor for pair in self.tensors.values() for tensor in pair]

"""Forward passes over few tokens, recorded once and replayed without Python: what CUDA graphs are to a GPU, on a CPU.

What enters: a model's pass as a function of tensors, and where its tokens go. What leaves: the same numbers, bit by bit. It does not know
what the pass computes.

At one token of a 135M model Python and its binding take as long as the arithmetic. `torch.jit.trace` records the operators of a shape; the
plain executor replays them (the optimising one would specialise on every length). torch calls it deprecated in favour of torch.compile,
which needs a C++ compiler and half a minute; where it is missing or refuses, passes run as they are.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cache import Cache, LayerCache, Step

FEW_ROWS = 16  # tokens of all sequences together; with more, arithmetic hides Python
AFTER = 8  # passes of a shape before it is recorded: recording takes as long as some twenty

Body = Callable[[Sequence[Tensor], Step, Cache], tuple[Tensor, ...]]


def _plain_executor() -> Any:
    jit: Any = torch.jit
    return jit.optimized_execution(False)


@dataclass(slots=True)
class FixedStep(Step):
    """A `Step` whose masks were made beforehand. Its limit is the size of a tensor, so that recordings follow it; its own size is not, so
    that they hold no operators that read it."""

    fixed: tuple[int, int] = (0, 0)

    def size(self) -> tuple[int, int]:
        return self.fixed

    def mask(self, window: int | None, repeat: int = 1) -> Tensor | None:
        return self.masks.get((window, repeat))


class Tracer:
    """Recordings of one model's pass.

    Args:
        windows: of the layers; None sees everything.
        repeat: rows of a mask per token (see `Step.mask`).
    """

    def __init__(self, windows: Sequence[int | None], repeat: int) -> None:
        self.windows, self.repeat = tuple(dict.fromkeys(windows)), repeat
        self.enabled = hasattr(torch.jit, "trace")
        self.passes: Counter[Hashable] = Counter()
        self.recorded: dict[Hashable, Any] = {}

    def run(self, body: Body, tensors: Sequence[Tensor], step: Step, cache: Cache, key: Hashable) -> tuple[Tensor, ...]:
        """`body(tensors, step, cache)`. key: whatever else decides what `body` does."""
        positions = step.positions
        if not self.enabled or step.causal or positions.device.type != "cpu" or positions.numel() > FEW_ROWS:
            return body(tensors, step, cache)
        masks = {window: step.mask(window, self.repeat) for window in self.windows}
        kinds = tuple((window, mask is None) for window, mask in masks.items())
        shape = (positions.shape, step.row, cache.batch, cache.layers[0].kv.dtype, cache.layers[0].rounded_to, kinds, key)
        recorded = self.recorded.get(shape)
        if recorded is None:
            self.passes[shape] += 1
            if self.passes[shape] <= AFTER:
                return body(tensors, step, cache)
            recorded = self._record(body, tensors, step, cache, masks)
            if recorded is None:
                return body(tensors, step, cache)
            self.recorded[shape] = recorded
        with _plain_executor():
            return recorded(*_inputs(tensors, step, cache, masks))

    def _record(self, body: Body, tensors: Sequence[Tensor], step: Step, cache: Cache, masks: dict[int | None, Tensor | None]) -> Any:
        count, windows = len(tensors), [window for window, mask in masks.items() if mask is not None]
        row, size, batch, rounded_to = step.row, step.size(), cache.batch, cache.layers[0].rounded_to

        def flat(*inputs: Tensor) -> tuple[Tensor, ...]:
            given, (positions, slots, marker, cosines, sines), rest = inputs[:count], inputs[count : count + 5], inputs[count + 5 :]
            known = {(window, self.repeat): mask for window, mask in zip(windows, rest, strict=False)}
            place = FixedStep(positions, slots, row, marker.shape[0], (cosines, sines), bool(known), masks=known, fixed=size)
            layers = [LayerCache(kv, rounded_to) for kv in rest[len(windows) :]]
            return body(given, place, Cache.of(layers, batch))

        try:
            with warnings.catch_warnings(), _plain_executor():
                warnings.simplefilter("ignore")  # deprecation; Python values that the key above tells apart
                return torch.jit.trace(flat, _inputs(tensors, step, cache, masks), check_trace=False)
        except (RuntimeError, NotImplementedError):
            self.enabled = False
            return None


def _inputs(tensors: Sequence[Tensor], step: Step, cache: Cache, masks: dict[int | None, Tensor | None]) -> tuple[Tensor, ...]:
    marker = torch.empty(step.limit, dtype=torch.bool)  # only its size counts
    given = (mask for mask in masks.values() if mask is not None)
    return (*tensors, step.positions, step.slots, marker, *step.rotary, *given, *(layer.kv for layer in cache.layers))

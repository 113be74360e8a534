"""CUDA graphs: record a stage of the round once per shape, replay it afterwards.

What enters: a stage, as a function over tensors that stay where they are, and the shapes that it depends on. What leaves: its result, in
tensors that stay where they are too. It does not know what a stage does. Without CUDA, or where it is switched off, the function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
LENGTH_STEP = 256  # visible lengths are rounded up to it, so that few graphs serve all lengths


class Graphs:
    """Recorded stages by key.

    Args:
        enabled: record and replay; False runs every stage as it is.
        state: tensors that a stage changes; recording runs it three times, and puts them back.
    """

    def __init__(self, enabled: bool, state: Callable[[], list[Tensor]]) -> None:
        self.enabled, self.state = enabled, state
        self.recorded: dict[Hashable, tuple[Any, Any]] = {}
        self.pool: Any = None

    def run(self, key: Hashable, stage: Callable[[], Result]) -> Result:
        """The result of `stage`, which must read and write fixed tensors only, and shapes that `key` tells apart."""
        if not self.enabled:
            return stage()
        if key not in self.recorded:
            self.recorded[key] = self._record(stage)
        graph, result = self.recorded[key]
        graph.replay()
        return result

    def _record(self, stage: Callable[[], Result]) -> tuple[Any, Result]:
        before = [tensor.clone() for tensor in self.state()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                stage()
                for tensor, kept in zip(self.state(), before, strict=True):
                    tensor.copy_(kept)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = stage()
        self.pool = graph.pool()
        for tensor, kept in zip(self.state(), before, strict=True):
            tensor.copy_(kept)
        return graph, result

    def batch(self, active: int, most: int) -> int:
        """`active` sequences as a stage should see them: rounded up to a power of two where stages are recorded, at most `most`."""
        return active if not self.enabled else min(1 << (active - 1).bit_length(), most)

    def longest(self, length: int, most: int) -> int:
        """`length` as a stage should see it: rounded up where stages are recorded, at most `most`."""
        return length if not self.enabled else min(-(-length // LENGTH_STEP) * LENGTH_STEP, most)

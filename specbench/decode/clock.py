"""Where a round's time goes, without stopping the device for it.

What enters: marks between stages. What leaves: seconds per stage. On a CPU marks read the clock; on CUDA they record events, which are read
once a round, after the host has waited for the round's tokens anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class StageClock:
    """Seconds per stage of the round that `settle` ended last."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.started, self.away = self._now(), 0.0
        self.marks: list[tuple[str, Any]] = []
        self.restart()

    def _now(self) -> float:
        return time.perf_counter()

    def _point(self) -> Any:
        if not self.cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Begin a round."""
        self.marks = [("", self._point())]

    def mark(self, stage: str) -> None:
        """What ran since the last mark was `stage`."""
        self.marks.append((stage, self._point()))

    def settle(self) -> dict[str, float]:
        """Seconds per stage since `restart`; on CUDA the caller has synchronised before."""
        found: dict[str, float] = {}
        for (_, before), (stage, after) in zip(self.marks, self.marks[1:], strict=False):
            seconds = before.elapsed_time(after) / 1e3 if self.cuda else after - before
            found[stage] = found.get(stage, 0.0) + seconds
        return found

    def elapsed(self) -> float:
        """Seconds since the clock was made, without those that `leave` spent elsewhere."""
        return self._now() - self.started - self.away

    def leave(self, results: Iterable[Result]) -> Iterator[Result]:
        """Hand out results; what the receiver does with them is not decoding time."""
        for result in results:
            left = self._now()
            yield result
            self.away += self._now() - left

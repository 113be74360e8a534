"""Work that takes turns, a slice of time each: a slow moment of the machine then falls on all of it alike, and ratios hold.

What enters: works by name, generators that yield how far they are, 0 to 1, and return what they found. What leaves: what each found. A work
keeps its own time, of what it does between its yields. It does not know what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping

SLICE = 0.25  # seconds; a machine's slow moments last longer

Work = Generator[float, None, dict[str, float]]


def take_turns(
    works: Mapping[str, Work], seconds: float = SLICE, told: Callable[[float], object] = lambda _: None
) -> dict[str, dict[str, float]]:
    """Run all works to their ends, each for `seconds` before the next one's turn.

    Args:
        told: called after each turn with the progress made in it, 1 for a whole work.
    """
    going, found = dict(works), {}
    reached = dict.fromkeys(works, 0.0)
    while going:
        for name, work in list(going.items()):
            ends, before = time.perf_counter() + seconds, reached[name]
            try:
                reached[name] = next(work)
                while time.perf_counter() < ends:
                    reached[name] = next(work)
            except StopIteration as end:
                found[name], reached[name] = end.value, 1.0
                del going[name]
            told(reached[name] - before)
    return found

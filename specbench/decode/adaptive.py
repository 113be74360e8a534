"""Choose k for every round from what rounds cost here and what has been accepted lately.

What enters: times and accepted counts of past rounds. What leaves: the next k. It does not know models or tokens.

The best k has the most expected tokens per second, (1 + a1 + a1 a2 + ...) * batch / (T(k + 1) + D(k)), with a the recent conditional
acceptance per position, T the time of a verifier pass over so many tokens and D the draft's. What is not yet measured is drawn as a line
through what is. A draft may be bad: whatever rounds with k > 0 have lost against k = 0 so far, plus the most that the next could lose, is
kept under `ADVANCE` passes and `BUDGET` of the time spent. The advance pays for the first tries: without it a good draft waits for
hundreds of tokens, as two wrong proposals in a row cost what thirty rounds at k = 0 put aside.

Costs belong to models and machine, and are kept from run to run as long as the models live. Acceptance belongs to the text as well: of
earlier runs it counts as a belief that a few rounds outweigh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

BUDGET = 0.02
ADVANCE = 1.0  # passes over one token a sequence
FADE = 0.9  # what a past round weighs against the next one in acceptance
NEW_COST = 0.2  # what a new time weighs against the earlier ones
NEW_LOWER_COST = 0.5  # the same for one below them: a shape's first passes are its slowest, and what disturbs a pass only adds to it
FORGET = 0.98  # the same for a place that the round did not propose: what was seen there once is tried again some day
PRIOR = 0.6, 4.0  # conditional acceptance believed before anything is seen, and the rounds that the belief weighs
LIKE_BEFORE = 1.0  # rounds that the place before weighs in what is believed of a place
SPIKE = 1.5
FIRST = 3  # rounds at k = 0 before anything is tried; one in a later run, as machines change
WAIT, LONGEST_WAIT = 8, 256  # rounds between two tries of a draft that does not pay, doubled after each
LATER_WAIT = 32  # the most that a run waits for its first try because of earlier ones: another text may suit the draft

_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Hashable, AdaptiveK]]] = WeakKeyDictionary()


def adaptive_k(verifier: Any, proposer: Any, most: int) -> AdaptiveK:
    """The choice for a run of these models, which begins now, with what their earlier runs cost."""
    of_drafts = _known.setdefault(verifier, WeakKeyDictionary())
    choices = of_drafts.setdefault(getattr(proposer, "draft", proposer), {})
    choice = choices.setdefault((type(proposer), getattr(proposer, "p_min", 0.0), most), AdaptiveK(most))
    choice.begin()
    return choice


class AdaptiveK:
    """State of the choice.

    Args:
        most: the greatest k.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.verify: dict[tuple[int, int], float] = {}  # (batch, tokens a sequence) -> seconds
        self.draft: dict[tuple[int, int], float] = {}  # (batch, k) -> seconds
        self.accepted = [PRIOR[0] * PRIOR[1], *[0.0] * (most - 1)]
        self.reached = [PRIOR[1], *[0.0] * (most - 1)]
        self.wait: dict[int, int] = defaultdict(lambda: WAIT)  # batch -> rounds between two tries
        self.first = FIRST
        self.spent = self.lost = 0.0
        self.since_try = self.rounds = 0

    def begin(self) -> None:
        """A run begins: what may be lost is counted anew, and what was accepted counts no more than what is believed of an unseen draft."""
        self.first = 1 if self.verify else FIRST
        self.spent = self.lost = 0.0
        self.since_try = self.rounds = 0
        for batch, rounds in self.wait.items():
            self.wait[batch] = min(rounds, LATER_WAIT)
        for place, reached in enumerate(self.reached):
            keep = min(1.0, PRIOR[1] / reached) if reached else 1.0
            self.accepted[place], self.reached[place] = keep * self.accepted[place], keep * reached

    def choose(self, batch: int) -> int:
        """k of the next round, 0 .. most."""
        if (batch, 1) not in self.verify or self.rounds < self.first:
            return 0
        plain = self._cost(batch, 0)
        tried = max((k for b, k in self.draft if b == batch), default=0)
        best = max(range(min(tried + 1, self.most) + 1), key=lambda k: self._rate(batch, k))  # costs are not guessed further than that
        if best == 0 and self.since_try >= self.wait[batch]:
            best = 1
        while best and self.lost + self._cost(batch, best) - plain > BUDGET * self.spent + ADVANCE * plain:
            best -= 1
        return best

    def observe(self, k: int, batch: int, draft_s: float, verify_s: float, accepted: Sequence[int], proposed: Sequence[int]) -> None:
        """A round: its k and times, and for each sequence the accepted and really proposed counts."""
        self.rounds += 1
        verify_s = _blend(self.verify, (batch, k + 1), verify_s)
        if k:
            draft_s = _blend(self.draft, (batch, k), draft_s)
            for place in range(k):
                reached = [a for a, p in zip(accepted, proposed, strict=True) if a >= place and p > place]
                if reached:
                    self.accepted[place] = FADE * self.accepted[place] + sum(a > place for a in reached) / len(reached)
                    self.reached[place] = FADE * self.reached[place] + 1
            for place in range(max(k, 1), self.most):
                self.accepted[place] *= FORGET
                self.reached[place] *= FORGET
        seconds = draft_s + verify_s
        self.spent += seconds
        self.lost += 0.0 if k else draft_s  # the draft reads what it will need if it is tried again
        if k and (batch, 1) in self.verify:
            plain = self._cost(batch, 0)
            tokens = sum(accepted) / max(len(accepted), 1) + 1
            self.lost += seconds - tokens * plain
            paid = self._rate(batch, k) >= self._rate(batch, 0)
            self.wait[batch] = WAIT if paid else min(2 * self.wait[batch], LONGEST_WAIT)
        self.since_try = 0 if k else self.since_try + 1

    def _rate(self, batch: int, k: int) -> float:
        """Expected tokens a second and sequence."""
        expected, path, belief = 1.0, 1.0, PRIOR[0]
        for place in range(k):
            belief = self._belief(place, belief)
            path *= belief
            expected += path
        return expected / self._cost(batch, k)

    def _belief(self, place: int, before: float) -> float:
        """Conditional acceptance at a place: what was seen there, and a little of what is believed of the place before."""
        weight = LIKE_BEFORE if place else 0.0
        return (self.accepted[place] + weight * before) / (self.reached[place] + weight)

    def _cost(self, batch: int, k: int) -> float:
        measured = {n: s for (b, n), s in self.verify.items() if b == batch}
        # A pass over fewer tokens takes no longer than one over more: a time from slower days would keep a bad draft going.
        passes = {n: min(s for m, s in measured.items() if m >= n) for n in measured}
        plain = passes[1]
        # unmeasured: each further token a tenth of a pass and each draft step a seventh, until two points make a line
        verify = _line(passes, k + 1, plain / 10)
        return verify + (_line({n: s for (b, n), s in self.draft.items() if b == batch}, k, plain / 7, zero=True) if k else 0.0)


def _blend(table: dict[tuple[int, int], float], key: tuple[int, int], value: float) -> float:
    """Take a new time into `table` and return it, cut to `SPIKE` times the known one: a pause of the machine, or a shape that was recorded
    in this very round, is no new price."""
    if key not in table:
        table[key] = value
        return value
    value = min(value, SPIKE * table[key])
    weight = NEW_LOWER_COST if value < table[key] else NEW_COST
    table[key] += weight * (value - table[key])
    return value


def _line(points: dict[int, float], at: int, slope: float, zero: bool = False) -> float:
    """`points` read at `at`: exactly, between neighbours, or on from the nearest one with the slope of the last two."""
    if at in points:
        return points[at]
    if zero:
        points = {0: 0.0, **points}
    below, above = [n for n in points if n < at], [n for n in points if n > at]
    if below and above:
        left, right = max(below), min(above)
        return points[left] + (points[right] - points[left]) * (at - left) / (right - left)
    nearest, *others = sorted(points, key=lambda n: abs(n - at))
    if others:
        slope = (points[nearest] - points[others[0]]) / (nearest - others[0])
    return max(points[nearest] + slope * (at - nearest), points[nearest] if at > nearest else 0.0)

"""Every rate and speed, derived from raw counts and seconds in this one place.

What enters: per prompt, the accepted and the really proposed draft tokens of each round, in order; token counts; seconds. What
leaves: numbers, None where a number is undefined. It does not know files, tables, models or clocks.

Words, as everywhere in the package: a *round* drafts k tokens, verifies them and commits some; `accepted` counts draft tokens only; the
verifier's own token of a round is the *bonus*. The first output token comes from the prompt pass and belongs to no round. The last round
of a prompt may be cut short; it counts with what it really proposed. A round that proposed nothing is no *draft*. Means over rounds weigh
long outputs more ("micro"), means over prompts weigh each prompt alike ("macro").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataError

Counts = Sequence[Sequence[int]]
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its percentile bootstrap interval over prompts.

    `low` and `high` are None where fewer than two prompts were measured.
    """

    estimate: float
    low: float | None
    high: float | None
    num_prompts: int


def flatten(accepted: Counts, proposed: Counts | None = None) -> tuple[Array, Array]:
    """All rounds of all prompts, side by side: (accepted [rounds], proposed [rounds]), int64.

    Without `proposed`, the second array repeats the first.

    Raises:
        DataError: the two differ in shape, a count is negative, or more was accepted than proposed.
    """
    a = _concatenate(accepted)
    if proposed is None:
        p = a
    else:
        lengths = [len(rounds) for rounds in accepted], [len(rounds) for rounds in proposed]
        if lengths[0] != lengths[1]:
            raise DataError(f"accepted and proposed counts do not belong together: rounds per prompt are {lengths[0]} and {lengths[1]}")
        p = _concatenate(proposed)
    wrong = np.flatnonzero((a < 0) | (a > p))
    if wrong.size:
        i = int(wrong[0])
        raise DataError(
            f"round {i} (counted over all prompts): accepted {a[i]} of {p[i]} proposed draft tokens; expected 0..{p[i]}, bonus not counted"
        )
    return a, p


def mean_acceptance_length(accepted: Counts, proposed: Counts | None = None) -> float | None:
    """tau: tokens a round commits, 1 + accepted, **bonus counted**; mean **over rounds**. None without rounds.

    The definition of vLLM's log (`1 + accepted / drafts`) and of the EAGLE papers. With `proposed`, rounds that proposed nothing are no
    drafts and do not count, as in vLLM's num_drafts; without it every round counts as one.
    """
    a = _drafts(accepted, proposed)
    return 1 + float(a.mean()) if a.size else None


def mean_acceptance_length_over_prompts(accepted: Counts, proposed: Counts | None = None) -> float | None:
    """`mean_acceptance_length` of each prompt (**bonus counted**), then the mean **over prompts**; those without a draft are left out."""
    known = lengths_of_prompts(accepted, proposed)
    return float(np.mean(known)) if known else None


def lengths_of_prompts(accepted: Counts, proposed: Counts | None = None) -> list[float]:
    """`mean_acceptance_length` of each prompt that has one."""
    lengths = [mean_acceptance_length([rounds], None if proposed is None else [proposed[i]]) for i, rounds in enumerate(accepted)]
    return [length for length in lengths if length is not None]


def mean_accepted_tokens(accepted: Counts, proposed: Counts | None = None) -> float | None:
    """Accepted draft tokens per round, **bonus not counted**; mean **over rounds**, as `mean_acceptance_length`. None without rounds."""
    a = _drafts(accepted, proposed)
    return float(a.mean()) if a.size else None


def draft_acceptance_rate(accepted: Counts, proposed: Counts) -> float | None:
    """Accepted / really proposed draft tokens, **bonus not counted**, **over all rounds** together. None where nothing was proposed.

    A cut round counts with what it proposed, so a draft that is always right has rate 1.
    """
    a, p = flatten(accepted, proposed)
    return float(a.sum() / p.sum()) if p.sum() else None


def accepted_histogram(accepted: Counts) -> dict[int, int]:
    """Rounds by their accepted draft tokens (**bonus not counted**), ascending; the values sum to the number of rounds."""
    values, counts = np.unique(flatten(accepted)[0], return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}


def acceptance_per_position(accepted: Counts, proposed: Counts, num_speculative_tokens: int | None = None) -> Array:
    """Unconditional rate of each draft position, [k] float64: accepted there / proposed there, **over rounds**; bonus not counted.

    Only rounds that proposed a position count for it; NaN where none did. Where every draft proposed k, the sum is
    `mean_acceptance_length - 1` and the rates never rise (`full_rounds` keeps just those). This is vLLM's per-position rate.

    Args:
        num_speculative_tokens: k; by default the most that any round proposed.
    """
    a, p = flatten(accepted, proposed)
    positions = np.arange(_width(p, num_speculative_tokens))[:, None]
    return _divide((a > positions).sum(1), (p > positions).sum(1))


def conditional_acceptance_per_position(accepted: Counts, proposed: Counts, num_speculative_tokens: int | None = None) -> Array:
    """Rate of each draft position given that all earlier ones were accepted, [k] float64, **over rounds**; bonus not counted.

    NaN, never 0, where no round reached a position. Where every round proposed k this is the ratio of neighbouring unconditional rates. It
    is EAGLE's n-alpha, the flat curve of its papers.
    """
    a, p = flatten(accepted, proposed)
    positions = np.arange(_width(p, num_speculative_tokens))[:, None]
    reached = (a >= positions) & (p > positions)
    return _divide((a > positions).sum(1), reached.sum(1))


def full_rounds(accepted: Counts, proposed: Counts, num_speculative_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """The same counts without the rounds that proposed fewer than k tokens."""
    flatten(accepted, proposed)
    pairs = [[(int(a), int(p)) for a, p in zip(*prompt, strict=True)] for prompt in zip(accepted, proposed, strict=True)]
    kept = [[(a, p) for a, p in rounds if p >= num_speculative_tokens] for rounds in pairs]
    return [[a for a, _ in rounds] for rounds in kept], [[p for _, p in rounds] for rounds in kept]


def truncate(accepted: Counts, proposed: Counts, num_speculative_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """A chain of k' < k read off a chain of k: the same rounds as if only k' tokens had been drafted.

    Its mean acceptance length is 1 + the first k' per-position rates, where every draft proposed k' at least. That is what to expect of a
    run at k', not exactly what it gives: its rounds start at other tokens.
    """
    flatten(accepted, proposed)

    def cut(counts: Counts) -> list[list[int]]:
        return [[min(int(count), num_speculative_tokens) for count in rounds] for rounds in counts]

    return cut(accepted), cut(proposed)


def decode_tokens_per_second(num_output_tokens: int, decode_s: float) -> float | None:
    """Tokens after the first / seconds after the first token: the prompt pass is in neither. None for outputs of one token."""
    return _speed(num_output_tokens - 1, decode_s)


def end_to_end_tokens_per_second(num_output_tokens: int, total_s: float) -> float | None:
    """All output tokens / seconds from the start of the prompt pass to the last token. None without output."""
    return _speed(num_output_tokens, total_s)


def speedup(tokens_per_second: float | None, baseline_tokens_per_second: float | None) -> float | None:
    """Speed / speed of the same prompts at k=0 in the same run, both of one kind (decode or end-to-end). None where either is."""
    if tokens_per_second is None or baseline_tokens_per_second is None:
        return None
    return tokens_per_second / baseline_tokens_per_second


def break_even_length(round_s: float, plain_token_s: float) -> float:
    """Mean acceptance length (**bonus counted**, **over rounds**) at which rounds of `round_s` seconds are as fast as plain tokens.

    A longer one is faster, a shorter one slower: decode speedup = mean acceptance length / break-even length.
    """
    if not (round_s > 0 and plain_token_s > 0):
        raise DataError(f"a round took {round_s} s and a plain token {plain_token_s} s; expected positive times")
    return round_s / plain_token_s


def bootstrap(
    sums: Array, statistic: Callable[[Array], Array], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile interval of a figure that is a function of sums over prompts; whole prompts are drawn with replacement.

    Args:
        sums: [prompts, m], what each prompt adds to each sum (accepted tokens and rounds, tokens and seconds, ...).
        statistic: maps summed rows [..., m] to the figure [...], e.g. `ratio`.
        seed: of the draws; the same seed gives the same interval.
    """
    sums = np.asarray(sums, dtype=np.float64)
    n = len(sums)
    if n == 0:
        raise DataError("an interval over prompts needs at least one prompt that was measured; found none")
    estimate = float(statistic(sums.sum(0)))
    if n == 1:
        return Interval(estimate, None, None, n)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)  # [resamples, prompts], how often each
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(draws @ sums)
    tail = 50 * (1 - confidence)
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return Interval(estimate, float(low), float(high), n)


def ratio(sums: Array) -> Array:
    """First sum / second sum: the statistic of a pooled rate."""
    quotient: Array = sums[..., 0] / sums[..., 1]
    return quotient


def acceptance_length_interval(
    accepted: Counts, proposed: Counts | None = None, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """`mean_acceptance_length` (**bonus counted**, mean **over rounds**) with its interval over prompts; None without rounds."""
    drafts = [_drafts([rounds], None if proposed is None else [proposed[i]]) for i, rounds in enumerate(accepted)]
    sums = np.array([(a.sum() + a.size, a.size) for a in drafts if a.size])
    return bootstrap(sums, ratio, confidence=confidence, resamples=resamples, seed=seed) if len(sums) else None


def _drafts(accepted: Counts, proposed: Counts | None) -> Array:
    """Accepted tokens of every round that drafted, side by side."""
    a, p = flatten(accepted, proposed)
    return a if proposed is None else a[p > 0]


def _concatenate(counts: Counts) -> Array:
    return np.concatenate([np.asarray(rounds, dtype=np.int64) for rounds in counts] or [np.empty(0, np.int64)])


def _width(proposed: Array, num_speculative_tokens: int | None) -> int:
    most = int(proposed.max()) if proposed.size else 0
    if num_speculative_tokens is None:
        return most
    if num_speculative_tokens < most:
        raise DataError(
            f"a round proposed {most} draft tokens where num_speculative_tokens is {num_speculative_tokens}; "
            "`truncate` reads a shorter chain off a longer one"
        )
    return num_speculative_tokens


def _divide(part: Array, whole: Array) -> Array:
    rates: Array = np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return rates


def _speed(num_tokens: int, seconds: float) -> float | None:
    if num_tokens <= 0:
        return None
    if not seconds > 0:
        raise DataError(f"{num_tokens} tokens took {seconds} s; expected a positive time")
    return num_tokens / seconds

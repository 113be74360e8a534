"""Figures from raw counts: reported confusions by their case numbers, and identities that hold for any counts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.bench import metrics
from specbench.errors import DataError

NAN = float("nan")


def rounds(max_k=6):
    """Per prompt, (accepted, proposed) of each round: full rounds of k, the last of a prompt perhaps cut."""

    def prompt(k):
        full = st.tuples(st.integers(0, k), st.just(k))
        cut = st.integers(0, k).flatmap(lambda p: st.tuples(st.integers(0, p), st.just(p)))
        return st.builds(lambda body, last: [*body, *last], st.lists(full, max_size=12), st.lists(cut, max_size=1))

    return (
        st.integers(1, max_k)
        .flatmap(lambda k: st.tuples(st.just(k), st.lists(prompt(k), max_size=6)))
        .map(lambda drawn: (drawn[0], [[a for a, _ in p] for p in drawn[1]], [[p for _, p in q] for q in drawn[1]]))
    )


BASIC = ([[3, 0, 2]], [[3, 3, 3]])
CASES = [
    ("B100", "length with bonus, over rounds", metrics.mean_acceptance_length(BASIC[0]), 8 / 3),
    ("B100", "accepted only", metrics.mean_accepted_tokens(BASIC[0]), 5 / 3),
    ("B100", "draft acceptance rate", metrics.draft_acceptance_rate(*BASIC), 5 / 9),
    ("B100", "per position", metrics.acceptance_per_position(*BASIC), [2 / 3, 2 / 3, 1 / 3]),
    ("B100", "positions sum to accepted only", metrics.acceptance_per_position(*BASIC).sum(), metrics.mean_accepted_tokens(BASIC[0])),
    ("B101", "unconditional", metrics.acceptance_per_position(*BASIC), [2 / 3, 2 / 3, 1 / 3]),
    ("B101", "conditional", metrics.conditional_acceptance_per_position(*BASIC), [2 / 3, 1.0, 0.5]),
    ("B101", "undefined where not reached", metrics.conditional_acceptance_per_position([[0, 1, 0]], [[3, 3, 3]]), [1 / 3, 0.0, NAN]),
    ("B103", "chain: per depth", metrics.draft_acceptance_rate([[1, 2] * 5], [[3] * 10]), 0.5),
    ("B103", "tree: per proposed node, root not counted", metrics.draft_acceptance_rate([[1, 2] * 5], [[7] * 10]), 15 / 70),
    ("B103", "length", metrics.mean_acceptance_length([[1, 2] * 5]), 2.5),
    ("B106", "perfect draft, cut window counted with its size", metrics.draft_acceptance_rate([[4, 3]], [[4, 3]]), 1.0),
    ("B106", "each position as well", metrics.acceptance_per_position([[4, 3]], [[4, 3]]), [1.0] * 4),
    ("B106", "and given the earlier ones", metrics.conditional_acceptance_per_position([[4, 3]], [[4, 3]]), [1.0] * 4),
    ("B111", "break-even length at batch 1", metrics.break_even_length(1.0 + 3 * 0.15, 1.0), 1.45),
    ("B111", "break-even length at batch 64", metrics.break_even_length(2.2 + 3 * 0.15, 1.0), 2.65),
    ("B111", "speedup is length over break-even", 2.0 / metrics.break_even_length(1.0 + 3 * 0.15, 1.0), 2 / 1.45),
    ("B107", "decode", metrics.decode_tokens_per_second(100, 99 * 0.010), 100.0),
    ("B107", "end to end", metrics.end_to_end_tokens_per_second(100, 1.0 + 99 * 0.010), 100 / 1.99),
]


@pytest.mark.parametrize(("case", "what", "found", "expected"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_reported_case(case, what, found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, equal_nan=True)


def test_b105_histogram_counts_accepted_drafts():
    histogram = metrics.accepted_histogram([[0, 1], [1, 3]])
    assert histogram == {0: 1, 1: 2, 3: 1}
    assert sum(histogram.values()) == 4


def test_b107_one_token_output_has_no_decode_speed():
    assert metrics.decode_tokens_per_second(1, 0.0) is None
    assert metrics.decode_tokens_per_second(0, 0.0) is None
    assert metrics.end_to_end_tokens_per_second(1, 0.5) == 2.0
    assert metrics.speedup(None, 3.0) is None and metrics.speedup(3.0, None) is None and metrics.speedup(3.0, 2.0) == 1.5
    with pytest.raises(DataError, match="positive times"):
        metrics.break_even_length(0.0, 1.0)
    with pytest.raises(DataError, match=r"0\.0 s"):
        metrics.decode_tokens_per_second(2, 0.0)


def test_micro_and_macro_differ():
    accepted = [[3, 3, 3, 3], [0]]
    assert metrics.mean_acceptance_length(accepted) == 1 + 12 / 5
    assert metrics.mean_acceptance_length_over_prompts(accepted) == (4 + 1) / 2
    assert metrics.mean_acceptance_length_over_prompts([[], [2]]) == 3


def test_rounds_that_proposed_nothing_are_no_drafts():
    """vLLM's num_drafts: a last round without room for a proposal, or a k=0 pass, is none."""
    accepted, proposed = [[3, 0, 2, 0], [0]], [[3, 3, 3, 0], [0]]
    assert metrics.mean_acceptance_length(accepted, proposed) == 1 + 5 / 3
    assert metrics.mean_acceptance_length(accepted) == 1 + 5 / 5, "without the proposals every round counts"
    assert metrics.mean_acceptance_length_over_prompts(accepted, proposed) == 1 + 5 / 3, "the second prompt drafted nothing"
    assert metrics.mean_accepted_tokens(accepted, proposed) == 5 / 3
    interval = metrics.acceptance_length_interval(accepted, proposed)
    assert interval == metrics.Interval(8 / 3, None, None, 1)
    for figure in (metrics.mean_acceptance_length, metrics.mean_acceptance_length_over_prompts, metrics.mean_accepted_tokens):
        assert figure([[0, 0]], [[0, 0]]) is None
    rates = metrics.acceptance_per_position(accepted, proposed, 3)
    assert 1 + rates.sum() == pytest.approx(metrics.mean_acceptance_length(accepted, proposed))


def test_without_speculation_and_without_rounds():
    assert metrics.mean_acceptance_length([[0, 0]]) == 1.0
    assert metrics.draft_acceptance_rate([[0, 0]], [[0, 0]]) is None
    assert metrics.acceptance_per_position([[0, 0]], [[0, 0]]).shape == (0,)
    for empty in ([], [[]]):
        assert metrics.mean_acceptance_length(empty) is None
        assert metrics.mean_acceptance_length_over_prompts(empty) is None
        assert metrics.mean_accepted_tokens(empty) is None
        assert metrics.draft_acceptance_rate(empty, empty) is None
        assert metrics.acceptance_length_interval(empty) is None
        assert np.isnan(metrics.acceptance_per_position(empty, empty, 2)).tolist() == [True, True]


@pytest.mark.parametrize(
    ("accepted", "proposed", "says"),
    [
        ([[4]], [[3]], "4 of 3"),
        ([[-1]], [[3]], "-1 of 3"),
        ([[1, 1]], [[3]], r"\[2\] and \[1\]"),
        ([[1], [1]], [[3]], r"\[1, 1\] and \[1\]"),
    ],
)
def test_impossible_counts_are_refused(accepted, proposed, says):
    for figure in (metrics.draft_acceptance_rate, metrics.acceptance_per_position, metrics.conditional_acceptance_per_position):
        with pytest.raises(DataError, match=says):
            figure(accepted, proposed)
    with pytest.raises(DataError, match="proposed 5"):
        metrics.acceptance_per_position([[1]], [[5]], 3)


@given(rounds())
def test_length_is_one_plus_the_sum_of_positions_over_full_rounds(drawn):
    k, accepted, proposed = drawn
    accepted, proposed = metrics.full_rounds(accepted, proposed, k)
    length = metrics.mean_acceptance_length(accepted)
    rates = metrics.acceptance_per_position(accepted, proposed, k)
    if length is None:
        assert np.isnan(rates).all()
    else:
        assert length == pytest.approx(1 + rates.sum())
        assert (np.diff(rates) <= 0).all()
        assert metrics.draft_acceptance_rate(accepted, proposed) == pytest.approx(rates.mean())


@given(rounds())
def test_conditional_is_the_ratio_of_neighbours_over_full_rounds(drawn):
    k, accepted, proposed = drawn
    accepted, proposed = metrics.full_rounds(accepted, proposed, k)
    rates = metrics.acceptance_per_position(accepted, proposed, k)
    conditional = metrics.conditional_acceptance_per_position(accepted, proposed, k)
    before = np.concatenate([[1.0 if not np.isnan(rates[0]) else NAN], rates[:-1]])
    expected = [rate / b if b > 0 else NAN for rate, b in zip(rates, before, strict=True)]
    np.testing.assert_allclose(conditional, expected, equal_nan=True)
    defined = conditional[~np.isnan(conditional)]
    np.testing.assert_allclose(np.cumprod(defined), rates[: len(defined)], rtol=1e-9)


@given(rounds())
def test_rates_by_hand_with_cut_rounds(drawn):
    k, accepted, proposed = drawn
    pairs = [pair for prompt in zip(accepted, proposed, strict=True) for pair in zip(*prompt, strict=True)]
    rates, conditional = (f(accepted, proposed, k) for f in (metrics.acceptance_per_position, metrics.conditional_acceptance_per_position))
    for i in range(k):
        offered = [a for a, p in pairs if p > i]
        reached = [a for a in offered if a >= i]
        for found, given_rounds in ((rates[i], offered), (conditional[i], reached)):
            if given_rounds:
                assert found == sum(a > i for a in given_rounds) / len(given_rounds)
            else:
                assert math.isnan(found)


@given(rounds(), st.integers(0, 6))
def test_shorter_chain_read_off_a_longer_one(drawn, shorter):
    k, accepted, proposed = drawn
    shorter = min(shorter, k)
    cut = metrics.truncate(accepted, proposed, shorter)
    for rates in (metrics.acceptance_per_position, metrics.conditional_acceptance_per_position):
        np.testing.assert_array_equal(rates(*cut, shorter), rates(accepted, proposed, k)[:shorter])
    full = metrics.full_rounds(accepted, proposed, k)
    if any(full[0]):
        rates = metrics.acceptance_per_position(*full, k)
        cut = metrics.truncate(*full, shorter)
        assert metrics.mean_acceptance_length(cut[0]) == pytest.approx(1 + rates[:shorter].sum())
        if shorter:
            assert metrics.mean_acceptance_length(*cut) == pytest.approx(1 + rates[:shorter].sum())


@given(rounds())
def test_counts_add_up(drawn):
    _, accepted, _ = drawn
    histogram = metrics.accepted_histogram(accepted)
    num_rounds = sum(len(prompt) for prompt in accepted)
    assert sum(histogram.values()) == num_rounds
    if num_rounds:
        assert metrics.mean_accepted_tokens(accepted) * num_rounds == pytest.approx(sum(a * n for a, n in histogram.items()))
        assert metrics.mean_acceptance_length(accepted) == pytest.approx(1 + metrics.mean_accepted_tokens(accepted))


@given(rounds())
def test_interval_holds_the_estimate_and_repeats(drawn):
    _, accepted, _ = drawn
    interval = metrics.acceptance_length_interval(accepted, resamples=200)
    measured = [prompt for prompt in accepted if prompt]
    if not measured:
        assert interval is None
        return
    assert interval.estimate == pytest.approx(metrics.mean_acceptance_length(accepted))
    assert interval.num_prompts == len(measured)
    assert interval == metrics.acceptance_length_interval(accepted, resamples=200)
    if len(measured) == 1:
        assert interval.low is None and interval.high is None
    else:
        lengths = [1 + np.mean(prompt) for prompt in measured]
        assert min(lengths) - 1e-9 <= interval.low <= interval.high <= max(lengths) + 1e-9


def test_interval_has_its_coverage():
    """About 95 of 100 intervals over 40 prompts hold the true mean of the distribution that they were drawn from."""
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(300):
        values = rng.exponential(size=40)
        interval = metrics.bootstrap(np.stack([values, np.ones(40)], 1), metrics.ratio, resamples=400, seed=trial)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= hits / 300 <= 0.98


def test_interval_draws_whole_prompts():
    same = [[2] * 50 for _ in range(10)]
    assert metrics.acceptance_length_interval(same) == metrics.Interval(3.0, 3.0, 3.0, 10)
    spread = metrics.acceptance_length_interval([[0] * 50] * 5 + [[4] * 50] * 5)
    assert spread.high - spread.low > 1.5  # 500 independent rounds would give 0.35
    with pytest.raises(DataError, match="at least one prompt"):
        metrics.bootstrap(np.empty((0, 2)), metrics.ratio)

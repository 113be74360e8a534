"""From scores to tokens: random numbers, filters and penalties, each against a plain restatement."""

from __future__ import annotations

import math

import pytest
import torch
from chi import flat, pairs_flat
from hypothesis import given
from hypothesis import strategies as st

from specbench.decode.request import Sampling
from specbench.decode.sampling import ACCEPT, CHOOSE, PROPOSE, Settings, choose, draw, filtered, penalise, probabilities, uniform
from specbench.errors import ConfigError

PURPOSES = (CHOOSE, PROPOSE, ACCEPT)


def settings_of(
    *rows: Sampling, vocab: int = 8, prompts: list[list[int]] | None = None, outputs: list[list[int]] | None = None
) -> Settings:
    """Settings of these rows, with seeds 0, 1, ...; penalties count over `prompts` and `outputs` where given."""
    made = Settings.empty(len(rows), vocab, prompts is not None, torch.device("cpu"))
    for row, sampling in enumerate(rows):
        made.set(row, sampling, row, torch.tensor(prompts[row] if prompts else []).long())
        for token in outputs[row] if outputs and made.counts is not None else []:
            made.counts[row, token] += 1
    return made


# --- random numbers


@pytest.mark.parametrize("purpose", PURPOSES)
def test_numbers_are_uniform_over_places_and_over_seeds(purpose: int) -> None:
    for seed in (0, 1, 42, 2**62, 2**63 - 1):
        found = uniform(torch.tensor([seed]), torch.arange(50_000)[None], purpose)[0]
        assert found.min() >= 0 and found.max() < 1 and len(found.unique()) == 50_000
        assert flat(found, 100) > 1e-4
    for place in (0, 1, 4096):
        found = uniform(torch.arange(50_000), torch.full((50_000, 1), place), purpose)[:, 0]
        assert found.min() >= 0 and found.max() < 1 and flat(found, 100) > 1e-4


@pytest.mark.parametrize("step", [1, 2, 4, 1_000_003])
def test_neighbouring_seeds_places_and_purposes_are_independent(step: int) -> None:
    """A shift in one of the three must not show in the other two."""
    seeds, places = torch.arange(60_000), torch.arange(60_000)[None]
    at = torch.full((60_000, 1), 17)
    assert pairs_flat(uniform(seeds, at, CHOOSE)[:, 0], uniform(seeds + step, at, CHOOSE)[:, 0]) > 1e-4
    assert pairs_flat(uniform(seeds, at, CHOOSE)[:, 0], uniform(seeds, at + step, CHOOSE)[:, 0]) > 1e-4
    assert pairs_flat(uniform(seeds, at, CHOOSE)[:, 0], uniform(seeds + step, at + step, CHOOSE)[:, 0]) > 1e-4
    one = torch.tensor([5])
    assert pairs_flat(uniform(one, places, CHOOSE)[0], uniform(one, places + step, CHOOSE)[0]) > 1e-4
    for left, right in ((CHOOSE, PROPOSE), (PROPOSE, ACCEPT), (CHOOSE, ACCEPT)):
        assert pairs_flat(uniform(seeds, at, left)[:, 0], uniform(seeds, at, right)[:, 0]) > 1e-4
        assert pairs_flat(uniform(one, places, left)[0], uniform(one, places + step, right)[0]) > 1e-4


def test_a_hash_that_only_multiplies_would_be_caught() -> None:
    """The test of independence is one: numbers of a mere Weyl sequence fail it."""
    weyl = (torch.arange(60_000).double() * 0.6180339887498949) % 1
    assert flat(weyl, 100) > 1e-4 and pairs_flat(weyl[:-1], weyl[1:]) < 1e-10


def test_numbers_are_those_of_splitmix64() -> None:
    """Restated with Python's integers: twice the finalizer of splitmix64 over seed + index * golden ratio."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    for seed, place, purpose in ((0, 0, 0), (42, 7, 1), (2**63 - 1, 123_456, 2)):
        expected = (mix(mix((seed + (place * 4 + purpose) * 0x9E3779B97F4A7C15) % 2**64)) >> 11) * 2.0**-53
        assert float(uniform(torch.tensor([seed]), torch.tensor([[place]]), purpose)) == expected


def test_a_number_depends_on_nothing_else() -> None:
    seeds, places = torch.tensor([3, 9, 3]), torch.tensor([[4, 5], [4, 5], [5, 6]])
    found = uniform(seeds, places, CHOOSE)
    assert found.shape == (3, 2) and found.dtype == torch.float64
    assert found[0, 1] == found[2, 0] and found[0, 0] != found[1, 0]
    assert uniform(torch.tensor([9]), torch.tensor([5]), CHOOSE)[0] == found[1, 1]


# --- filters


def plain_filter(scores: list[float], sampling: Sampling) -> set[int]:
    """Which tokens stay: min_p, then top_k, then top_p over what is left, one token at a time in order of score, lower ids first."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if sampling.min_p:
        order = [i for i in order if math.exp(scores[i] - scores[order[0]]) >= sampling.min_p]
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    if sampling.top_p == 1:
        return set(order)
    total, kept, mass = sum(math.exp(scores[i]) for i in order), [], 0.0
    for i in order:
        if kept and mass / total >= sampling.top_p:
            break
        kept.append(i)
        mass += math.exp(scores[i])
    return set(kept)


def clear(scores: list[float], sampling: Sampling) -> bool:
    """Whether no bound falls within rounding of a cumulative share or a ratio, where either answer is right."""
    best = max(scores)
    ratios = [math.exp(s - best) for s in scores]
    if any(abs(r - sampling.min_p) < 1e-5 for r in ratios):
        return False
    kept = sorted((r for r in ratios if r >= sampling.min_p), reverse=True)[: sampling.top_k if sampling.top_k > 0 else None]
    shares = torch.tensor(kept).cumsum(0) / sum(kept)
    return bool(((shares - sampling.top_p).abs() > 1e-5).all()) or sampling.top_p == 1


# quarter steps make ties; only ones above -8 so that no share vanishes in fp32
scores_lists = st.lists(st.integers(-32, 16).map(lambda n: n / 4), min_size=1, max_size=12)
samplings = st.builds(
    Sampling,
    temperature=st.just(1.0),
    top_k=st.integers(-1, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


@given(scores_lists, samplings)
def test_filters_keep_what_a_plain_loop_keeps(scores: list[float], sampling: Sampling) -> None:
    if not clear(scores, sampling):
        return
    found = filtered(torch.tensor([[scores]]), settings_of(sampling, vocab=len(scores)))[0, 0]
    kept = {i for i, s in enumerate(found.tolist()) if s != float("-inf")}
    assert kept == plain_filter(scores, sampling)
    assert all(float(found[i]) == scores[i] for i in kept)


@given(st.lists(st.tuples(scores_lists, samplings), min_size=2, max_size=4))
def test_every_row_is_filtered_by_its_own_settings(rows: list[tuple[list[float], Sampling]]) -> None:
    width = min(len(scores) for scores, _ in rows)
    batch = torch.tensor([[scores[:width]] for scores, _ in rows])
    together = probabilities(batch, settings_of(*(s for _, s in rows), vocab=width))
    for row, (scores, sampling) in enumerate(rows):
        alone = probabilities(torch.tensor([[scores[:width]]]), settings_of(sampling, vocab=width))
        assert torch.equal(together[row], alone[0])


def test_filtered_probabilities_by_hand() -> None:
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    cases = {
        (0, 1.0, 0.0): [0.4, 0.3, 0.2, 0.1],
        (2, 1.0, 0.0): [4 / 7, 3 / 7, 0, 0],
        (0, 0.65, 0.0): [4 / 7, 3 / 7, 0, 0],  # 0.4 is not enough, 0.7 is
        (0, 0.75, 0.0): [4 / 9, 3 / 9, 2 / 9, 0],
        (0, 0.01, 0.0): [1, 0, 0, 0],
        (0, 1.0, 0.6): [4 / 7, 3 / 7, 0, 0],
        (3, 0.7, 0.0): [4 / 7, 3 / 7, 0, 0],  # top_p of what top_k leaves: 7/9 is enough
        (3, 0.8, 0.0): [4 / 9, 3 / 9, 2 / 9, 0],
        (0, 0.7, 0.3): [4 / 7, 3 / 7, 0, 0],  # and of what min_p leaves
    }
    for (top_k, top_p, min_p), expected in cases.items():
        found = probabilities(p.log()[None, None], settings_of(Sampling(1.0, top_k, top_p, min_p), vocab=4))[0, 0]
        assert found.tolist() == pytest.approx(expected, abs=1e-6), (top_k, top_p, min_p)


def test_temperature_is_a_power_of_the_distribution() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for temperature in (0.1, 0.5, 2.0, 10.0):
        expected = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        found = probabilities(p.log().float()[None, None], settings_of(Sampling(temperature), vocab=3))[0, 0]
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_extreme_settings_still_leave_a_distribution() -> None:
    scores = torch.tensor([[[30.0, 30.0, -5.0, 29.0]]])
    for sampling in (Sampling(1e-40), Sampling(1e-38), Sampling(1.0, top_p=1e-300), Sampling(1.0, min_p=1.0), Sampling(1e-4, 3, 0.5, 0.5)):
        found = probabilities(scores, settings_of(sampling, vocab=4))[0, 0]
        assert float(found.sum()) == pytest.approx(1) and float(found[:2].sum()) == pytest.approx(1), (sampling, found)
    assert probabilities(scores, settings_of(Sampling(1e38), vocab=4))[0, 0].tolist() == pytest.approx([0.25] * 4)


def test_temperature_0_takes_the_lowest_of_the_best_also_beside_sampled_rows() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, 0.0]).expand(3, 2, -1)
    settings = settings_of(Sampling(0), Sampling(1.0), Sampling(0, top_k=2, top_p=0.3, min_p=0.2), vocab=4)
    found = probabilities(scores, settings)
    assert found[[0, 2]].tolist() == [[[0, 1, 0, 0]] * 2] * 2
    places = torch.arange(2000).view(1, -1).expand(3, -1)
    chosen = choose(scores[:, :1].expand(-1, 2000, -1), settings, places, True)
    assert chosen[0].eq(1).all() and chosen[2].eq(1).all() and set(chosen[1].tolist()) == {0, 1, 2, 3}
    assert choose(scores, settings, places[:, :2], False).eq(1).all()


# --- penalties


def plain_penalty(scores: list[float], prompt: list[int], output: list[int], sampling: Sampling) -> list[float]:
    """One token at a time."""
    found = []
    for token, score in enumerate(scores):
        if token in prompt or token in output:
            score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        score -= sampling.frequency_penalty * output.count(token)
        score -= sampling.presence_penalty * (token in output)
        found.append(score)
    return found


token_lists = st.lists(st.integers(0, 5), max_size=6)
penalties = st.builds(
    Sampling,
    repetition_penalty=st.floats(0.5, 2.0),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
)


@given(st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6), token_lists, token_lists, token_lists, penalties)
def test_penalties_equal_a_plain_loop_before_every_proposal(
    scores: list[float], prompt: list[int], output: list[int], chain: list[int], sampling: Sampling
) -> None:
    """Row i of a block sees the output and proposals 0 .. i - 1."""
    n = len(chain) + 1
    settings = settings_of(sampling, vocab=6, prompts=[prompt], outputs=[output])
    before = torch.ones(n, n).tril()[None, :, 1:]
    found = penalise(torch.tensor(scores).expand(1, n, -1), settings, torch.tensor([chain]).long(), before)
    for i in range(n):
        assert found[0, i].tolist() == pytest.approx(plain_penalty(scores, prompt, output + chain[:i], sampling), abs=1e-4)
    assert settings.counts is not None and settings.counts[0].tolist() == [output.count(t) for t in range(6)], "counting is not committing"


def test_penalties_in_a_tree_follow_each_nodes_own_path() -> None:
    """Node 1 and 2 are siblings, 3 is a child of 2: the sibling's token is not before it."""
    sampling = Sampling(frequency_penalty=1.0)
    settings = settings_of(sampling, sampling, vocab=6, prompts=[[], [0]], outputs=[[], [4]])
    tokens = torch.tensor([[1, 2, 1], [3, 3, 4]])
    seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).float()
    found = penalise(torch.zeros(2, 4, 6), settings, tokens, seen[None, :, 1:])
    first = {0: [], 1: [1], 2: [2], 3: [2, 1]}
    second = {0: [4], 1: [4, 3], 2: [4, 3], 3: [4, 3, 4]}
    for row, paths in enumerate((first, second)):
        for node, path in paths.items():
            assert found[row, node].tolist() == [-path.count(t) for t in range(6)]


def test_a_row_without_penalties_keeps_its_scores_beside_one_with() -> None:
    settings = settings_of(Sampling(), Sampling(repetition_penalty=1.5), vocab=4, prompts=[[0, 1], [0, 1]], outputs=[[2], [2]])
    scores = torch.tensor([1.0, -1.0, 2.0, 3.0]).expand(2, 1, -1)
    found = penalise(scores, settings)
    assert torch.equal(found[0], scores[0])
    assert found[1, 0].tolist() == pytest.approx([1 / 1.5, -1.5, 2 / 1.5, 3])
    assert penalise(scores, settings_of(Sampling(), Sampling())) is scores


def test_a_row_that_is_taken_over_forgets_the_earlier_request() -> None:
    settings = settings_of(Sampling(frequency_penalty=1.0), vocab=4, prompts=[[3]], outputs=[[1, 1]])
    settings.set(0, Sampling(frequency_penalty=1.0), 0, torch.tensor([2]))
    assert settings.counts is not None and settings.in_prompt is not None
    assert settings.counts.tolist() == [[0] * 4] and settings.in_prompt.tolist() == [[False, False, True, False]]


# --- drawing


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), st.integers(0, 63))
def test_draw_is_exact_on_small_weights(weights: list[int], fine: int) -> None:
    """With whole weights each token gets its share of [0, 1) to the last bit, and one of weight 0 nothing."""
    total = sum(weights)
    grid = torch.arange(total * 64, dtype=torch.float64) / (total * 64)
    found = draw(torch.tensor(weights).float().expand(len(grid), -1), grid)
    assert torch.bincount(found, minlength=len(weights)).tolist() == [w * 64 for w in weights] or total not in (1, 2, 4, 8, 16, 32)
    edges = [sum(weights[:i]) / total for i in range(len(weights))]
    inside = [e + (fine + 0.5) / 64 * w / total for e, w in zip(edges, weights, strict=True) if w]
    expected = [i for i, w in enumerate(weights) if w]
    assert draw(torch.tensor(weights).float().expand(len(inside), -1), torch.tensor(inside, dtype=torch.float64)).tolist() == expected


def test_draw_never_takes_a_token_of_weight_0_at_either_end() -> None:
    last = 1 - 2.0**-53
    for weights in ([0.0, 0.3, 0.7, 0.0], [0.0, 1e-30, 0.0, 0.0], [0.0, 0.1, 0.2, 0.0], [0.0, 3.0, 1e-9, 0.0]):
        found = draw(torch.tensor([weights, weights]), torch.tensor([0.0, last], dtype=torch.float64)).tolist()
        assert set(found) <= {1, 2} and found[0] == 1


def test_draw_keeps_any_leading_shape() -> None:
    weights, wanted = torch.rand(3, 5, 7), torch.rand(3, 5, dtype=torch.float64)
    found = draw(weights, wanted)
    assert found.shape == (3, 5)
    for i in range(3):
        for j in range(5):
            assert found[i, j] == draw(weights[i, j], wanted[i, j : j + 1].view(()))


# --- refusals


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", float("nan"), "0 or more"),
        ("temperature", float("inf"), "0 or more"),
        ("top_k", -2, "-1, 0"),
        ("top_k", 1.5, "-1, 0"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.01, "above 0, at most 1"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", float("inf"), "above 0"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -2.5, "-2 to 2"),
        ("seed", -1, "None, or 0 to"),
        ("seed", 2**63, "None, or 0 to"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(name: str, value: float, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*; expected {expected}"):
        Sampling(**{name: value})


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_counts_as_one(name: str) -> None:
    assert Sampling(**{name: 1.5}).penalised and not Sampling(temperature=1.0, top_k=3).penalised

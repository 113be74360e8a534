"""The losslessness check against a real decoder: equal ids pass, other texts are re-scored, wrong tokens are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_pair

from specbench.decode.engine import decode
from specbench.decode.lossless import compare, rescore
from specbench.models.decoder import Decoder
from specbench.pair import open_pair
from specbench.verifier import load_verifier

PROMPT = [5, 9, 17, 33]


@pytest.fixture
def verifier(tmp_path: Path) -> Decoder:
    return load_verifier(open_pair(*tiny_pair(tmp_path)), device="cpu")


@pytest.fixture
def greedy(verifier: Decoder) -> list[int]:
    return decode(verifier, None, PROMPT, num_speculative_tokens=0, max_new_tokens=12, eos_ids=()).token_ids


def test_greedy_output_lacks_nothing(verifier: Decoder, greedy: list[int]) -> None:
    deficits, ties = rescore(verifier, PROMPT, greedy)
    assert deficits.shape == (12,) and deficits.dtype == torch.float32
    assert float(deficits.max()) < 1e-4 and ties == 0
    same = compare(verifier, PROMPT, greedy, list(greedy))
    assert same.identical and same.lossless and same.first_difference is None and same.near_ties == 0


def test_a_token_that_the_verifier_would_not_choose_is_caught(verifier: Decoder, greedy: list[int]) -> None:
    wrong = [*greedy[:5], (greedy[5] + 1) % 256, *greedy[6:]]
    found = compare(verifier, PROMPT, greedy, wrong)
    assert not found.identical and not found.lossless and found.first_difference == 5
    assert found.largest_deficit > found.bound and found.label == "logic"


def test_the_second_best_counts_only_within_the_bound(verifier: Decoder, greedy: list[int]) -> None:
    prefix = greedy[:5]
    tokens = torch.tensor([[*PROMPT, *prefix]])
    with torch.inference_mode():
        positions = torch.arange(tokens.shape[1])[None]
        hidden, _ = verifier(tokens, verifier.step(positions, tokens.shape[1]), verifier.new_cache(tokens.shape[1]))
        best = verifier.lm_head(hidden[0, -1:]).topk(2)
    margin = float(best.values[0, 0] - best.values[0, 1])
    swapped = [*prefix, int(best.indices[0, 1])]
    assert compare(verifier, PROMPT, greedy[:6], swapped, bound=margin * 1.01).lossless
    within = compare(verifier, PROMPT, greedy[:6], swapped, bound=margin * 1.01)
    assert within.label == "numeric" and within.near_ties == 1 and within.largest_deficit == pytest.approx(margin, rel=1e-3)
    assert not compare(verifier, PROMPT, greedy[:6], swapped, bound=margin * 0.99).lossless


def test_a_shorter_output_differs_where_it_ends(verifier: Decoder, greedy: list[int]) -> None:
    found = compare(verifier, PROMPT, greedy, greedy[:7])
    assert not found.identical and found.first_difference == 7
    for plain, speculative in ((greedy, greedy[:7]), (greedy[:7], greedy), (greedy, [])):
        ended = compare(verifier, PROMPT, plain, speculative)
        assert ended.cut and ended.label == "logic" and not ended.lossless

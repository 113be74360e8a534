"""Perplexity, beside a plain restatement of its definition."""

from __future__ import annotations

import math

import pytest
import torch

import specbench as sb
from specbench.bench import perplexity as module
from specbench.bench.perplexity import perplexity
from specbench.errors import ConfigError

SEQUENCES = [[5, 9, 200, 31, 7, 7, 90], [1, 2], [44]]


@pytest.fixture(scope="module")
def verifier(tiny):
    return sb.load_verifier(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu")


def probability(verifier, prefix: list[int], token: int) -> float:
    """Of `token` after `prefix`, from a pass over the prefix alone."""
    n = len(prefix)
    with torch.inference_mode():
        hidden, _ = verifier(torch.tensor([prefix]), verifier.step(torch.arange(n)[None], n), verifier.new_cache(n))
        return verifier.lm_head(hidden[:, -1:]).double().softmax(-1)[0, 0, token].item()


def test_it_is_the_inverse_geometric_mean_probability_of_continuing_tokens(verifier) -> None:
    logs = [math.log(probability(verifier, ids[:i], ids[i])) for ids in SEQUENCES for i in range(1, len(ids))]
    assert len(logs) == 7  # first tokens, and a sequence of one, count nothing
    assert perplexity(verifier, SEQUENCES) == pytest.approx(math.exp(-sum(logs) / 7), rel=1e-4)


def test_the_number_of_rows_held_at_once_changes_nothing(verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = perplexity(verifier, SEQUENCES)
    monkeypatch.setattr(module, "ROWS", 2)
    assert perplexity(verifier, SEQUENCES) == pytest.approx(whole, rel=1e-6)


def test_nothing_to_predict_is_refused(verifier) -> None:
    with pytest.raises(ConfigError, match="at least two tokens"):
        perplexity(verifier, [[3], []])

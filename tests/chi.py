"""Tests of distributions: chi-square p-values and total variation, with nothing but torch."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(counts: Tensor, expected: Tensor) -> float:
    """How probable a chi-square at least this large is. Cells expected below 5 are counted as one; one expected 0 must be empty."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if bool(counts[expected == 0].any()):
        return 0.0
    few = expected < 5
    counts = torch.cat((counts[~few], counts[few].sum()[None]))
    expected = torch.cat((expected[~few], expected[few].sum()[None]))
    if float(expected[-1]) < 5:  # not even together: the test does without them
        counts, expected = counts[:-1], expected[:-1] * counts[:-1].sum() / expected[:-1].sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


def flat(values: Tensor, bins: int) -> float:
    """p-value of `values` being uniform in [0, 1)."""
    return p_value(torch.bincount((values * bins).long(), minlength=bins), torch.full((bins,), len(values) / bins))


def pairs_flat(left: Tensor, right: Tensor, bins: int = 16) -> float:
    """p-value of (left, right) being uniform in the square: no dependence between the two."""
    return flat(((left * bins).long() + right) / bins, bins * bins)


def total_variation(counts: Tensor, p: Tensor) -> float:
    return float((counts.double() / counts.sum() - p.double()).abs().sum() / 2)


def expected_variation(p: Tensor, samples: int) -> float:
    """Total variation that `samples` independent draws from p show on average."""
    return float((2 * p * (1 - p) / (torch.pi * samples)).sqrt().sum() / 2)

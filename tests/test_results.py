"""The README's figures are those of the committed reference run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAIRS = json.loads((ROOT / "data/results/headline.json").read_text())["figures"]
DECODING = json.loads((ROOT / "data/results/decoding.json").read_text())["figures"]


@pytest.mark.parametrize("name", ["w4a16", "bf16"])
def test_acceptance_and_speedup(name: str) -> None:
    figures = PAIRS[name]
    assert figures["num_failed"] == 0 and figures["k"] == 3
    assert f"{figures['mean_acceptance_length']['estimate']:.2f} tokens" in README
    assert f"{figures['best_speedup']['estimate']:.2f} times" in README
    assert f"at k = {figures['best_k']}" in README


def test_the_baseline() -> None:
    times = PAIRS["w4a16"]["k0_over_transformers"]
    assert f"{times:.2f} times\ntransformers' `generate`" in README


def test_an_8_bit_draft_and_what_verifying_costs() -> None:
    assert DECODING["best"] == "k3_w8a16_draft_p_min" and f"{DECODING['best_over_k0']:.2f} with an\n8-bit copy" in README
    assert f"costs {DECODING['k2_w8a16_draft']['verify_ms'] / DECODING['k0']['verify_ms']:.1f} times one" in README


def test_a_processor_without_avx512() -> None:
    figures = json.loads((ROOT / "data/results/decoding-avx2.json").read_text())["figures"]
    text = " ".join((ROOT / "data/results/README.md").read_text(encoding="utf-8").split())
    best, batch = figures["best_over_k0"], figures["batches"]["8"]["k0_over_batch_1"]
    adaptive, adversary = max(figures["adaptive_over_k0"].values()), figures["adaptive_adversary_over_k0"]
    assert f"{best:.2f} at best, {adaptive:.2f} with adaptive k, {batch:.2f} times the tokens of batch 1" in text
    assert f"{adversary:.2f} for the adaptive adversary, and {figures['k0_over_transformers']:.2f} times transformers'" in text
    floors = figures["round_over_floor"]
    assert f"{floors['k0']:.2f} of its matrix products at k = 0 and {floors['k2']:.2f} at k = 2" in text


def test_the_figure_is_there() -> None:
    assert "data/results/speedup.png" in README
    assert (ROOT / "data/results/speedup.png").is_file() and (ROOT / "data/results/speedup.svg").is_file()

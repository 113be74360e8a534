"""The cost model against reported figures, against measured rows, and the sizes that stand beside it."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from planted import planted_pair
from synthetic_rows import synthetic_table
from tiny import HIDDEN, INNER, VOCAB, verifier_config

import specbench as sb
from specbench.bench.cost_model import RoundCost, compare, draft_is_too_slow
from specbench.bench.model_size import memory_bandwidth, model_size, pair_steps
from specbench.bench.prompts import load_prompts
from specbench.bench.round_costs import RoundSeconds
from specbench.bench.summary import summarize
from specbench.errors import DataError


@pytest.mark.parametrize(
    ("verify", "speedup", "break_even", "word"), [(1.0, 1.38, 1.45, "faster: 1.38 times"), (2.2, 0.75, 2.65, "slower: 0.75 times")]
)
def test_b111_break_even_and_the_plain_word(verify: float, speedup: float, break_even: float, word: str) -> None:
    cost = RoundCost.of_steps(3, verify, 0.15)
    assert cost.speedup(2.0) == pytest.approx(speedup, abs=0.005) and cost.break_even_length == pytest.approx(break_even)
    said = cost.verdict(2.0)
    assert said.startswith(word) and f"breaks even at {break_even:.2f}" in said
    assert cost.verdict(2.0, 0.9 * speedup).endswith(f"measured {0.9 * speedup:.2f}")
    assert "on the other side of 1" in cost.verdict(2.0, 0.9 if speedup > 1 else 1.1)
    assert RoundCost(1.5, 0.5).verdict(2.0).startswith("no faster")


def test_b111_modelled_beside_measured_for_every_configuration() -> None:
    table = synthetic_table(prompts=load_prompts()[::8], ks=(0, 1, 3))
    slow = table.assign(verify_s=table.verify_s.where(table.k == 0, 4 * table.verify_s), run_id="slow " + table.run_id, verifier="slow")
    slow["decode_s"] = slow.draft_s + slow.verify_s + slow.other_s
    both = compare(summarize(pd.concat([table, slow])))
    assert len(both) == 2 * 2 * 2 and list(both.columns[:4]) == ["engine", "verifier", "verifier_format", "k"]
    assert (both.predicted_speedup / both.speedup - 1).abs().max() < 0.06, "the model leaves out only host time and cut rounds"
    assert both[both.verifier == "slow"].verdict.str.startswith("slower").all()
    assert both[both.verifier != "slow"].verdict.str.startswith("faster").all() and both.verdict.str.contains("measured").all()
    assert (both.mean_acceptance_length / both.break_even_length - both.predicted_speedup).abs().max() < 1e-12
    assert compare(summarize(table[table.k > 0])).empty, "without k=0 there is nothing to compare with"


def test_b115_a_draft_as_slow_as_its_verifier_is_flagged(tmp_path) -> None:
    said = draft_is_too_slow(4, 1.0, 3.0)
    assert said is not None and said.startswith(
        "slower whatever verifying costs: 4 draft steps of 1.00 verifier steps cost 4.00, and save 2.00"
    )
    assert draft_is_too_slow(4, 0.5, 3.0) is None and draft_is_too_slow(4, 0.51, 3.0) is not None
    assert RoundCost.of_steps(4, 1.0, 0.51).speedup(3.0) < 1

    pair = sb.open_pair(*planted_pair(tmp_path))
    verifier = sb.load_verifier(pair, device="cpu")
    table = pair_steps(verifier, sb.load_draft(pair, device="cpu", verifier=verifier), 4, mean_acceptance_length=1.0001).set_index("role")
    assert list(table.index) == ["verifier", "draft"] and (table.step_s > 0).all() and table.step_over_verifier_step["verifier"] == 1
    assert (table.parameters > 0).all() and (table.bytes_per_step > 0).all() and table.note["draft"].startswith("slower whatever")
    assert table.share_of_bandwidth.isna().all(), "what a CPU's memory can do is not known"


def test_sizes_of_loaded_models(tmp_path) -> None:
    pair = sb.open_pair(*planted_pair(tmp_path))
    config = verifier_config()
    verifier = sb.load_verifier(pair, device="cpu")
    layer = HIDDEN * (64 + 2 * 32) + 64 * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
    layers = len(verifier.layers)
    expected = VOCAB * HIDDEN * 2 + layers * layer + HIDDEN
    found = model_size(verifier)
    assert not config["tie_word_embeddings"] and found.parameters == expected
    assert found.weight_bytes == 4 * expected and found.bytes_per_step == 4 * (expected - VOCAB * HIDDEN + HIDDEN), (
        "one row of the embedding"
    )
    draft = sb.load_draft(pair, device="cpu", verifier=verifier)
    alone, beside = model_size(draft), model_size(draft, verifier)
    assert alone.bytes_per_step == beside.bytes_per_step and alone.parameters - beside.parameters in (0, VOCAB * HIDDEN)


def test_a_packed_verifier_has_the_same_parameters_in_fewer_bytes(bundled_like) -> None:
    plain, packed = (model_size(model) for model in bundled_like)
    assert plain.parameters == packed.parameters
    assert packed.bytes_per_step < 0.6 * plain.bytes_per_step


@pytest.fixture
def bundled_like():
    """A plain linear layer and the same one as int8 in memory."""
    from specbench.quant.kernels import Int8Weights
    from specbench.quant.linear import Linear

    made = []
    for scheme in (None, "int8"):
        linear = Linear("x", 64, (32, 32), None, torch.float32)
        linear.to_empty(device="cpu")
        if scheme:
            linear.kernel = Int8Weights(torch.zeros(64, 64, dtype=torch.int8), torch.ones(64, 1), torch.float32)
            linear.register_parameter("weight", None)
        made.append(linear)
    return made


def test_seconds_and_costs_are_the_same_thing() -> None:
    cost = RoundSeconds(3, plain_s=0.010, verify_s=0.012, draft_s=0.006).cost
    assert (cost.verify, cost.draft) == pytest.approx((1.2, 0.6)) and cost.break_even_length == pytest.approx(1.8)
    for wrong in ((0.0, 0.1), (1.0, -0.1), (float("nan"), 0.0)):
        with pytest.raises(DataError, match="expected above 0"):
            RoundCost(*wrong)


def test_bandwidth_of_a_device(monkeypatch) -> None:
    assert memory_bandwidth(torch.device("cpu")) is None

    class H200:
        memory_clock_rate, memory_bus_width = 3_201_000, 6144

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    assert memory_bandwidth(torch.device("cuda:0")) == pytest.approx(4.92e12, rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: object())
    assert memory_bandwidth(torch.device("cuda:0")) is None

"""Best tokens through the 8-bit copy of a head against the full scores, whichever processor runs the test."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import AUX
from tiny import tiny_draft, tiny_verifier
from torch.nn import functional as F

import specbench as sb
from specbench.decode import engine, greedy
from specbench.decode.draft import EagleDraft
from specbench.decode.greedy import MOST_CANDIDATES, ROWS, Screen, screen
from specbench.decode.request import Options, Request, Sampling
from specbench.quant.linear import Linear
from specbench.quant.scheme import Scheme

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not hasattr(torch.ops.aten, "_weight_int8pack_mm"), reason="torch has no int8 operator")


def head_of(weight):
    head = Linear("lm_head", weight.shape[1], (weight.shape[0],), None, weight.dtype)
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return head


def whole(*size, seed=0, most=3):
    """Small whole numbers: every sum of products is exact, whatever its order, so that equal means equal."""
    return torch.randint(-most, most + 1, size, generator=torch.Generator().manual_seed(seed)).to(BF16)


def wanted(rows, weight):
    return F.linear(rows.double(), weight.double()).to(BF16).max(-1).indices  # rounded once, as a kernel does; ties to the lowest id


@settings(max_examples=60)
@given(n=st.sampled_from(ROWS), vocab=st.integers(1, 300), width=st.sampled_from([32, 64, 160]), seed=st.integers(0, 2**16))
def test_best_tokens_are_those_of_the_full_scores(n, vocab, width, seed):
    weight, rows = whole(vocab, width, seed=seed), whole(n, width, seed=seed + 1, most=20)
    assert torch.equal(Screen(head_of(weight))(rows), wanted(rows, weight))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), spread=st.sampled_from([0.0, 1e-3, 0.02, 0.5]), copies=st.integers(1, 8))
def test_neighbours_of_the_best_token_are_told_apart(seed, spread, copies):
    """Rows that differ by less than 8 bits can hold, some of them equal: the decision is the head's own."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(1, 64, generator=g)
    weight = (base + spread * torch.randn(200, 64, generator=g)).repeat(copies, 1)[torch.randperm(200 * copies, generator=g)].to(BF16)
    rows = torch.randn(4, 64, generator=g).to(BF16)
    exact = F.linear(rows.double(), weight.double())
    found = exact.gather(1, Screen(head_of(weight))(rows)[:, None])[:, 0]
    assert bool((found >= exact.amax(1) - 2**-7 * exact.amax(1).abs()).all()), "within one rounding of the best"


@pytest.mark.parametrize("n", ROWS)
def test_few_candidates_are_multiplied(monkeypatch, n):
    g = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(4096, 128, generator=g).to(BF16), torch.randn(n, 128, generator=g).to(BF16)
    sizes, real = [], greedy.product
    monkeypatch.setattr(greedy, "product", lambda rows, weight: sizes.append(len(weight)) or real(rows, weight))
    found = Screen(head_of(weight))(rows)
    assert sizes and sizes[0] < 40 * n and torch.equal(found, wanted(rows, weight))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
def test_the_bound_holds_for_every_token(seed, scale):
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(300, 96, generator=g) * torch.rand(300, 1, generator=g) * scale).to(BF16)
    rows = (torch.randn(5, 96, generator=g) * 10).to(BF16)
    made = Screen(head_of(weight))
    rough, exact = made.rough(rows).double(), F.linear(rows.double(), weight.double())
    length = rows.double().norm(dim=1, keepdim=True)
    assert bool(((rough - exact).abs() <= made.slack.double() * length + 2**-7 * rough.abs()).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_take_the_full_product(value):
    weight, rows = whole(200, 64), whole(3, 64, seed=1)
    rows[1, 5] = value
    assert torch.equal(Screen(head_of(weight))(rows), F.linear(rows, weight).max(-1).indices)


def test_a_flat_distribution_takes_the_full_product():
    weight, rows = torch.ones(MOST_CANDIDATES + 1, 64, dtype=BF16), whole(2, 64)
    made = Screen(head_of(weight))
    assert made._screened(rows) is None
    assert made(rows).tolist() == [0, 0], "ties to the lowest id"


def test_rows_of_zeros_and_shapes():
    weight = whole(100, 64)
    weight[10:] = 0
    made = Screen(head_of(weight))
    rows = whole(4, 64, seed=2).view(2, 2, 64)
    assert torch.equal(made(rows), wanted(rows, weight)) and made(rows[:1, :1]).shape == (1, 1)
    assert torch.equal(made(whole(ROWS[-1] + 1, 64, seed=3)), wanted(whole(ROWS[-1] + 1, 64, seed=3), weight))
    assert made.nbytes() == 100 * 64 + 2 * 100 + 4 * 100


def test_a_head_is_rounded_in_parts(monkeypatch):
    weight = whole(100, 64)
    at_once = Screen(head_of(weight))
    monkeypatch.setattr(greedy, "AT_ONCE", 7 * 64)
    parts = Screen(head_of(weight))
    assert torch.equal(at_once.copy.levels, parts.copy.levels) and torch.equal(at_once.slack, parts.slack)


@pytest.mark.parametrize("asked", ["greedy", "sampled", "penalised", "logprobs"])
def test_the_loop_asks_for_best_tokens_only_where_nothing_else_is_wanted(monkeypatch, tmp_path, asked):
    """A bf16 pair, decoded with and without the copy: the same tokens at every k, and scores wherever a request needs them."""
    folder = tiny_verifier(tmp_path / "verifier", dtype="bfloat16")
    pair = sb.open_pair(folder, tiny_draft(tmp_path / "draft", dtype="bfloat16"))
    verifier = sb.load_verifier(pair, device="cpu", dtype="bfloat16")
    proposer = EagleDraft(sb.load_draft(pair, device="cpu", verifier=verifier, dtype="bfloat16"))
    how = {"sampled": Sampling(temperature=1.0, seed=1), "penalised": Sampling(presence_penalty=0.5)}.get(asked, Sampling())
    requests = [Request([5, 6, i], 12, how, stop_ids=(), logprobs=2 if asked == "logprobs" else None) for i in range(3)]
    monkeypatch.setattr(greedy, "FEWEST_TOKENS", 1)
    calls, real = [], Screen._screened
    monkeypatch.setattr(Screen, "_screened", lambda self, rows: calls.append(len(rows)) or real(self, rows))

    def decoded(bf16, k, batch):
        monkeypatch.setattr(greedy, "multiplies_bf16", lambda: bf16)
        run = engine.Run(verifier, proposer if k else None, requests, Options(k, batch), AUX)
        for _ in run:
            pass
        return [generation.token_ids for generation in run.generations()]

    for k, batch in ((0, 1), (0, 3), (2, 1), (2, 3)):
        calls.clear()
        plain = decoded(True, k, batch)
        assert not calls
        assert decoded(False, k, batch) == plain
        assert bool(calls) == (asked == "greedy" and (k, batch) != (0, 1)), "one row takes the head's own product"


class Holder:
    def __init__(self, head):
        self.lm_head = head


def test_which_heads_are_screened(monkeypatch):
    monkeypatch.setattr(greedy, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(greedy, "FEWEST_TOKENS", 64)
    plain = Holder(head_of(whole(64, 32)))
    made = screen(plain)
    assert made is not None and screen(plain) is made, "made once"
    plain.lm_head.weight = torch.nn.Parameter(whole(64, 32, seed=1), requires_grad=False)
    with monkeypatch.context() as short:
        short.setattr(greedy, "free_bytes", lambda device: 10_000)
        assert screen(plain, reserved=9_000) is None and screen(plain) is not None, "2432 bytes"
    assert screen(plain) is not made, "other weights, another copy"
    quantized = Holder(Linear("lm_head", 64, (64,), Scheme("int-quantized", 8, "channel"), BF16))
    biased = Holder(Linear("lm_head", 32, (64,), None, BF16, bias=True))
    for other in (Holder(head_of(whole(64, 32).float())), Holder(head_of(whole(63, 32))), quantized, biased, Holder(object()), object()):
        assert screen(other) is None
    monkeypatch.setattr(greedy, "multiplies_bf16", lambda: True)
    assert screen(plain) is None
    count = len(greedy._made)
    del plain
    gc.collect()
    assert len(greedy._made) < count, "a copy goes with its head"

"""The decoding benchmark: its counts are the loop's, its ratios are of one turn, its adversary is never right."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from planted import planted_pair
from proposers import prompts

import specbench as sb
from specbench.bench import decoding, turns
from specbench.bench.decoding import Adversary, figures, timed
from specbench.bench.floor import context_seconds, round_floor, round_products
from specbench.bench.turns import take_turns
from specbench.decode.draft import EagleDraft
from specbench.decode.engine import Run
from specbench.decode.request import Options, Request
from specbench.quant.linear import Linear
from specbench.quantized_draft import quantized_copy


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return sb.open_pair(*planted_pair(tmp_path_factory.mktemp("planted")))


@pytest.fixture(scope="module")
def models(pair):
    verifier = sb.load_verifier(pair, device="cpu")
    return verifier, sb.load_draft(pair, device="cpu", verifier=verifier)


def whole(work):
    """What a work finds when nothing comes between."""
    return take_turns({"it": work}, seconds=1e9)["it"]


def test_works_take_turns_and_are_all_finished():
    seen = []

    def work(name, steps):
        for step in range(steps):
            seen.append(name)
            yield (step + 1) / steps
        return {"steps": steps}

    progress = []
    found = take_turns({"a": work("a", 3), "b": work("b", 1), "none": work("none", 0)}, seconds=0.0, told=progress.append)
    assert found == {"a": {"steps": 3}, "b": {"steps": 1}, "none": {"steps": 0}}
    assert sum(progress) == pytest.approx(3)


def test_a_turn_lasts_for_its_time(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def work(name, steps, cost):
        for step in range(steps):
            order.append(name)
            now[0] += cost
            yield step / steps
        return {}

    take_turns({"a": work("a", 6, 1.0), "b": work("b", 2, 5.0)}, seconds=2.5)
    assert order == [*"aaabaaab"]


def test_time_between_turns_is_not_an_arms_own(models):
    verifier, draft = models
    work, inside = timed(verifier, draft, EagleDraft, prompts(2, seed=1), Options(3), 10), 0.0
    try:
        while True:
            inside -= time.perf_counter()
            next(work)
            inside += time.perf_counter()
            time.sleep(0.01)
    except StopIteration as end:
        inside += time.perf_counter()
        assert 0 < end.value["seconds"] <= inside


def test_an_arm_counts_what_the_loop_did(models):
    verifier, draft = models
    ids = prompts(3, seed=1)
    found = whole(timed(verifier, draft, EagleDraft, ids, Options(3), 20))
    out = sb.generate(verifier, draft, ids, num_speculative_tokens=3, max_new_tokens=20, ignore_eos=True)
    assert found["mean_acceptance_length"] == pytest.approx(out.mean_acceptance_length)
    assert found["round_ms"] == pytest.approx(found["draft_ms"] + found["verify_ms"] + found["other_ms"])
    assert 0 < found["other_share"] < 1 and found["tokens_per_s"] * found["seconds"] == pytest.approx(60)


def test_the_adversary_is_never_accepted(models):
    verifier, draft = models
    assert whole(timed(verifier, draft, Adversary, prompts(3, seed=1), Options(3), 20))["mean_acceptance_length"] < 1.1
    assert whole(timed(verifier, draft, EagleDraft, prompts(3, seed=1), Options(0), 20))["mean_acceptance_length"] == 1.0


def turn(scale, plain=10.0):
    def arm(speed, round_ms):
        return {"decode_tokens_per_s": speed * scale, "tokens_per_s": speed * scale, "round_ms": round_ms / scale}

    arms = {"k0": arm(100, plain), "k2": arm(130, 14.0), "k3": arm(120, 16.0), "adaptive": arm(110, 12.0), "adversary": arm(50, 17.0)}
    arms |= {"adaptive_adversary": arm(98, 10.2), "b8_k0": arm(300, 30.0), "b8_k3": arm(200, 90.0), "b8_adaptive": arm(297, 31.0)}
    arms |= {"floor_k0": {"floor_ms": 8.0 / scale}, "floor_k2": {"floor_ms": 10.0 / scale}}
    return arms | {"transformers": {"decode_tokens_per_s": 25 * scale}}


def test_ratios_are_taken_within_a_turn():
    """The machine's own speed, another one in each turn, cancels."""
    found = figures([turn(1.0), turn(0.4), turn(2.0)], [2, 3], [8])
    assert (found["best"], found["best_over_k0"]) == ("k2", pytest.approx(1.3))
    assert found["ratio_at_asked_tau"] == {"k3": pytest.approx(2.2 * 10 / 16)}
    assert found["k0_over_transformers"] == pytest.approx(4.0)
    assert found["batches"]["8"]["k0_over_batch_1"] == pytest.approx(3.0)
    assert found["batches"]["8"]["over_k0"] == pytest.approx({"b8_k3": 2 / 3, "b8_adaptive": 0.99})
    assert found["adaptive_over_k0"] == {"adaptive": pytest.approx(1.1)}
    assert found["round_over_floor"] == pytest.approx({"k0": 10 / 8, "k2": 14 / 10})
    assert found["adaptive_adversary_over_k0"] == pytest.approx(0.98)
    json.dumps(found)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_floors_are_of_the_products_of_a_round_in_its_order(models, monkeypatch, k):
    verifier, draft = models
    for model in models:
        monkeypatch.setattr(model.tracer, "enabled", False)  # recorded passes call no layer
    multiplied, forward = [], Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda layer, x: multiplied.append((layer, x[..., 0].numel())) or forward(layer, x))
    run = Run(verifier, EagleDraft(draft) if k else None, [Request(prompts(1)[0], 24, stop_ids=())], Options(k), draft.aux_layers)
    rounds, committed = iter(run), 1
    next(rounds)  # the prompt
    for _ in range(3):
        multiplied.clear()
        found = next(rounds)
        assert multiplied == round_products(verifier, draft, k, committed)
        committed = len(found.token_ids)
    monkeypatch.undo()
    assert round_floor(verifier, draft, k) > 0


def test_a_pass_takes_longer_than_its_attention(models):
    verifier, _ = models
    rows = context_seconds(verifier, 2, [8, 64])
    assert [row["context"] for row in rows] == [8, 64] and all(0 < row["attention_s"] < row["verify_s"] for row in rows)


@pytest.mark.parametrize("name", ["w4a16", "w8a16"])
def test_a_quantized_draft_proposes_and_changes_nothing(pair, models, tmp_path, name):
    verifier, _ = models
    copy = quantized_copy(pair, tmp_path / "draft", name, edges=True)
    draft = sb.load_draft(copy, device="cpu", verifier=verifier)
    assert draft.lm_head.kernel is not None and draft.fc.kernel is not None
    plain, found = (sb.generate(verifier, draft, prompts(3, seed=1), num_speculative_tokens=k, max_new_tokens=20) for k in (0, 3))
    assert plain.token_ids == found.token_ids


def test_a_whole_run_on_a_tiny_pair(pair, tmp_path, monkeypatch):
    class Letters:
        chat_template = None

        def __call__(self, text):
            return {"input_ids": [ord(c) % 250 + 3 for c in text[:12]]}

    monkeypatch.setattr("specbench.text.load_tokenizer", lambda verifier: Letters())
    questions = decoding.limit_per_category(decoding.load_prompts(), 1)[:2]
    small = quantized_copy(pair, tmp_path / "draft", "w8a16", edges=True)
    found = decoding.measure(
        pair, questions, small=small, baseline=None, ks=[1, 3], batches=[2], max_new_tokens=12, repeats=1, device="cpu", contexts=[16, 32]
    )
    chains = {"k1", "k3", "k1_w8a16_draft", "k3_w8a16_draft"}
    assert found["best"] in chains | {"k3_p_min", "k3_w8a16_draft_p_min"} and found["best_chain"] in chains
    assert set(found["round_over_floor"]) == {"k0", *chains} and len(found["context"]) == 2
    assert set(found["adaptive_over_k0"]) == {"adaptive", "adaptive_w8a16_draft"}
    assert set(found["batches"]["2"]["over_k0"]) == {"b2_k3_w8a16_draft", "b2_adaptive_w8a16_draft"}
    assert torch.is_inference_mode_enabled() is False

"""Recorded passes: the same numbers as passes that run as they are, at every length, row, window and shape."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_draft, tiny_verifier

import specbench as sb
from specbench.models import traced
from specbench.models.traced import AFTER, FEW_ROWS

AUX = (2, 4, 5)


@pytest.fixture
def verifier(tiny):
    return sb.load_verifier(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu")


def ids(*shape, seed=3):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def steps(model, cache, n, count, row=0, batch=1, start=5, aux=AUX):
    """`count` passes over n tokens each, one behind the other."""
    out = []
    for i in range(count):
        positions = torch.arange(start + i * n, start + (i + 1) * n).expand(batch, -1)
        step = model.step(positions, start + (i + 1) * n, row=row, masked=batch > 1 or n > 1)
        hidden, states = model(ids(batch, n, seed=i), step, cache, aux)
        out.append((hidden, states))
    return out


@torch.inference_mode()
@pytest.mark.parametrize(("n", "batch", "row"), [(1, 1, 0), (4, 1, 0), (1, 3, 0), (2, 2, 1), (1, 1, 2)])
def test_recorded_passes_equal_plain_ones_bit_by_bit(verifier, n, batch, row):
    count, length = AFTER + 6, 5 + (AFTER + 6) * n
    recorded = steps(verifier, verifier.new_cache(length, 3), n, count, row, batch)
    assert len(verifier.tracer.recorded) == 1
    verifier.tracer.enabled = False
    plain = steps(verifier, verifier.new_cache(length, 3), n, count, row, batch)
    for ours, theirs in zip(recorded, plain, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@torch.inference_mode()
def test_one_recording_serves_other_caches_of_its_shape(verifier):
    first, longer = verifier.new_cache(40), verifier.new_cache(300)
    steps(verifier, first, 1, AFTER + 2)
    recorded = steps(verifier, longer, 1, 200)
    assert len(verifier.tracer.recorded) == 1
    verifier.tracer.enabled = False
    plain = steps(verifier, verifier.new_cache(300), 1, 200)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(recorded, plain, strict=True))


@torch.inference_mode()
def test_shapes_rows_and_states_have_recordings_of_their_own(verifier):
    for n, row, aux in ((1, 0, ()), (1, 0, AUX), (1, 1, AUX), (2, 0, AUX)):
        hidden, states = steps(verifier, verifier.new_cache(60, 2), n, AFTER + 1, row, aux=aux)[-1]
        assert hidden.shape == (1, n, 64) and (states is None) == (not aux)
    assert len(verifier.tracer.recorded) == 4


@torch.inference_mode()
def test_prompts_and_large_batches_are_not_recorded(verifier):
    steps(verifier, verifier.new_cache(400), FEW_ROWS + 1, AFTER + 2)
    for _ in range(AFTER + 2):
        step = verifier.step(torch.arange(4)[None], 4, causal=True)
        verifier(ids(1, 4), step, verifier.new_cache(8))
    assert not verifier.tracer.recorded


@torch.inference_mode()
def test_weights_changed_in_place_are_seen(verifier):
    cache = verifier.new_cache(60)
    before = steps(verifier, cache, 1, AFTER + 2)[-1][0]
    verifier.layers[3].mlp.down_proj.weight.mul_(2)
    assert not torch.equal(steps(verifier, cache, 1, AFTER + 2)[-1][0], before)


@torch.inference_mode()
def test_windows_are_told_apart_by_whether_they_bind(tmp_path, tiny, verifier):
    draft = sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu", verifier=verifier)
    for window in (6, None):
        for layer in draft.layers:
            layer.self_attn.window = window
        draft.tracer = traced.Tracer([window], 2)
        outs = []
        for enabled in (True, False):
            draft.tracer.enabled = enabled
            cache, hidden, seen = draft.new_cache(60), torch.ones(1, 1, 64), []
            for i in range(2, 40):
                hidden = draft(ids(1, 1, seed=i), hidden, draft.step(torch.tensor([[i]]), i + 1, masked=False), cache)
                seen.append(hidden)
            outs.append(seen)
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
        assert draft.tracer.recorded


def test_where_recording_fails_passes_run_as_they_are(tmp_path, monkeypatch):
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), tiny_draft(tmp_path / "d"))

    def refuse(*args, **kwargs):
        raise RuntimeError("not here")

    verifier = sb.load_verifier(pair, device="cpu")
    expected = sb.generate(verifier, None, [[5, 6, 7]], num_speculative_tokens=0, max_new_tokens=30).token_ids
    assert verifier.tracer.recorded
    monkeypatch.setattr(torch.jit, "trace", refuse)
    verifier = sb.load_verifier(pair, device="cpu")
    assert sb.generate(verifier, None, [[5, 6, 7]], num_speculative_tokens=0, max_new_tokens=30).token_ids == expected
    assert not verifier.tracer.recorded and not verifier.tracer.enabled

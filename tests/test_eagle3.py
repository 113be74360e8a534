"""The EAGLE-3 draft against its fp64 restatement: prompt pairs, chained steps that feed back their own state, batches, id maps."""

from __future__ import annotations

import pytest
import restate
import torch
from safetensors.torch import load_file
from tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, draft_config, tiny_draft

import specbench as sb
from specbench.decode.draft import EagleDraft

EPS, THETA, STEPS = 1e-5, 10000.0, 5


def example(tiny, folder, **changes):
    """A loaded draft, and its tensors as the restatement reads them."""
    pair = sb.open_pair(tiny["verifier"], tiny_draft(folder, **changes))
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = load_file(tiny["verifier"] / "model.safetensors")["model.embed_tokens.weight"]
    return sb.load_draft(pair, device="cpu"), tensors


@pytest.fixture(params=[True, False], ids=["norm_before_residual", "raw residual"])
def pair(request, tiny, tmp_path):
    return (*example(tiny, tmp_path / "draft", norm_before_residual=request.param), request.param)


@pytest.fixture
def draft(tiny, tmp_path):
    return example(tiny, tmp_path / "draft")[0]


def states(tensors, tokens, hidden, norm_before_residual):
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "eps": EPS, "theta": THETA}
    return restate.draft_states(tensors, tokens, hidden, norm_before_residual=norm_before_residual, **sizes)


def chain(tensors, tokens, aux, norm_before_residual, steps):
    """The whole procedure in fp64 and without a cache: each step appends its own best token beside its own last state."""
    tokens, hidden, scores = list(tokens), restate.fuse(tensors, aux, EPS), []
    for _ in range(steps):
        out = states(tensors, torch.tensor(tokens), hidden, norm_before_residual)[-1:]
        scores.append(restate.logits(tensors, out, EPS)[0])
        best = int(scores[-1].argmax())
        tokens.append(best + int(tensors["d2t"][best]))
        hidden = torch.cat((hidden, out))
    return tokens[-steps:], torch.stack(scores)


def pairs(n, seed=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), generator=g), torch.randn(n, 3 * HIDDEN, generator=g)


def close(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def run(draft, tokens, hidden, cache, start=0, **step):
    positions = torch.arange(start, start + tokens.shape[1]).expand(len(tokens), -1)
    return draft(tokens, hidden, draft.step(positions, start + tokens.shape[1], **step), cache)


@torch.inference_mode()
def test_states_and_logits_of_a_prompt(pair):
    draft, tensors, norm_before_residual = pair
    tokens, aux = pairs(20)
    fused = draft.fuse(aux[None])
    assert close(fused[0], restate.fuse(tensors, aux, EPS))
    got = run(draft, tokens[None], fused, draft.new_cache(20))
    expected = states(tensors, tokens, restate.fuse(tensors, aux, EPS), norm_before_residual)
    assert close(got[0], expected)
    assert close(draft.logits(got)[0], restate.logits(tensors, expected, EPS))


@torch.inference_mode()
def test_a_chain_feeds_back_its_own_states(pair):
    draft, tensors, norm_before_residual = pair
    tokens, aux = pairs(12)
    expected_tokens, expected = chain(tensors, tokens, aux, norm_before_residual, STEPS)
    cache = draft.new_cache(12 + STEPS)
    hidden = run(draft, tokens[None], draft.fuse(aux[None]), cache)[:, -1:]
    proposed = []
    for j in range(STEPS):
        scores = draft.logits(hidden)
        assert close(scores[0, 0], expected[j]), j
        token = draft.to_target(scores.argmax(-1))
        proposed.append(int(token))
        hidden = run(draft, token, hidden, cache, 12 + j, masked=False)
    assert proposed == expected_tokens


@torch.inference_mode()
def test_the_proposer_follows_the_same_procedure_round_after_round(pair):
    """After a round only the verifier's true states count: drafted ones are written over."""
    draft, tensors, norm_before_residual = pair
    tokens, aux = pairs(30)
    proposer = EagleDraft(draft)
    proposer.begin(1, 48)
    end = 0
    for more, k in ((9, 5), (1, 4), (3, 1), (6, 7)):  # as if k - 1 ... proposals of the round before had been accepted or not
        positions, last = torch.arange(end, end + more)[None], torch.tensor([more - 1])
        proposer.extend(tokens[None, end : end + more], aux[None, end : end + more], positions, last, 0, end + more, end == 0)
        end += more
        lengths = torch.tensor([end + 1])
        expected, _ = chain(tensors, tokens[:end], aux[:end], norm_before_residual, k)
        assert proposer.propose(k, lengths, end + 1).tokens.tolist() == [expected]
        assert proposer.propose(1, lengths, end + 1).tokens.tolist() == [expected[:1]]


@torch.inference_mode()
def test_only_distances_between_positions_matter(draft):
    tokens, aux = pairs(10)
    fused = draft.fuse(aux[None])
    cache = draft.new_cache(40)
    near = run(draft, tokens[None], fused, cache)
    positions = torch.arange(10)[None]
    spread = draft.step(positions, 10)
    spread.rotary = draft.step(positions + 29, 39).rotary
    assert close(draft(tokens[None], fused, spread, draft.new_cache(40)), near)
    reversed_order = draft.step(positions, 10)
    reversed_order.rotary = tuple(t.flip(1) for t in reversed_order.rotary)
    assert not close(draft(tokens[None], fused, reversed_order, draft.new_cache(40)), near)


@torch.inference_mode()
def test_batches_equal_single_rows(draft):
    tokens, aux = pairs(36)
    tokens, fused, cache = tokens.view(3, 12), draft.fuse(aux.view(3, 12, -1)), draft.new_cache(16, 3)
    together = run(draft, tokens, fused, cache)
    ragged = torch.tensor([[4], [12], [7]])  # rows 0 and 2 had pairs rejected
    feedback = together[torch.arange(3), ragged[:, 0] - 1][:, None]
    step = draft(tokens[:, :1], feedback, draft.step(ragged, 13), cache)
    for row in range(3):
        alone = draft.new_cache(16)
        assert close(together[row], run(draft, tokens[row : row + 1], fused[row : row + 1], alone)[0])
        length = int(ragged[row])
        single = run(draft, tokens[row : row + 1, :1], feedback[row : row + 1], alone, length)
        assert close(step[row], single[0])


@torch.inference_mode()
def test_the_rotary_table_reaches_past_the_drafts_own_length(tiny, tmp_path):
    layer = draft_config()["transformer_layer_config"] | {"max_position_embeddings": 8}
    draft, tensors = example(tiny, tmp_path / "draft", transformer_layer_config=layer)
    tokens, aux = pairs(30)
    cache = draft.new_cache(30)
    run(draft, tokens[None, :5], draft.fuse(aux[None, :5]), cache)
    late = run(draft, tokens[None, 5:], draft.fuse(aux[None, 5:]), cache, 5)
    assert close(late[0], states(tensors, tokens, restate.fuse(tensors, aux, EPS), True)[5:])


def test_draft_ids_lead_to_verifier_ids(draft):
    ids = torch.arange(64)
    assert draft.to_target(ids).tolist() == [4 * i for i in range(64)]
    assert draft.to_target(torch.tensor([[3], [0]])).tolist() == [[12], [0]]


def test_scores_spread_over_the_verifiers_vocabulary(draft):
    scores = torch.randn(2, 64)
    full = draft.expand(scores)
    assert full.shape == (2, 256)
    assert torch.equal(full[:, ::4], scores)
    full[:, ::4] = float("-inf")
    assert bool((full == float("-inf")).all())


@torch.inference_mode()
def test_the_embedding_is_indexed_by_verifier_ids(draft):
    """An id outside the draft's own 64 is an ordinary input."""
    tokens, hidden = torch.tensor([[255, 65]]), torch.randn(1, 2, HIDDEN)
    out = run(draft, tokens, hidden, draft.new_cache(2))
    other = run(draft, tokens - 1, hidden, draft.new_cache(2))
    assert bool(torch.isfinite(out).all()) and not torch.allclose(out, other)


@torch.inference_mode()
def test_embedding_comes_first(tiny, tmp_path):
    """Without the first half of the q, k, v columns the token is not heard."""
    draft, _ = example(tiny, tmp_path / "draft")
    hidden = torch.randn(1, 1, HIDDEN)
    first, second = (torch.tensor([[token]]) for token in (3, 200))
    assert not torch.allclose(run(draft, first, hidden, draft.new_cache(1)), run(draft, second, hidden, draft.new_cache(1)))
    draft.layers[0].self_attn.qkv_proj.weight[:, :HIDDEN] = 0
    assert torch.equal(run(draft, first, hidden, draft.new_cache(1)), run(draft, second, hidden, draft.new_cache(1)))

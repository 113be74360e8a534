"""The decode loop: the output is the verifier's own greedy output whatever is proposed, and the counts say what happened."""

from __future__ import annotations

import json

import pytest
import torch
from planted import planted_pair
from proposers import AUX, Fixed, Oracle, Steered, Untouchable, Watched, greedy, prompts, text
from tiny import tiny_draft, tiny_verifier, tiny_w4a16_verifier, verifier_config, verifier_tensors, write

import specbench as sb
from specbench.decode import engine
from specbench.decode.draft import EagleDraft
from specbench.decode.engine import decode
from specbench.decode.lossless import compare
from specbench.decode.verify import Accepted, accept
from specbench.errors import ConfigError
from specbench.quant.int4 import cpu_int4_layout

KS = (1, 2, 4, 7)


def load_verifier(folder, draft, **options):
    return sb.load_verifier(sb.open_pair(folder, draft), device="cpu", **options)


@pytest.fixture(scope="module")
def verifier(tiny):
    return load_verifier(tiny["verifier"], tiny["draft"])


@pytest.fixture(scope="module")
def draft(tiny, verifier):
    return sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu", verifier=verifier)


def run(verifier, proposer, prompt, k, n=20, eos_ids=(), aux_layers=AUX):
    return decode(verifier, proposer, prompt, num_speculative_tokens=k, max_new_tokens=n, aux_layers=aux_layers, eos_ids=eos_ids)


def identities(out, k, cut=0):
    """What the counts of a generation must add up to. cut: 1 where EOS took the bonus token of the last round."""
    assert len(out.token_ids) == 1 + sum(out.accepted_per_round) + len(out.accepted_per_round) - cut
    assert len(out.accepted_per_round) == len(out.proposed_per_round)
    assert all(0 <= a <= p <= k for a, p in zip(out.accepted_per_round, out.proposed_per_round, strict=True))
    assert all(p == k for p in out.proposed_per_round[: max(0, len(out.proposed_per_round) - k)]), "fewer only when the end is near"


@pytest.fixture(scope="module")
def texts(verifier):
    return [text(verifier, prompt, 20) for prompt in prompts(6)]


def test_plain_decoding_is_greedy(verifier, texts):
    for known in texts:
        out = run(verifier, None, known.prompt, 0)
        assert out.token_ids == known.tokens
        assert (out.prompt_ids, out.finish_reason) == (known.prompt, "length")
        assert out.accepted_per_round == out.proposed_per_round == [0] * 19


@pytest.mark.parametrize("k", KS)
def test_a_random_draft_changes_nothing(verifier, draft, texts, k):
    for known in texts:
        out = run(verifier, EagleDraft(draft), known.prompt, k)
        assert out.token_ids == known.tokens
        identities(out, k)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("luck", [0.5, 0.9])
def test_a_draft_that_is_often_right_changes_nothing(verifier, texts, k, luck):
    accepted = rejected = 0
    for seed, known in enumerate(texts):
        out = run(verifier, Oracle(known, luck=luck, seed=seed), known.prompt, k)
        assert out.token_ids == known.tokens
        identities(out, k)
        accepted += sum(out.accepted_per_round)
        rejected += sum(out.proposed_per_round) - sum(out.accepted_per_round)
    assert accepted and rejected


@pytest.mark.parametrize("k", KS)
def test_a_perfect_draft_is_accepted_whole(verifier, texts, k):
    for known in texts[:3]:
        proposer = Oracle(known)
        out = run(verifier, proposer, known.prompt, k)
        assert out.token_ids == known.tokens
        assert out.accepted_per_round == out.proposed_per_round
        assert proposer.asked == [p for p in out.proposed_per_round if p]
        identities(out, k)


@pytest.mark.parametrize("k", KS)
def test_the_second_choice_is_never_accepted(verifier, texts, k):
    for known in texts[:3]:
        out = run(verifier, Oracle(known, second=True), known.prompt, k)
        assert out.token_ids == known.tokens
        assert out.accepted_per_round == [0] * 19
        identities(out, k)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A pair whose draft is often, not always, right, and what the verifier alone writes."""
    pair = sb.open_pair(*planted_pair(tmp_path_factory.mktemp("planted")))
    verifier = sb.load_verifier(pair, device="cpu")
    draft = sb.load_draft(pair, device="cpu", verifier=verifier)
    return verifier, draft, [run(verifier, None, prompt, 0, 24) for prompt in prompts(6, seed=1)]


@pytest.mark.parametrize("k", KS)
def test_a_trained_like_pair_accepts_some_and_changes_nothing(planted, k):
    verifier, draft, references = planted
    counts = set()
    for reference in references:
        out = run(verifier, EagleDraft(draft), reference.prompt_ids, k, 24)
        assert out.token_ids == reference.token_ids
        identities(out, k)
        counts |= set(out.accepted_per_round)
    assert {0, 1} <= counts


@pytest.mark.parametrize("prompt", [[1], [255], [7, 7]])
def test_very_short_prompts(verifier, draft, prompt):
    known = text(verifier, prompt, 12)
    assert run(verifier, EagleDraft(draft), prompt, 4, 12).token_ids == known.tokens
    assert run(verifier, Oracle(known), prompt, 4, 12).token_ids == known.tokens


@pytest.fixture(scope="module")
def varied(verifier):
    """A text whose first eleven output tokens all differ, so that each can serve as EOS."""
    for prompt in prompts(200, seed=2):
        if len(set(run(verifier, None, prompt, 0, 11).token_ids)) == 11:
            return text(verifier, prompt, 16)
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("luck", [1.0, 0.0], ids=["accepted", "rejected"])
@pytest.mark.parametrize("last", range(11))
def test_eos_ends_the_output_wherever_in_a_block_it_falls(verifier, varied, last, luck):
    """With k = 4 and all accepted, output token i is place (i - 1) % 5 of its block; place 4 is the bonus token."""
    out = run(verifier, Oracle(varied, luck=luck), varied.prompt, 4, 16, eos_ids=[varied.tokens[last]])
    assert out.token_ids == varied.tokens[: last + 1]
    assert out.finish_reason == "eos"
    identities(out, 4, cut=int(luck == 1.0 and last > 0 and (last - 1) % 5 != 4))
    if luck == 1.0:
        whole, rest = divmod(last, 5)
        assert out.accepted_per_round == [4] * whole + ([rest] if rest else [])


def test_eos_among_rejected_proposals_ends_nothing(verifier, varied):
    absent = next(i for i in range(256) if i not in varied.tokens)
    out = run(verifier, Fixed([absent]), varied.prompt, 3, 16, eos_ids=[absent], aux_layers=())
    assert (out.token_ids, out.finish_reason) == (varied.tokens, "length")


def test_eos_ids_are_the_verifiers_unless_given(tmp_path, tiny, varied):
    tokens = varied.tokens
    folder = tiny_verifier(tmp_path / "v", eos_token_id=[tokens[3], tokens[7]])
    verifier = load_verifier(folder, tiny["draft"])
    assert verifier.eos_ids == {tokens[3], tokens[7]}
    assert run(verifier, None, varied.prompt, 0, 16, eos_ids=None).token_ids == tokens[:4]
    assert run(verifier, None, varied.prompt, 0, 16, eos_ids=()).token_ids == tokens


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("limit", range(1, 13))
def test_never_more_than_max_new_tokens(verifier, varied, k, limit):
    proposer = Oracle(varied)
    out = run(verifier, proposer, varied.prompt, k, limit)
    assert out.token_ids == varied.tokens[:limit]
    assert out.finish_reason == "length"
    identities(out, k)
    asked = [p for p in out.proposed_per_round if p]
    assert asked == proposer.asked and sum(out.proposed_per_round) <= limit - 1


def test_k_0_never_touches_the_draft_nor_asks_for_its_states(verifier, varied, monkeypatch):
    asked, forward = [], verifier.forward
    monkeypatch.setattr(verifier, "forward", lambda tokens, step, cache, aux=(): asked.append(aux) or forward(tokens, step, cache, aux))
    out = run(verifier, Untouchable(), varied.prompt, 0, 16)
    assert out.token_ids == varied.tokens
    assert set(asked) == {()}
    assert out.timing.draft_s < out.timing.verify_s


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("length", [20, 27, 30, 31])
def test_the_context_ends_the_output(tmp_path, tiny, k, length):
    """Also where a block would cross the limit; asking for exactly what fits is a matter of length."""
    verifier = load_verifier(tiny_verifier(tmp_path / "v", max_position_embeddings=32), tiny["draft"])
    prompt = torch.randint(3, 256, (length,)).tolist()
    known = text(verifier, prompt, 32 - length)
    for n, reason in ((100, "context"), (32 - length, "length")):
        out = run(verifier, Oracle(known) if k else None, prompt, k, n)
        assert (out.token_ids, out.finish_reason) == (known.tokens, reason)
        identities(out, k)


def test_a_prompt_that_fills_the_context_is_refused(tmp_path, tiny):
    verifier = load_verifier(tiny_verifier(tmp_path / "v", max_position_embeddings=32), tiny["draft"])
    with pytest.raises(ConfigError, match="32 tokens and the verifier's context 32"):
        run(verifier, None, [5] * 32, 0)


def test_a_draft_with_a_shorter_length_than_the_prompt_proposes_the_same(tmp_path, tiny, verifier, draft):
    """Rotary positions have no end; only the table does."""
    folder = tiny_draft(tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["max_position_embeddings"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    short = sb.load_draft(sb.open_pair(tiny["verifier"], folder), device="cpu", verifier=verifier)
    prompt = torch.randint(3, 256, (40,)).tolist()
    out, reference = run(verifier, EagleDraft(short), prompt, 3), run(verifier, EagleDraft(draft), prompt, 3)
    assert out.token_ids == reference.token_ids == greedy(verifier, prompt, 20)
    assert out.accepted_per_round == reference.accepted_per_round


@pytest.mark.parametrize("k", [1, 3, 5])
def test_both_caches_hold_the_committed_text_in_every_round(planted, k):
    verifier, draft, references = planted
    for reference in references[:2]:
        watched = Watched(draft, verifier, reference.prompt_ids)
        out = run(verifier, watched, reference.prompt_ids, k, 16)
        del verifier.new_cache
        assert watched.rounds == sum(p > 0 for p in out.proposed_per_round) > 2


@pytest.mark.parametrize("k", [0, 1, 4])
def test_ties_go_to_the_lowest_id(tmp_path, tiny, k):
    """Every head row exists twice: the twin of a choice, 128 ids higher, is never emitted and never accepted."""
    config = verifier_config()
    tensors = verifier_tensors(config)
    tensors["lm_head.weight"][128:] = tensors["lm_head.weight"][:128]
    verifier = load_verifier(write(tmp_path / "v", config, tensors), tiny["draft"])
    for prompt in prompts(3, seed=3):
        known = text(verifier, prompt, 16)
        assert max(known.tokens) < 128
        for shift in (0, 128):
            out = run(verifier, Oracle(known, shift=shift) if k else None, prompt, k, 16)
            assert out.token_ids == known.tokens
            assert not k or sum(out.accepted_per_round) == (0 if shift else sum(out.proposed_per_round))


def test_a_draft_that_computes_nonsense_changes_nothing(tiny, verifier, varied):
    for value in (float("nan"), float("inf"), 0.0):
        broken = sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu", verifier=verifier)
        broken.fc.weight.fill_(value)
        assert run(verifier, EagleDraft(broken), varied.prompt, 3, 16).token_ids == varied.tokens


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "holds no token"), ([5, 256], "5..256; the verifier's vocabulary is 0..255"), ([-1, 5], "-1..5")],
    ids=["empty", "too high", "negative"],
)
def test_prompts_that_cannot_be_read_are_refused(verifier, prompt, message):
    with pytest.raises(ConfigError, match=message):
        run(verifier, None, prompt, 0)


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (0, 0), (0, -3)])
def test_impossible_numbers_are_refused(verifier, k, n):
    with pytest.raises(ConfigError, match=f"num_speculative_tokens is {k} and max_new_tokens {n}"):
        run(verifier, None, [5], k, n)


def test_speculation_without_a_draft_is_refused(verifier):
    with pytest.raises(ConfigError, match="num_speculative_tokens is 3 but there is no draft"):
        run(verifier, None, [5], 3)


def test_an_eagle3_draft_without_states_is_refused(verifier, draft):
    with pytest.raises(ConfigError, match=r"aux_layers=draft\.aux_layers"):
        run(verifier, EagleDraft(draft), [5], 3, aux_layers=())


def test_times_add_up(verifier, draft, varied):
    timing = run(verifier, EagleDraft(draft), varied.prompt, 3, 16).timing
    assert min(timing.prefill_s, timing.draft_s, timing.verify_s) > 0
    assert timing.other_s > -1e-9
    parts = timing.prefill_s + timing.draft_prefill_s + timing.draft_s + timing.verify_s + timing.other_s
    assert timing.total_s == pytest.approx(parts)


@pytest.fixture(scope="module")
def packed(tmp_path_factory, tiny):
    verifier = load_verifier(tiny_w4a16_verifier(tmp_path_factory.mktemp("packed") / "v", dtype="bfloat16"), tiny["draft"])
    if cpu_int4_layout() is not None:
        assert verifier.layers[0].mlp.down_proj.kernel.name == "int4-packed-cpu"
    return verifier


@pytest.mark.parametrize("k", [2, 5])
def test_packed_4_bit_weights_in_bf16_differ_at_near_ties_at_most(tiny, packed, k):
    """Blocks of several rows round otherwise than single rows; wherever the outputs part, the verifier itself hardly prefers one."""
    draft = sb.load_draft(sb.open_pair(tiny["w4a16"], tiny["draft"]), device="cpu", dtype="bfloat16")
    parted = []
    for i, prompt in enumerate(prompts(4, seed=4)):
        reference = run(packed, None, prompt, 0, 20)
        out = run(packed, Steered(reference) if i % 2 else EagleDraft(draft), prompt, k, 20)
        found = compare(packed, prompt, reference.token_ids, out.token_ids)
        assert found.lossless, found
        parted += [] if found.identical else [found]
    print(f"k={k}: {len(parted)} of 4 outputs part, largest deficit {max((c.largest_deficit for c in parted), default=0.0):.3f} logits")


def test_a_loop_that_accepts_second_choices_is_a_logic_error(verifier, varied, monkeypatch):

    def gullible(scored, proposal, *rest):
        found = accept(scored, proposal, *rest)
        return found if proposal is None else Accepted(torch.cat((proposal.tokens, found.tokens[:, -1:]), 1), found.count * 0 + 1)

    monkeypatch.setattr(engine, "accept", gullible)
    out = run(verifier, Fixed(varied.seconds[1:2]), varied.prompt, 1, 3, aux_layers=())
    assert out.token_ids[:2] == [varied.tokens[0], varied.seconds[1]]
    found = compare(verifier, varied.prompt, varied.tokens[:3], out.token_ids)
    assert not found.lossless and found.first_difference == 1
    assert found.largest_deficit > found.bound

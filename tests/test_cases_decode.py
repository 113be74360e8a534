"""Reported failures of decoding, by id, each with its right outcome (kinds: lossless, cache, batch, perf).

The acceptance arithmetic of B073, B075 and B076 is in test_verify, the distributions of B077 and the seeds and penalties of B079, B085 and
B087 in test_sampled_decoding, the ends of outputs of B081, B082 and B084 in test_stream, the batches of B118, B120, B122, B123 and B125 in
test_batch; here stands the rest, and how those hold together with a real pair.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from planted import planted_pair
from proposers import Oracle, prompts, read, text
from test_batch import ranges_table, table_outputs
from test_cases_quant import verifier as stored_verifier
from tiny import tiny_draft, verifier_config, verifier_tensors, write
from toy import Scripted, TableVerifier

import specbench as sb
from specbench.decode import engine
from specbench.decode.checks import check
from specbench.decode.clock import StageClock
from specbench.decode.draft import EagleDraft, Proposal
from specbench.decode.engine import Run, decode
from specbench.decode.invariants import BrokenInvariant, check_invariants
from specbench.decode.lossless import compare
from specbench.decode.request import Options, Request, Sampling
from specbench.decode.sequence import Active
from specbench.decode.tree import Tree
from specbench.decode.verify import Accepted, accept, verify
from specbench.models.eagle3 import Eagle3

AUX = (2, 4, 5)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    pair = sb.open_pair(*planted_pair(tmp_path_factory.mktemp("planted")))
    verifier = sb.load_verifier(pair, device="cpu")
    return verifier, sb.load_draft(pair, device="cpu", verifier=verifier)


@pytest.fixture(scope="module")
def random_draft(tiny, planted):
    return sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu", verifier=planted[0])


def finish(run: Run):
    for _ in run:
        pass
    return run.generations()


# --- lossless


class SecondBest(EagleDraft):
    """Proposes what its draft finds second best."""

    def propose(self, count, lengths, longest, settings=None):
        found = super().propose(count, lengths, longest, settings)
        scores = self.draft.logits(self.hidden[: len(lengths)])
        second = self.draft.to_target(scores.topk(2).indices[:, 0, 1])
        return replace(found, tokens=torch.cat((second[:, None], found.tokens[:, 1:]), 1))


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_b069_greedy_output_is_the_verifiers_for_any_draft(planted, random_draft, k: int) -> None:
    """The draft often right, random, and adversarial, over ragged batches; the report says which guarantee was checked."""
    verifier, draft = planted
    made = [Request(p, 20, stop_ids=()) for p in prompts(10, seed=3)]
    plain = finish(Run(verifier, None, made, Options(0, 5)))
    for proposer in (EagleDraft(draft), EagleDraft(random_draft), SecondBest(draft)):
        for one, other in zip(finish(Run(verifier, proposer, made, Options(k, 5), AUX)), plain, strict=True):
            found = compare(verifier, one.prompt_ids, other.token_ids, one.token_ids)
            assert found.label == "identical", found


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_b069_200_prompts(planted, random_draft, k: int) -> None:
    verifier, draft = planted
    made = [Request(p, 64, stop_ids=()) for p in prompts(200, seed=12)]
    plain = [g.token_ids for g in finish(Run(verifier, None, made, Options(0, 50)))]
    for proposer in (EagleDraft(draft), EagleDraft(random_draft), SecondBest(draft)):
        assert [g.token_ids for g in finish(Run(verifier, proposer, made, Options(k, 50), AUX))] == plain


def test_b069_a_difference_is_reported_with_place_and_margin(planted) -> None:
    verifier, _ = planted
    known = text(verifier, [5, 9, 17], 8)
    wrong = [*known.tokens[:4], known.seconds[4], *known.tokens[5:]]
    found = compare(verifier, known.prompt, known.tokens, wrong)
    scores = read(verifier, known.prompt + known.tokens[:4])[0][-1]
    margin = float(scores[known.tokens[4]] - scores[known.seconds[4]])
    assert found.first_difference == 4 and found.largest_deficit >= margin * 0.999 and found.label == "logic"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b070_exact_ties_go_to_the_lowest_id_with_and_without_a_draft(tmp_path, tiny, dtype: str) -> None:
    """Every token has a twin with the same row in the head."""
    config = verifier_config(dtype=dtype)
    tensors = verifier_tensors(config, 0, getattr(torch, dtype))
    tensors["lm_head.weight"][1::2] = tensors["lm_head.weight"][::2]
    pair = sb.open_pair(write(tmp_path / "v", config, tensors), tiny["draft"])
    verifier = sb.load_verifier(pair, device="cpu")
    draft = sb.load_draft(pair, device="cpu", dtype=dtype, verifier=verifier)
    for prompt in prompts(3, seed=5):
        plain = decode(verifier, None, prompt, num_speculative_tokens=0, max_new_tokens=24, eos_ids=())
        assert all(t % 2 == 0 for t in plain.token_ids)
        for k in (1, 4):
            found = decode(
                verifier, EagleDraft(draft), prompt, num_speculative_tokens=k, max_new_tokens=24, eos_ids=(), aux_layers=draft.aux_layers
            )
            assert all(t % 2 == 0 for t in found.token_ids)
            check = compare(verifier, prompt, plain.token_ids, found.token_ids)
            assert check.label == "identical" or (dtype == "bfloat16" and check.label == "numeric")
            assert check.exact_ties == 24, "every place is a tie, and is counted"


@pytest.mark.parametrize("case", ["W4A16", "NVFP4A16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b072_quantized_verifiers_differ_by_rounding_only_and_a_real_fault_is_told_apart(tmp_path, tiny, monkeypatch, case, dtype) -> None:
    pair = sb.open_pair(stored_verifier(tmp_path / "v", case), tiny["draft"])
    verifier = sb.load_verifier(pair, device="cpu", dtype=dtype, packed=False)
    draft = sb.load_draft(pair, device="cpu", dtype=dtype, verifier=verifier)

    def outputs(k: int) -> list[list[int]]:
        return sb.generate(verifier, draft if k else None, GIVEN, num_speculative_tokens=k, max_new_tokens=16, ignore_eos=True).token_ids

    plain = outputs(0)
    for k in (1, 4):
        for prompt, one, other in zip(GIVEN, plain, outputs(k), strict=True):
            found = compare(verifier, prompt, one, other)
            assert found.label == "identical" or (dtype == "bfloat16" and found.label == "numeric"), found

    def top_two(scored, proposal, *rest):
        """The planted fault: a proposal stands where it is among the two best."""
        right = accept(scored, proposal, *rest)
        if proposal is None:
            return right
        best = scored.scores[:, :-1].topk(2).indices
        count = (best == proposal.tokens[..., None]).any(2).cumprod(1).sum(1)
        stands = torch.arange(right.tokens.shape[1]) < count[:, None]
        tokens = torch.where(stands, torch.nn.functional.pad(proposal.tokens, (0, 1)), right.tokens)
        return Accepted(tokens, count)

    class Runner(EagleDraft):
        """Proposes the verifier's second best: what the fault lets through."""

        def propose(self, count, lengths, longest, settings=None):
            n = int(lengths[0])
            committed = self.run.rows.tokens[0, :n].tolist()
            return Proposal(read(verifier, committed)[0][-1].topk(2).indices[1:][None], 1)

    monkeypatch.setattr(engine, "accept", top_two)
    labels = []
    for prompt, one in zip(GIVEN, plain, strict=True):
        proposer = Runner(draft)
        run = Run(verifier, proposer, [Request(prompt, 16, stop_ids=())], Options(1), draft.aux_layers)
        proposer.run = run
        labels.append(compare(verifier, prompt, one, finish(run)[0].token_ids).label)
    assert set(labels) == {"logic"}


GIVEN = prompts(3, seed=7)


def test_b073_b075_b076_b077_sampling_reaches_verification_of_a_real_pair(planted) -> None:
    """Greedy proposals leave the tokens of the seed; drawn ones the settings: none outside top_k, other counts for another temperature."""
    verifier, draft = planted
    made = [Request(GIVEN[0], 12, Sampling(0.9, top_k=3, seed=i), ()) for i in range(30)]
    plain = [g.token_ids for g in finish(Run(verifier, None, made, Options(0, 30)))]
    assert [g.token_ids for g in finish(Run(verifier, EagleDraft(draft), made, Options(3, 30), AUX))] == plain
    drawn = finish(Run(verifier, EagleDraft(draft), made, Options(3, 30, "probabilistic"), AUX))
    for generation in drawn[:6]:
        scores = read(verifier, generation.prompt_ids + generation.token_ids)[0][len(generation.prompt_ids) - 1 : -1]
        best = scores.topk(3).indices
        assert all(t in row for t, row in zip(generation.token_ids, best.tolist(), strict=True))
    assert len({tuple(g.token_ids) for g in drawn}) > 10
    cold = [Request(GIVEN[0], 12, Sampling(0.01, seed=i), ()) for i in range(5)]
    greedy = finish(Run(verifier, None, [Request(GIVEN[0], 12, stop_ids=())], Options(0)))[0].token_ids
    assert [g.token_ids for g in finish(Run(verifier, EagleDraft(draft), cold, Options(3, 5, "probabilistic"), AUX))] == [greedy] * 5


def test_b079_b085_b087_a_request_is_the_same_in_any_company(planted) -> None:
    """Seed, penalty and log-probabilities at once."""
    verifier, draft = planted
    wanted = Request(GIVEN[1], 16, Sampling(0.8, repetition_penalty=1.3, frequency_penalty=0.5, seed=42), (), logprobs=2)
    other = Request(GIVEN[2], 16, Sampling(1.0, seed=1), ())
    alone = finish(Run(verifier, None, [wanted], Options(0)))[0]
    for company, batch in (([wanted], 1), ([other, wanted, other], 3), ([other, other, wanted], 2)):
        found = finish(Run(verifier, EagleDraft(draft), company, Options(3, batch), AUX))[company.index(wanted)]
        assert found.token_ids == alone.token_ids
        assert [p.value for p in found.logprobs] == pytest.approx([p.value for p in alone.logprobs], abs=1e-4)


@pytest.mark.parametrize("k", [0, 3])
def test_b081_b082_b084_text_ids_and_reason_end_together(planted, k: int) -> None:
    verifier, draft = planted
    options = {"num_speculative_tokens": k, "max_new_tokens": 16, "ignore_eos": True, "logprobs": 0}
    whole = sb.generate(verifier, draft, [GIVEN[0]], **options)
    stop = whole.text[0][4:6]
    found = sb.generate(verifier, draft, [GIVEN[0]], stop=stop, **options)
    n = len(found[0].token_ids)
    assert found.text[0].endswith(stop) and found.text[0] == whole.text[0][: whole.text[0].index(stop) + 2]
    assert found[0].token_ids == whole[0].token_ids[:n] and len(found[0].logprobs) == n and found[0].finish_reason == "stop"


# --- cache


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", ["k=1", "k=2", "k=4", "tree", "sampled", "k=0"])
def test_b089_both_caches_hold_the_committed_text_in_every_round(planted, mode: str, batch: int) -> None:
    """Whatever is accepted or rejected: verifier and draft hold one entry less than is committed, and the right ones."""
    verifier, draft = planted
    sampling = Sampling(0.8 if mode == "sampled" else 0.0, seed=1)
    made = [Request(p, 14 + i, sampling, ()) for i, p in enumerate(prompts(5, seed=6))]
    k = int(mode[2:]) if mode[:2] == "k=" else 3
    proposer = EagleDraft(draft, Tree(3, 3, 8) if mode == "tree" else None)
    options = Options(k, batch, "probabilistic" if mode == "sampled" else "greedy", check=True)
    found = finish(Run(verifier, proposer, made, options, AUX))
    plain = finish(Run(verifier, proposer, made, replace(options, check=False), AUX))
    assert [g.token_ids for g in found] == [g.token_ids for g in plain], "looking changes nothing"


def test_b089_a_perfect_draft_is_right_to_the_end(planted) -> None:
    known = text(planted[0], GIVEN[0], 60)
    out = decode(planted[0], Oracle(known), known.prompt, num_speculative_tokens=4, max_new_tokens=60, eos_ids=(), aux_layers=AUX)
    assert out.accepted_per_round == out.proposed_per_round and out.token_ids == known.tokens


def test_b091_after_rejections_the_next_scores_equal_a_fresh_pass(planted, random_draft) -> None:
    verifier, _ = planted
    run = Run(verifier, EagleDraft(random_draft), [Request(GIVEN[2], 8, stop_ids=())], Options(4), AUX)
    rejected = 0
    for update in run:
        sequence = run.active[0] if run.active else None
        if sequence is None or update.proposed == 0:
            continue
        n = len(sequence.tokens)
        rejected += update.proposed - update.accepted
        with torch.inference_mode():
            hidden, _ = verifier(torch.tensor([sequence.tokens[-1:]]), verifier.step(torch.tensor([[n - 1]]), n), run.cache)
            ours = verifier.lm_head(hidden)[0, -1]
        theirs = read(verifier, sequence.tokens)[0][-1]
        assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max()) + 1e-5
        assert int(run.rows.lengths[0]) - 1 == n - 1 > 0
    assert rejected > 6


def test_b097_the_draft_reads_states_of_committed_rows_only() -> None:
    """Each state is tagged with its token and place; k = 4 and one accepted leaves two pairs that are new."""
    table = ranges_table(1, 20)
    made = [Request([3, 4, 5], 16)]
    outputs = table_outputs(table, made)
    pairs = []

    class Counting(Scripted):
        def extend(self, tokens, aux, positions, last, row, limit, causal):
            super().extend(tokens, aux, positions, last, row, limit, causal)  # compares tags with committed tokens and places
            pairs.append(int(last[0]) + 1)

    run = Run(TableVerifier(table), Counting([[3, 4, 5]], outputs, [[1, 1, 0, 4]], 20, width=2), made, Options(4), (1,))
    assert finish(run)[0].token_ids == outputs[0]
    assert pairs[:6] == [2, 1, 2, 2, 1, 5]


def shorter_verifier_cache(monkeypatch) -> type[EagleDraft]:
    def cut(verifier, cache, pending, proposal, lengths, longest, *rest):
        return verify(verifier, cache, pending, proposal, lengths - 1, longest - 1, *rest)

    monkeypatch.setattr(engine, "verify", cut)
    return EagleDraft


def draft_cache_never_cut(monkeypatch) -> type[EagleDraft]:
    class Uncut(EagleDraft):
        """Entries of rejected proposals stay, and the next pairs are put behind them."""

        def begin(self, rows, length):
            super().begin(rows, 8 * length)
            self.extra = 0

        def extend(self, tokens, aux, positions, last, row=0, limit=0, causal=False):
            super().extend(tokens, aux, positions + self.extra, last, row, limit + self.extra, causal)

        def propose(self, count, lengths, longest, settings=None):
            found = super().propose(count, lengths + self.extra, longest + self.extra, settings)
            self.extra += max(count - 1, 1)
            return found

    return Uncut


def normed_states(monkeypatch) -> type[EagleDraft]:
    def normed(verifier, cache, *rest):
        found = verify(verifier, cache, *rest)
        return replace(found, aux=torch.cat([verifier.norm(part) for part in found.aux.chunk(3, -1)], -1))

    monkeypatch.setattr(engine, "verify", normed)
    return EagleDraft


def draft_positions_off_by_one(monkeypatch) -> type[EagleDraft]:
    class Shifted(EagleDraft):
        def begin(self, rows, length):
            super().begin(rows, length + 1)

        def extend(self, tokens, aux, positions, last, row=0, limit=0, causal=False):
            super().extend(tokens, aux, positions + 1, last, row, limit + 1, False)

    return Shifted


FAULTS = {
    "verifier cache": shorter_verifier_cache,
    "draft cache": draft_cache_never_cut,
    "auxiliary states": normed_states,
    "draft positions": draft_positions_off_by_one,
}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", FAULTS)
def test_b099_a_planted_fault_is_named(planted, monkeypatch, name: str, k: int) -> None:
    verifier, draft = planted
    make = FAULTS[name](monkeypatch)
    run = Run(verifier, make(draft), [Request(list(range(5, 12)), 24, stop_ids=())], Options(k, check=True), AUX)
    with pytest.raises(BrokenInvariant, match=f"^{name}: ") as caught:
        finish(run)
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["draft cache", "auxiliary states", "draft positions"])
def test_b099_such_a_fault_leaves_the_text_as_it_is(planted, monkeypatch, name: str) -> None:
    """Nothing but the invariants shows it."""
    verifier, draft = planted
    request = Request(list(range(5, 12)), 24, stop_ids=())
    plain = finish(Run(verifier, None, [request], Options(0)))[0]
    run = Run(verifier, FAULTS[name](monkeypatch)(draft), [request], Options(3), AUX)
    assert finish(run)[0].token_ids == plain.token_ids


def test_b099_wrong_bookkeeping_is_named_too(planted) -> None:
    verifier, draft = planted
    run = Run(verifier, EagleDraft(draft), [Request(list(range(5, 12)), 24, stop_ids=())], Options(2), AUX)
    updates = iter(run)
    for _ in range(3):
        next(updates)
    with torch.inference_mode():
        check_invariants(run)
        run.rows.tokens[0, 4] += 1
        with pytest.raises(BrokenInvariant, match=r"^bookkeeping: row 0"):
            check_invariants(run)
        run.rows.tokens[0, 4] -= 1
        run.rows.drafted[0] += 1
        with pytest.raises(BrokenInvariant, match=r"^bookkeeping: the draft took in"):
            check_invariants(run)


# --- batch: see test_batch, B118 to B125; here with a real draft


def test_b118_b120_b123_b125_rows_of_a_real_pair_equal_solo_runs(planted) -> None:
    verifier, draft = planted
    made = [Request(list(range(3, 3 + n)), m, stop_ids=()) for n, m in ((3, 30), (5, 2), (9, 17), (1, 30))]
    alone = [finish(Run(verifier, EagleDraft(draft), [r], Options(3), AUX))[0] for r in made]
    together = finish(Run(verifier, EagleDraft(draft), made, Options(3, 3, check=True), AUX))
    assert [(g.token_ids, g.accepted_per_round) for g in together] == [(g.token_ids, g.accepted_per_round) for g in alone]


# --- performance


@pytest.mark.parametrize("batch", [1, 4])
def test_b112_k_0_costs_what_plain_decoding_costs(monkeypatch, batch: int) -> None:
    """No draft call, one verifier row per sequence and pass, and nothing of acceptance but the choice itself."""
    table = ranges_table(1, 12)
    made = [Request([i + 1], 20) for i in range(batch)]
    for name in ("_accept_drawn", "_accept_tree", "expand", "ancestry", "spread"):
        monkeypatch.setattr(f"specbench.decode.verify.{name}", lambda *args: pytest.fail("acceptance at k = 0"))

    class Untouchable:
        width = 0

        def __getattr__(self, name):
            raise AssertionError(name) if name in ("begin", "extend", "propose", "move") else AttributeError(name)

    verifier = TableVerifier(table)
    found = finish(Run(verifier, Untouchable(), made, Options(0, batch)))
    assert [g.token_ids for g in found] == table_outputs(table, made)
    assert verifier.passes == [(batch, 1)] * 20


def test_b112_a_tree_and_adaptive_k_at_k_0_touch_nothing_either(planted) -> None:
    verifier, draft = planted
    found = sb.generate(verifier, draft, [GIVEN[0]], num_speculative_tokens=0, tree=(2, 2, 4), max_new_tokens=8, ignore_eos=True)
    assert found[0].accepted_per_round == found[0].proposed_per_round == found[0].nodes_per_round == [0] * 7


def test_b114_a_draft_on_another_device_is_warned_of_with_both_and_the_size(planted, tiny) -> None:
    verifier, draft = planted
    far = sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu").to("meta")
    with pytest.warns(UserWarning, match="draft lies on meta and the verifier on cpu: every committed token takes 768 bytes"):
        check(verifier, EagleDraft(far), [Request([5])], Options(2), AUX)
    split = sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu")
    split.fc.to("meta")
    with pytest.warns(UserWarning, match="draft lies on cpu, meta and the verifier on cpu"):
        check(verifier, EagleDraft(split), [Request([5])], Options(2), AUX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(verifier, EagleDraft(draft), [Request([5])], Options(2), AUX)
        check(verifier, EagleDraft(far), [Request([5])], Options(0), AUX)


@pytest.mark.parametrize(("mode", "tree"), [("greedy", None), ("probabilistic", None), ("greedy", Tree(2, 2, 4))])
def test_b114_a_run_over_two_devices_is_still_correct(planted, monkeypatch, mode, tree) -> None:
    """ "cpu:0" is another device than "cpu" to whoever asks, and the same to whoever computes."""
    verifier, draft = planted
    made = [Request(p, 10, Sampling(1.0, top_p=0.9, seed=1), ()) for p in GIVEN]
    expected = finish(Run(verifier, EagleDraft(draft, tree), made, Options(2, 2, mode), AUX))
    taken, back = [], Proposal.to
    monkeypatch.setattr(Eagle3, "device", property(lambda self: torch.device("cpu:0")))
    monkeypatch.setattr(Proposal, "to", lambda self, device: taken.append(str(device)) or back(self, device))
    found = finish(Run(verifier, EagleDraft(draft, tree), made, Options(2, 2, mode), AUX))
    assert [(g.token_ids, g.accepted_per_round) for g in found] == [(g.token_ids, g.accepted_per_round) for g in expected]
    assert set(taken) == {"cpu"} and len(taken) >= 9
    moved = back(Proposal(torch.ones(1, 2).long(), 2, *torch.ones(4, 1, 2).long()), torch.device("meta"))
    assert {t.device.type for t in (moved.tokens, moved.parents, moved.depths, moved.drawn_from, moved.targets)} == {"meta"}


@pytest.mark.parametrize("k", [0, 3])
def test_b117_the_parts_of_time_are_the_wall(monkeypatch, k: int) -> None:
    """A clock that is told: each model call 1 ms and 2 ms of the host around it, each round 2 ms of bookkeeping."""
    now = [0.0]

    def takes(seconds, call):
        def timed(*args, **named):
            now[0] += seconds
            return call(*args, **named)

        return timed

    monkeypatch.setattr(StageClock, "_now", lambda self: now[0])
    monkeypatch.setattr(Active, "keep", takes(2e-3, Active.keep))
    monkeypatch.setattr(TableVerifier, "__call__", takes(3e-3, TableVerifier.__call__))
    monkeypatch.setattr(Scripted, "extend", takes(3e-3, Scripted.extend))
    monkeypatch.setattr(Scripted, "propose", takes(3e-3, Scripted.propose))
    table = ranges_table(1, 12)
    made = [Request([1, 2], 13), Request([3, 2], 9)]
    outputs = table_outputs(table, made)
    proposer = Scripted([[1, 2], [3, 2]], outputs, [[0, 1, 2], [3, 0]], 12) if k else None
    found = finish(Run(TableVerifier(table), proposer, made, Options(k)))
    wall = now[0]
    parts = [(t.prefill_s, t.draft_prefill_s, t.draft_s, t.verify_s, t.other_s) for t in (g.timing for g in found)]
    assert sum(map(sum, parts)) == pytest.approx(wall, rel=0.02)
    for generation, (prefill, draft_prefill, draft, verifying, other) in zip(found, parts, strict=True):
        rounds = len(generation.accepted_per_round)
        drafted = sum(p > 0 for p in generation.proposed_per_round)
        assert generation.timing.total_s == pytest.approx(prefill + draft_prefill + draft + verifying + other)
        assert prefill == pytest.approx(3e-3) and draft_prefill == pytest.approx(3e-3 if k else 0)
        assert draft == pytest.approx(6e-3 * drafted) and verifying == pytest.approx(3e-3 * rounds)
        assert other == pytest.approx(2e-3 * (rounds + 1), abs=2.1e-3)
        assert generation.emitted_at_s[0] == pytest.approx(6e-3 if k else 3e-3), "the first token waits for the draft's prompt pass"


def test_b117_a_single_token_has_no_negative_part(planted) -> None:
    verifier, draft = planted
    found = finish(Run(verifier, EagleDraft(draft), [Request(GIVEN[0], 1, stop_ids=())], Options(3), AUX))[0]
    assert found.timing.draft_prefill_s > 0 and found.timing.other_s > -1e-9 and found.timing.decode_s >= found.timing.draft_prefill_s


def test_drafts_that_share_nothing_with_these_pairs_are_still_exact(tmp_path, planted) -> None:
    """Another seed's draft, invariants on."""
    verifier, _ = planted
    other = sb.load_draft(sb.open_pair(verifier.folder, tiny_draft(tmp_path / "d", seed=9)), device="cpu", verifier=verifier)
    made = [Request(p, 20, stop_ids=()) for p in GIVEN]
    plain = finish(Run(verifier, None, made, Options(0, 3)))
    found = finish(Run(verifier, EagleDraft(other), made, Options(5, 3, check=True), AUX))
    assert [g.token_ids for g in found] == [g.token_ids for g in plain]

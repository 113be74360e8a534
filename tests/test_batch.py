"""Ragged batches that come and go equal solo runs, whatever lies in unused slots; every row's state moves; memory is planned."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import planted_pair
from proposers import prompts
from toy import Scripted, TableVerifier

import specbench as sb
from specbench.decode import engine, memory, prefill
from specbench.decode.draft import EagleDraft
from specbench.decode.engine import Run
from specbench.decode.graphs import Graphs
from specbench.decode.memory import check_fits
from specbench.decode.request import Options, Request, Sampling
from specbench.decode.rows import Rows
from specbench.decode.tree import Tree
from specbench.errors import ConfigError

AUX = (2, 4, 5)
MODES = ("plain", "greedy", "sampled", "drawn", "penalties", "penalties drawn", "tree", "tree sampled", "tree penalties")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    pair = sb.open_pair(*planted_pair(tmp_path_factory.mktemp("planted")))
    verifier = sb.load_verifier(pair, device="cpu")
    return verifier, sb.load_draft(pair, device="cpu", verifier=verifier)


def requests_of(mode: str, count: int = 9) -> list[Request]:
    """Prompts of 1 to 19 tokens that end by EOS, by a stop or by length, early, late or with the very first token."""
    temperature = 0.8 if mode in ("sampled", "drawn", "penalties drawn", "tree sampled") else 0.0
    made = []
    for i, prompt in enumerate(prompts(count, seed=5)):
        prompt = prompt[:1] if i in (0, 4) else prompt
        sampling = Sampling(0.0 if i == 3 else temperature, top_p=0.95 if i % 2 else 1.0, top_k=20 if i % 3 == 0 else 0, seed=100 + i)
        if "penalties" in mode and i != 2:
            sampling = replace(sampling, repetition_penalty=1.2, frequency_penalty=0.5 * (i % 3), presence_penalty=-0.3 * (i % 2))
        stops = {1: range(50), 6: range(256)}.get(i, ())
        ends_at = (lambda output, new: next((n for n in range(len(output) - new + 1, len(output) + 1) if n >= 7), None)) if i == 5 else None
        made.append(Request(prompt, (16, 12, 5, 22, 1, 18, 20, 9, 2)[i], sampling, stops, ends_at, 3 if i % 4 == 1 else None))
    return made


def proposer_of(mode: str, draft) -> EagleDraft:
    return EagleDraft(draft, Tree(3, 3, 8) if "tree" in mode else None)


def options_of(mode: str, batch: int = 1) -> Options:
    k = {"plain": 0, "sampled": 2, "drawn": 4}.get(mode, 3)
    return Options(k, batch, "probabilistic" if "drawn" in mode else "greedy")


def poison(run: Run) -> None:
    """1e6, or another token, wherever nothing that counts lies."""
    rows, active = run.rows, run.active
    drafts = run.proposer.cache.layers if isinstance(run.proposer, EagleDraft) else []
    for row in range(run.batch_size):
        n = len(active[row].tokens) if row < len(active) else 0
        drafted = active[row].drafted if row < len(active) else 0
        assert not n or (int(rows.lengths[row]) == n and int(rows.drafted[row]) == drafted)
        for layer in run.cache.layers:
            layer.kv[row, :, max(n - 1, 0) :] = 1e6
        for layer in drafts:
            layer.kv[row, :, drafted:] = 1e6
        rows.tokens[row, n:] = 255
        if rows.states is not None:
            ring = rows.states.shape[1]
            waiting = {i % ring for i in range(drafted, n - 1)} if n else set()
            rows.states[row, [i for i in range(ring) if i not in waiting]] = 1e6
        if not n:
            rows.park(row)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
                getattr(rows.settings, name)[row] = 1e6
            rows.settings.seed[row] = rows.settings.top_k[row] = 10**6
            if rows.settings.counts is not None:
                rows.settings.counts[row], rows.settings.in_prompt[row] = 30_000, True
    if isinstance(run.proposer, EagleDraft):
        run.proposer.hidden.fill_(1e6)


def results(run: Run, poisoned: bool = False):
    """What must not depend on company: everything but times."""
    with torch.inference_mode():
        if poisoned:
            poison(run)
        for _ in run:
            if poisoned:
                poison(run)
    found = run.generations()
    return [
        (g.token_ids, g.accepted_per_round, g.proposed_per_round, g.finish_reason, g.seed, [list(p.top) for p in g.logprobs or []])
        for g in found
    ], [[p.value for p in g.logprobs or []] for g in found]


@pytest.fixture(scope="module")
def solo(planted):
    """What each request gives alone, by mode."""
    verifier, draft = planted
    known = {}

    def of(mode: str):
        if mode not in known:
            runs = [results(Run(verifier, proposer_of(mode, draft), [r], options_of(mode), AUX)) for r in requests_of(mode)]
            known[mode] = [r[0][0] for r in runs], [r[1][0] for r in runs]
        return known[mode]

    return of


def same(found, expected) -> None:
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_requests_end_in_every_way_and_accept_unlike_numbers(solo, mode: str) -> None:
    """The comparison below is worth something."""
    found, _ = solo(mode)
    assert {reason for *_, reason, _, _ in found} == {"eos", "stop", "length"}
    assert {len(ids) for ids, *_ in found} >= {1, 2}
    counts = [a for _, accepted, *_ in found for a in accepted]
    assert set(counts) == {0} if mode == "plain" else {0, 1} <= set(counts)
    assert [bool(top) for *_, top in found] == [i % 4 == 1 for i in range(9)]


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_batches_equal_solo_runs(planted, solo, mode: str, batch: int) -> None:
    """Nine prompts through fewer rows: some leave while others join."""
    verifier, draft = planted
    run = Run(verifier, proposer_of(mode, draft), requests_of(mode), options_of(mode, batch), AUX)
    same(results(run), solo(mode))


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_unlike_length_are_read_in_passes_of_their_own(planted, solo, monkeypatch, mode: str) -> None:
    (verifier, draft), expected = planted, solo(mode)
    monkeypatch.setattr(prefill, "PASS", 8)
    passes, real = [], engine.prefill
    monkeypatch.setattr(engine, "prefill", lambda run, group: passes.append([len(s.tokens) for s in group]) or real(run, group))
    run = Run(verifier, proposer_of(mode, draft), requests_of(mode), options_of(mode, 5), AUX)
    same(results(run), expected)
    times = [generation.timing for generation in run.generations()]
    assert len({t.prefill_s for t in times[:5]}) == 1 and all(t.prefill_s > 0 and t.other_s > -1e-6 for t in times), "all wait for all"
    assert len(passes[0]) < 5 and sum(map(len, passes)) == 9 and all(group == sorted(group) for group in passes)


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 3000), max_size=12), cuda=st.booleans())
def test_what_is_read_in_one_pass_is_alike(lengths: list[int], cuda: bool) -> None:
    joining = [SimpleNamespace(tokens=[0] * n) for n in lengths]
    groups = [[len(s.tokens) for s in group] for group in prefill.alike(joining, torch.device("cuda" if cuda else "cpu"))]
    most = prefill.PASS_CUDA if cuda else prefill.PASS
    assert [n for group in groups for n in group] == sorted(lengths)
    for group in groups:
        assert all((new - old) * i <= most for i, (old, new) in enumerate(zip(group, group[1:], strict=False), 1))
    for before, after in zip(groups, groups[1:], strict=False):
        assert (after[0] - before[-1]) * len(before) > most


@pytest.mark.parametrize("mode", MODES)
def test_b122_poison_in_unused_slots_and_rows_is_seen_by_nobody(planted, solo, mode: str) -> None:
    verifier, draft = planted
    run = Run(verifier, proposer_of(mode, draft), requests_of(mode), options_of(mode, 4), AUX)
    same(results(run, poisoned=True), solo(mode))


def test_b122_one_ends_in_round_2_and_one_joins_in_round_3(planted) -> None:
    """Four rows, five requests; after every round each tensor of the batch has the rows that the host thinks of."""
    verifier, draft = planted
    made = [Request(p, n, stop_ids=()) for p, n in zip(prompts(5, seed=8), (14, 3, 14, 14, 8), strict=True)]
    alone = [results(Run(verifier, EagleDraft(draft), [r], Options(2), AUX))[0][0] for r in made]
    run = Run(verifier, EagleDraft(draft), made, Options(2, 4), AUX)
    seen = []
    with torch.inference_mode():
        for update in run:
            seen.append(len(run.active))
            poison(run)
            for row, sequence in enumerate(run.active):
                assert run.rows.tokens[row, : len(sequence.tokens)].tolist() == sequence.tokens
                assert int(run.rows.settings.seed[row]) == sequence.seed and int(run.rows.limits[row]) == sequence.limit
            assert all(t.shape[0] == 4 for t in run.rows.tensors())
            assert update.request < 5
    assert 3 in seen and seen.index(3) < len(seen) - seen[::-1].index(4), "one left, one joined"
    assert [(g.token_ids, g.accepted_per_round) for g in run.generations()] == [(a[0], a[1]) for a in alone]


def test_shapes_of_recorded_stages_change_nothing(planted, solo, monkeypatch) -> None:
    """Where graphs are recorded, visible lengths are rounded up and blocks are never shortened; here the stages run as they are."""

    class Rounded(Graphs):
        def __init__(self, enabled, state):
            super().__init__(True, state)

        def run(self, key, stage):
            return stage()

    monkeypatch.setattr("specbench.decode.engine.Graphs", Rounded)
    verifier, draft = planted
    for mode in ("plain", "greedy", "drawn", "penalties", "tree"):
        for batch in (1, 4):
            made = requests_of(mode) if batch > 1 else requests_of(mode)[1:4]
            run = Run(verifier, proposer_of(mode, draft), made, options_of(mode, batch), AUX)
            for cache in [run.cache] + ([run.proposer.cache] if run.proposer else []):
                for layer in cache.layers:
                    layer.kv.fill_(3.0)  # visible if anyone looked
            expected = solo(mode)[0] if batch > 1 else solo(mode)[0][1:4]
            found = results(run)[0]
            assert [f[0] for f in found] == [e[0] for e in expected], (mode, batch)
            assert [f[1] for f in found] == [e[1] for e in expected], (mode, batch)


# --- rows


def test_every_tensor_with_a_row_a_sequence_moves() -> None:
    """Found by looking at the fields, so that one that is added and forgotten shows."""
    rows = Rows.empty(3, 10, 4, 3, 7, True, torch.float32, torch.device("cpu"))
    own = [getattr(rows, f.name) for f in fields(rows) if f.name != "settings"]
    tensors = own + [getattr(rows.settings, f.name) for f in fields(rows.settings)]
    assert all(t is not None and t.shape[0] == 3 for t in tensors)
    for tensor in tensors:
        for row in range(3):
            tensor[row] = bool(row) if tensor.dtype == torch.bool else row
    rows.move(2, 0)
    for tensor in tensors:
        assert torch.equal(tensor[0], tensor[2]) and tensor[0].flatten()[0] == (True if tensor.dtype == torch.bool else 2)
        assert tensor[1].flatten()[0] == 1
    assert {id(t) for t in rows.tensors()} == {id(t) for t in tensors}


def test_everything_that_a_draft_keeps_per_row_moves(planted) -> None:
    _, draft = planted
    proposer = EagleDraft(draft)
    proposer.begin(3, 12)
    kept = {name: value for name, value in vars(proposer).items() if isinstance(value, torch.Tensor) and value.shape[0] == 3}
    assert kept.keys() == {"hidden"}, "and whatever else has a row a sequence"
    for tensor in [*kept.values(), *(layer.kv for layer in proposer.cache.layers)]:
        tensor[:] = torch.arange(3).view(3, *[1] * (tensor.dim() - 1))
    proposer.move(2, 0, 8)
    assert all(t[0].eq(2).all() and t[1].eq(1).all() for t in kept.values())
    for layer in proposer.cache.layers:
        assert layer.kv[0, :, :8].eq(2).all() and layer.kv[0, :, 8:].eq(0).all() and layer.kv[1].eq(1).all()


def test_a_parked_row_stays_where_it_is() -> None:
    rows = Rows.empty(2, 10, 4, 3, 7, False, torch.float32, torch.device("cpu"))
    rows.park(1)
    for _ in range(5):
        rows.commit(2, torch.zeros(2, 3, dtype=torch.int64), torch.full((2,), 2))
        assert int(rows.lengths[1]) == 2 and int(rows.allowed(2, 3)[1]) == 0
        tokens, _, positions, last = rows.waiting(2, 3)
        assert positions[1].tolist() == [0, 1, 2] and int(last[1]) == 0


# --- reported failures, on a table whose tokens say whose they are


def ranges_table(count: int, each: int, seed: int = 0) -> torch.Tensor:
    """Tokens i * each .. i * each + each - 1 are only followed by their own kind."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, count * each, count * each, generator=g)
    kind = torch.arange(count * each) // each
    return scores.masked_fill(kind[:, None] != kind, -100.0)


def table_outputs(table: torch.Tensor, made: list[Request]) -> list[list[int]]:
    found = []
    for request in made:
        tokens = list(request.prompt_ids)
        for _ in range(request.max_new_tokens):
            tokens.append(int(table[(len(tokens) - 1) % len(table), tokens[-1]].argmax()))
        found.append(tokens[len(request.prompt_ids) :])
    return found


def scripted_run(made: list[Request], scripts: list[list[int]], k: int, batch: int, table: torch.Tensor, width: int = 2):
    outputs = table_outputs(table, made)
    proposer = Scripted([list(r.prompt_ids) for r in made], outputs, scripts, table.shape[1], width)
    return Run(TableVerifier(table), proposer, made, Options(k, batch), (1,)), outputs


def test_b118_unlike_draft_lengths_leak_no_token() -> None:
    """Rooms of 3, 0 and 2 in one round; the requests come in the reverse order of their tokens."""
    table = ranges_table(3, 10)
    made = [Request([25, 21], 5), Request([14], 2), Request([3, 7, 1], 4)]
    run, outputs = scripted_run(made, [[9], [9], [9]], 3, 3, table)
    for _ in run:
        pass
    found = run.generations()
    assert [g.proposed_per_round for g in found] == [[3], [0], [2]] == [g.accepted_per_round for g in found]
    for generation, expected, kind in zip(found, outputs, (2, 1, 0), strict=True):
        assert generation.token_ids == expected and all(t // 10 == kind for t in generation.token_ids)


@pytest.mark.parametrize("real", [False, True], ids=["table", "transformer"])
def test_b120_rows_that_accept_unlike_numbers_equal_solo_runs(planted, real: bool) -> None:
    lengths, scripts = (3, 5, 9), [[0, 3, 0, 2, 1], [1, 0, 0, 3, 0], [3, 0, 2, 0, 0]]
    g = torch.Generator().manual_seed(4)
    made = [Request(torch.randint(3, 30, (n,), generator=g).tolist(), 30, stop_ids=()) for n in lengths]
    if not real:
        run, outputs = scripted_run(made, scripts, 3, 3, ranges_table(1, 30))
    else:
        verifier = planted[0]
        outputs = [results(Run(verifier, None, [r], Options(0)))[0][0][0] for r in made]
        run = Run(verifier, Scripted([list(r.prompt_ids) for r in made], outputs, scripts, 256), made, Options(3, 3))
    for _ in run:
        pass
    for generation, expected, script in zip(run.generations(), outputs, scripts, strict=True):
        assert generation.token_ids == expected and len(expected) == 30
        assert generation.accepted_per_round[:5] == script


@pytest.mark.parametrize("scripts", [[[0, 0], [2, 0]], [[0, 0], [0, 0]], [[0, 0, 0]]], ids=["0 and 2", "0 and 0", "alone"])
def test_b123_accepting_nothing_makes_no_negative_index(scripts: list[list[int]]) -> None:
    """Indices are checked by the proposer, and by a cache that refuses any that lie outside."""
    made = [Request([5 + i], 9) for i in range(len(scripts))]
    run, outputs = scripted_run(made, scripts, 2, len(made), ranges_table(1, 12))
    for _ in run:
        assert int(run.rows.lengths.min()) > 0 and int(run.rows.drafted.min()) >= 0
    assert [g.token_ids for g in run.generations()] == outputs
    assert [g.accepted_per_round[:2] for g in run.generations()] == [s[:2] for s in scripts]


def test_b125_rejected_tokens_leave_the_sequence() -> None:
    """Length 8 and k = 5: after the round 9 where all were rejected, 14 where none was."""
    made = [Request([1, 2, 3, 4, 5, 6, 7], 20), Request([7, 6, 5, 4, 3, 2, 1], 20)]
    run, outputs = scripted_run(made, [[0], [5]], 5, 2, ranges_table(1, 12))
    updates = iter(run)
    for _ in range(2):
        next(updates)
    assert run.rows.lengths.tolist() == [8, 8]
    for _ in range(2):
        next(updates)
    assert run.rows.lengths.tolist() == [9, 14] == [len(s.tokens) for s in run.active]
    for row, (request, output, n) in enumerate(zip(made, outputs, (9, 14), strict=True)):
        committed = (list(request.prompt_ids) + output)[:n]
        assert run.rows.tokens[row, :n].tolist() == committed == run.active[row].tokens


def test_long_waits_of_unlike_length_stay_in_their_tensors(planted) -> None:
    """Rounds at k = 0 let pairs wait for the draft; a row near its end beside one that waited long reads nothing beyond its room."""
    verifier, draft = planted

    class Choice:
        def __init__(self, ks):
            self.ks, self.at = ks, -1

        def choose(self, batch):
            self.at += 1
            return self.ks[self.at] if self.at < len(self.ks) else 2

        def observe(self, *seen):
            pass

    made = [
        Request([9, 8, 7], 75, stop_ids=()), Request([5] * 3, 30, stop_ids=()), Request(list(range(3, 73)), 4, stop_ids=()),
        Request(list(range(9, 70)), 15, stop_ids=()),
    ]  # fmt: skip
    alone = [results(Run(verifier, None, [r], Options(0)))[0][0][0] for r in made]
    for zeros in (27, 30, 40, 61, 62, 63, 64, 70):
        for ks in ([0] * zeros, [0] * zeros + [1, 0] * 4, [2] * 3 + [0] * zeros):
            run = Run(verifier, EagleDraft(draft), made, Options(2, 2, adaptive=True), AUX)
            run.adaptive = Choice(ks)
            assert [r[0] for r in results(run, poisoned=True)[0]] == alone, (zeros, ks)


# --- memory


@pytest.mark.parametrize("mode", ["plain", "drawn", "penalties", "tree"])
def test_planned_bytes_are_what_is_allocated(planted, mode: str) -> None:
    verifier, draft = planted
    run = Run(verifier, proposer_of(mode, draft), requests_of(mode), options_of(mode, 4), AUX)
    taken = run.cache.nbytes() + sum(t.nbytes for t in run.rows.tensors())
    if run.proposer is not None:
        taken += run.proposer.cache.nbytes() + run.proposer.hidden.nbytes
    assert taken <= run.nbytes * 1.01 and run.nbytes <= 1.01 * taken


def test_a_batch_that_does_not_fit_is_refused_with_figures(planted, monkeypatch) -> None:
    verifier, draft = planted
    one = check_fits(verifier, draft, 192, 1, 100, False)
    assert check_fits(verifier, draft, 192, 8, 100, False, free=9 * one) == 8 * one
    with pytest.raises(ConfigError, match=r"batch_size 8 with 100 tokens a sequence needs .* MiB .*verifier cache .*batch_size 6 fits"):
        check_fits(verifier, draft, 192, 8, 100, False, free=7 * one)
    with pytest.raises(ConfigError, match="shorten prompts or max_new_tokens: not even one"):
        check_fits(verifier, draft, 192, 1, 100, False, free=one)
    assert check_fits(verifier, None, 0, 1, 100, True) > check_fits(verifier, None, 0, 1, 100, False)


def test_a_run_asks_before_it_allocates(planted, monkeypatch) -> None:
    verifier, draft = planted
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**20)
    monkeypatch.setattr(verifier, "new_cache", lambda *args: pytest.fail("allocated"), raising=False)
    with pytest.raises(ConfigError, match=r"1 MiB are free on cpu.*fits"):
        Run(verifier, EagleDraft(draft), requests_of("greedy"), options_of("greedy", 9), AUX)


def test_free_memory_is_known_here() -> None:
    free = memory.free_bytes(torch.device("cpu"))
    assert free is None or free > 2**24

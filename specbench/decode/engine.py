"""The decode loop: draft -> verify -> accept -> commit, over a batch of sequences that come and go.

What enters: a verifier, a draft or none, requests of token ids. What leaves: an update per sequence and round, and generations with the
accepted count of every round and where the time went. It does not know text, files or quantization.

Bookkeeping, once: with `committed` tokens (prompt and output, the last one pending), the verifier's cache holds committed - 1 entries that
matter, and the draft has taken in at most as many pairs (token i + 1, state i); it catches up before it proposes. The verifier reads the
pending token and the proposals at positions committed - 1 ... Rejected rows stay in their slots, seen by nobody, until they are written
over. Active sequences are the first rows of every tensor: one that ends is replaced by the last, and new prompts join behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .adaptive import adaptive_k
from .checks import check
from .clock import StageClock
from .draft import EagleDraft, Proposal, Proposer
from .graphs import Graphs
from .greedy import screen
from .invariants import check_invariants
from .memory import check_fits
from .prefill import alike, prefill
from .request import FinishReason, Generation, Logprob, Options, Request, Timing, Update
from .rows import Rows, ring_of
from .sequence import Active, log_probabilities, unpack_logprobs
from .tree import Tree
from .verify import accept, verify

PROMPT_AREA = 8192  # tokens, padding counted, that a prompt pass over several sequences reads at most


class Run:
    """Requests on their way through a verifier and a draft. Iterating decodes, a round at a time, and yields what each sequence gained;
    stopping early leaves a usable `generations()`.

    Args:
        verifier: `models.decoder.Decoder`, or anything with its methods (`models.hf`).
        proposer: a draft; may be None where k is 0.
        aux_layers: ascending ids of the verifier states that the proposer reads (see `Decoder.forward`).

    Raises:
        ConfigError: an empty prompt, ids outside the vocabulary, no room in the context, settings that contradict, or too little memory.
    """

    def __init__(
        self, verifier: Any, proposer: Proposer | None, requests: Sequence[Request], options: Options, aux_layers: tuple[int, ...] = ()
    ) -> None:
        check(verifier, proposer, requests, options, aux_layers)
        self.verifier, self.options, self.requests = verifier, options, list(requests)
        self.proposer = proposer if options.num_speculative_tokens else None
        self.tree: Tree | None = getattr(self.proposer, "tree", None)
        self.k = self.tree.depth if self.tree else options.num_speculative_tokens if self.proposer else 0
        self.block = 1 + (self.tree.nodes if self.tree else self.k)  # tokens that a round scores per sequence
        self.aux_layers = aux_layers if self.proposer else ()
        self.sampled = any(r.sampling.temperature > 0 for r in requests)
        self.drawn = self.sampled and options.draft_sampling == "probabilistic"
        self.logprobs = max((r.logprobs for r in requests if r.logprobs is not None), default=None)
        self.adaptive = adaptive_k(verifier, self.proposer, self.k) if options.adaptive and self.proposer else None
        self.waiting = list(range(len(requests)))
        self.active: list[Active] = []
        self.finished: dict[int, Generation] = {}
        self._allocate()
        self.clock = StageClock(verifier.device)

    def _allocate(self) -> None:
        longest = max(self._limit(request) for request in self.requests)
        length, rows = longest + self.block, min(self.options.batch_size, len(self.requests))
        width = self.proposer.width if self.proposer else 0
        penalised = any(r.sampling.penalised for r in self.requests)
        draft = self.proposer.draft if isinstance(self.proposer, EagleDraft) else None
        slots = self.tree.slots if self.tree else 0
        self.nbytes = check_fits(self.verifier, draft, width, rows, length, penalised, ring=ring_of(self.block), draft_slots=slots)
        self.length, self.batch_size = length, rows
        plain = not (self.sampled or penalised or self.logprobs is not None)
        self.best_of = screen(self.verifier, self.nbytes) if plain else None
        self.cache = self.verifier.new_cache(length, rows)
        if self.proposer:
            self.proposer.begin(rows, length)
        vocab = self.verifier.config.vocab_size
        self.rows = Rows.empty(rows, length, width, self.block, vocab, penalised, self.verifier.dtype, self.verifier.device)
        wanted = getattr(self.verifier, "captures", True) if self.options.graphs is None else self.options.graphs
        wanted = wanted and not getattr(self.proposer, "p_min", 0)  # its chains end by what the host reads
        together = draft is None or draft.device == self.verifier.device
        self.graphs = Graphs(wanted and together and self.verifier.device.type == "cuda", self.rows.tensors)

    def __iter__(self) -> Iterator[Update]:
        return self._rounds()

    @torch.inference_mode()
    def _rounds(self) -> Iterator[Update]:
        while self.waiting or self.active:
            if self.waiting and len(self.active) < self.batch_size:
                yield from self.clock.leave(self._admit())
            if self.active:
                if self.options.check:
                    check_invariants(self)
                self.clock.restart()
                k = self._choose_k()
                proposal = self._draft(k) if k else None
                if proposal is not None and not self.tree:
                    k = proposal.tokens.shape[1]  # a draft in doubt proposes fewer
                if not k:
                    self._make_room()
                self.clock.mark("draft")
                committed, counts, logprobs = self._verify(proposal)
                yield from self.clock.leave(self._commit(committed, counts, k, logprobs))

    # --- the round

    def _choose_k(self) -> int:
        room = max(s.limit - len(s.tokens) - 1 for s in self.active)
        if self.proposer is None or room <= 0:
            return 0
        if self.adaptive:
            k = self.adaptive.choose(len(self.active))
            return k if self.tree else min(k, room)
        return self.k if self.tree or self.graphs.enabled else min(self.k, room)

    def _draft(self, k: int) -> Proposal:
        batch, proposer = self._batch(), self.proposer
        assert proposer is not None
        self._catch_up()
        longest = self._longest()
        settings = self.rows.settings.first(batch) if self.drawn else None
        lengths = self.rows.lengths[:batch]
        return self.graphs.run(("propose", batch, k, longest), lambda: proposer.propose(k, lengths, longest, settings))

    def _make_room(self) -> None:
        """In a round without proposals the draft looks only if more states would not find room to wait for it."""
        if self.proposer and self.rows.states is not None:
            most = self.rows.states.shape[1] - self.k - 1
            if max(len(s.tokens) - 1 - s.drafted for s in self.active) > most:
                self._catch_up()

    def _catch_up(self) -> None:
        """Let the draft take in all that was committed since it last looked."""
        batch, proposer, rows = self._batch(), self.proposer, self.rows
        assert proposer is not None
        width = max(len(s.tokens) - 1 - s.drafted for s in self.active)
        limit = min(max(s.drafted for s in self.active) + width, self.length)
        if self.graphs.enabled:
            width, limit = max(width, self.k + 1), self.graphs.longest(limit + self.k + 1, self.length)

        def extend() -> None:
            tokens, states, positions, last = rows.waiting(batch, width)
            proposer.extend(tokens, states, positions, last, 0, limit, False)
            rows.drafted[:batch] = rows.lengths[:batch] - 1

        self.graphs.run(("extend", batch, width, limit), extend)
        for sequence in self.active:
            sequence.drafted = len(sequence.tokens) - 1

    def _batch(self) -> int:
        """Rows of a round: the active ones, and parked ones where stages are recorded."""
        return self.graphs.batch(len(self.active), self.batch_size)

    def _longest(self) -> int:
        return self.graphs.longest(max(len(s.tokens) for s in self.active), self.length - self.block + 1)

    def _verify(self, proposal: Proposal | None) -> tuple[list[list[int]], list[int], list[list[Logprob]]]:
        """Score, accept and commit on the device; the host learns tokens and counts from one small copy."""
        batch, longest, rows = self._batch(), self._longest(), self.rows
        lengths, settings = rows.lengths[:batch], rows.settings.first(batch)

        def stage() -> tuple[Tensor, tuple[Tensor, ...] | None]:
            scored = verify(self.verifier, self.cache, rows.pending(batch), proposal, lengths, longest, self.aux_layers, self.best_of)
            found = accept(scored, proposal, settings, lengths, rows.allowed(batch, self.k), self.sampled)
            scores, aux = scored.scores, scored.aux
            if found.path is not None:
                rows_of = torch.arange(batch, device=found.path.device)[:, None]
                offset = torch.arange(found.path.shape[1], device=found.path.device)
                self.cache.gather(lengths[:, None] - 1 + found.path, lengths[:, None] - 1 + offset.expand_as(found.path))
                aux = None if aux is None else aux[rows_of, found.path]
                scores = scores[rows_of, found.path] if self.logprobs is not None else scores
            rows.keep(batch, aux)
            rows.commit(batch, found.tokens, found.count)
            top = None if self.logprobs is None else log_probabilities(scores, found.tokens, self.logprobs)
            return torch.cat((found.count[:, None], found.tokens), 1), top

        key = "verify", batch, longest, None if proposal is None else proposal.tokens.shape[1]
        packed, top = self.graphs.run(key, stage)
        self.clock.mark("verify")
        table = packed[: len(self.active)].tolist()
        return [row[1:] for row in table], [row[0] for row in table], unpack_logprobs(top, [s.request.logprobs for s in self.active])

    def _commit(self, committed: list[list[int]], counts: list[int], k: int, logprobs: list[list[Logprob]]) -> list[Update]:
        """Take the round's tokens over to the host, and let finished sequences leave."""
        times, now = self.clock.settle(), self.clock.elapsed()
        updates, proposed = [], []
        for place, sequence in enumerate(self.active):
            possible = max(min(k, sequence.limit - len(sequence.tokens) - 1), 0)
            new, reason = sequence.keep(committed[place][: counts[place] + 1])
            cut = len(new) < counts[place] + 1
            accepted = min(counts[place], len(new))
            sequence.accepted.append(accepted)
            sequence.proposed.append(accepted if cut else possible)
            sequence.nodes.append((self.tree.nodes if self.tree else k) if k else 0)
            sequence.emitted_at.append(now - sequence.admitted)
            sequence.logprobs += logprobs[place][: len(new)]
            sequence.timing.draft_s += times["draft"]
            sequence.timing.verify_s += times["verify"]
            proposed.append(possible)
            updates.append(Update(sequence.index, new, accepted, sequence.proposed[-1], reason))
        ended = self.clock.elapsed()
        for sequence in self.active:
            sequence.timing.decode_s = ended - sequence.admitted - sequence.timing.prefill_s
        if self.adaptive:
            self.adaptive.observe(k, len(self.active), times["draft"], times["verify"], counts, proposed)
        self._release(updates)
        return updates

    def _release(self, updates: Iterable[Update]) -> None:
        done = {u.request: u.finish_reason for u in updates if u.finish_reason is not None}
        for row in reversed(range(len(self.active))):
            sequence = self.active[row]
            if sequence.index not in done:
                continue
            self.finished[sequence.index] = sequence.generation(done[sequence.index])
            last = len(self.active) - 1
            if row != last:
                self.rows.move(last, row)
                self.cache.move(last, row, len(self.active[last].tokens))
                if self.proposer:
                    self.proposer.move(last, row, len(self.active[last].tokens))
                self.active[row] = self.active[last]
            self.active.pop()
            if self.graphs.enabled:
                self.rows.park(last)

    # --- joining

    def _admit(self) -> list[Update]:
        """Read the next prompts that fit into free rows, those of like length in one pass."""
        started = self.clock.elapsed()
        joining: list[Active] = []
        while self.waiting and len(self.active) + len(joining) < self.batch_size:
            longest = max(len(self.requests[self.waiting[0]].prompt_ids), *(len(s.tokens) for s in joining), 0)
            if joining and longest * (len(joining) + 1) > PROMPT_AREA:
                break
            joining.append(self._sequence(self.waiting.pop(0), started))
        groups, updates = alike(joining, self.verifier.device), []
        for group in groups:
            first = prefill(self, group)
            now = self.clock.elapsed()
            self.active += group
            for place, sequence in enumerate(group):
                new, reason = sequence.keep([first[0][place]])
                sequence.logprobs += first[1][place]
                updates.append(Update(sequence.index, new, 0, 0, reason))
        passes = [(group[0].timing.prefill_s, group[0].timing.draft_prefill_s) for group in groups]
        for sequence in joining:  # all wait for all
            sequence.timing.prefill_s, sequence.timing.draft_prefill_s = (sum(part) for part in zip(*passes, strict=True))
            sequence.emitted_at.append(now - started)
            sequence.timing.decode_s = self.clock.elapsed() - started - sequence.timing.prefill_s
        self._release(updates)
        return updates

    def _limit(self, request: Request) -> int:
        """Tokens that a sequence may come to, the prompt's counted."""
        return min(len(request.prompt_ids) + request.max_new_tokens, self.verifier.config.max_position_embeddings)

    def _sequence(self, index: int, now: float) -> Active:
        request = self.requests[index]
        limit = self._limit(request)
        cut: FinishReason = "length" if limit == len(request.prompt_ids) + request.max_new_tokens else "context"
        stops = self.verifier.eos_ids if request.stop_ids is None else frozenset(request.stop_ids)
        seed = request.sampling.seed if request.sampling.seed is not None else int(torch.randint(2**62, ()))
        return Active(index, request, list(request.prompt_ids), limit, cut, stops, seed, now)

    # --- results

    def generations(self) -> list[Generation]:
        """One per request, in order: finished ones, and what there is of the others, marked "cancelled"."""
        found = dict(self.finished)
        for sequence in self.active:
            found[sequence.index] = sequence.generation("cancelled")
        for index in self.waiting:
            found[index] = Generation(list(self.requests[index].prompt_ids), [], [], [], "cancelled", Timing())
        return [found[i] for i in range(len(self.requests))]


def decode(
    verifier: Any,
    proposer: Proposer | None,
    prompt_ids: Sequence[int],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    aux_layers: tuple[int, ...] = (),
    eos_ids: Iterable[int] | None = None,
) -> Generation:
    """Greedy decoding of one prompt; the output is the verifier's own greedy output whatever the draft proposes.

    Args:
        num_speculative_tokens: k, proposals a round; 0 runs the verifier alone and never touches the draft.
        eos_ids: stop after one of these; None takes the verifier's.

    Raises:
        ConfigError: see `Run`.
    """
    request = Request(list(prompt_ids), max_new_tokens, stop_ids=eos_ids)
    run = Run(verifier, proposer, [request], Options(num_speculative_tokens), aux_layers)
    for _ in run:
        pass
    return run.generations()[0]

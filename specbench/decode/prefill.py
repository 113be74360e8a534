"""The prompt pass: several prompts through verifier and draft at once, and the first token of each.

What enters: a run and the sequences that join it. What leaves: their first tokens, and rows and caches as the rounds expect them. Prompts
are padded on the right: the padding lies where output will be written, beyond every query's sight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .request import Logprob
from .sampling import choose, penalise
from .sequence import Active, log_probabilities, unpack_logprobs

if TYPE_CHECKING:
    from .engine import Run

# Tokens whose arithmetic takes as long as what a pass costs whatever its size: on a CPU expanding 4-bit weights (70 tokens with AVX2, 200
# with AVX512), on CUDA launches.
PASS, PASS_CUDA = 128, 2048


def alike(joining: list[Active], device: torch.device) -> list[list[Active]]:
    """Sequences in groups whose prompts are read in one pass, by length: one that would pad those before it by more than a pass costs
    begins the next group."""
    most = PASS_CUDA if device.type == "cuda" else PASS
    groups: list[list[Active]] = []
    for sequence in sorted(joining, key=lambda s: len(s.tokens)):
        if not groups or (len(sequence.tokens) - len(groups[-1][-1].tokens)) * len(groups[-1]) > most:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def prefill(run: Run, joining: list[Active]) -> tuple[list[int], list[list[Logprob]]]:
    """The prompt pass of verifier and draft; the first token of each. The draft leaves the last pair for its first round."""
    device, row, rows = run.verifier.device, len(run.active), run.rows
    batch, longest = len(joining), max(len(s.tokens) for s in joining)
    end = row + batch
    tokens = torch.zeros(batch, longest, dtype=torch.int64)
    for place, sequence in enumerate(joining):
        tokens[place, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        rows.settings.set(row + place, sequence.request.sampling, sequence.seed, torch.tensor(sequence.tokens, device=device))
    lengths = torch.tensor([len(s.tokens) for s in joining], device=device)
    tokens = tokens.to(device)
    rows.tokens[row:end, :longest] = tokens
    rows.lengths[row:end] = lengths
    rows.limits[row:end] = torch.tensor([s.limit for s in joining], device=device)
    rows.drafted[row:end] = lengths - 1
    run.clock.restart()
    positions = torch.arange(longest, device=device).expand(batch, -1)
    hidden, aux = run.verifier(tokens, run.verifier.step(positions, longest, row=row, causal=True), run.cache, run.aux_layers)
    last = (lengths - 1)[:, None, None]
    settings = rows.settings.first(batch, row)
    hidden, top = hidden.gather(1, last.expand(-1, 1, hidden.shape[2])), None
    if run.best_of is not None:
        first = run.best_of(hidden)
    else:
        scores = run.verifier.lm_head(hidden)
        first = choose(penalise(scores, settings), settings, lengths[:, None], run.sampled)
        top = None if run.logprobs is None else log_probabilities(scores, first, run.logprobs)
    found = first[:, 0].tolist()
    run.clock.mark("prefill")
    if run.proposer is not None:
        if longest > 1:
            pairs = None if aux is None else aux[:, :-1]
            run.proposer.extend(tokens[:, 1:], pairs, positions[:, :-1], (lengths - 2).clamp(min=0), row, longest - 1, True)
        rows.keep(batch, None if aux is None else aux.gather(1, last.expand(-1, 1, aux.shape[2])), row)
        run.clock.mark("draft_prefill")
    if run.clock.cuda:
        torch.cuda.synchronize()
    times = run.clock.settle()
    # the first token: beyond the prompt, not yet a round
    rows.commit(batch, first, torch.zeros_like(lengths), row)
    for sequence in joining:
        sequence.drafted = len(sequence.tokens) - 1
        sequence.timing.prefill_s = times["prefill"]
        sequence.timing.draft_prefill_s = times.get("draft_prefill", 0.0)
    return found, unpack_logprobs(top, [s.request.logprobs for s in joining])

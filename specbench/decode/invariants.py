"""What must hold before every round, checked by reading the whole text again: slow, for tests and for hunting a loop that went wrong.

What enters: a run between two rounds. What leaves: nothing, or a `BrokenInvariant` that names what does not hold. It does not know how the
loop came to that state: everything is computed afresh from the committed tokens.

With n committed tokens, the last one pending: the verifier's cache holds their first n - 1 entries; the draft's cache holds the pairs
(token i + 1, state i) that it has taken in, pair i at position i, with the verifier's own states; the states of the others wait. Such a
fault leaves the text plausible and only lowers acceptance, or it changes the text much later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SpecbenchError
from .draft import EagleDraft

if TYPE_CHECKING:
    from ..models.cache import Cache
    from .engine import Run
    from .sequence import Active

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}  # of the largest value: other block sizes round otherwise


class BrokenInvariant(SpecbenchError, RuntimeError):
    """The decode loop is not where its tokens say. name: which invariant: "bookkeeping", "verifier cache", "auxiliary states",
    "draft positions" or "draft cache"."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@torch.inference_mode()
def check_invariants(run: Run) -> None:
    """Look at every active sequence of a native verifier.

    Raises:
        BrokenInvariant: the first one that does not hold.
    """
    for row, sequence in enumerate(run.active):
        _bookkeeping(run, row, sequence)
        tokens = torch.tensor([sequence.tokens], device=run.verifier.device)
        known = tokens.shape[1] - 1  # entries that count
        positions = torch.arange(known, device=tokens.device)[None]
        fresh = run.verifier.new_cache(known)
        _, aux = run.verifier(tokens[:, :-1], run.verifier.step(positions, known, causal=True), fresh, run.aux_layers)
        place = _first_difference(run.cache, row, fresh, known, run.verifier.dtype)
        if place is not None:
            raise BrokenInvariant("verifier cache", f"slot {place} of row {row} is not that of the {known} committed entries")
        if aux is not None:
            _states(run, row, sequence, aux)
        if isinstance(run.proposer, EagleDraft) and aux is not None:
            _draft(run.proposer, row, sequence.drafted, tokens, aux)


def _bookkeeping(run: Run, row: int, sequence: Active) -> None:
    n, rows = len(sequence.tokens), run.rows
    length, drafted = int(rows.lengths[row]), int(rows.drafted[row])
    if length != n or rows.tokens[row, :n].tolist() != sequence.tokens:
        raise BrokenInvariant("bookkeeping", f"row {row} has {length} tokens on the device, {n} on the host, or other ones")
    if run.proposer is not None and (drafted != sequence.drafted or not 0 <= drafted < n):
        raise BrokenInvariant("bookkeeping", f"the draft took in {drafted} pairs of row {row}; the host says {sequence.drafted} of {n - 1}")


def _states(run: Run, row: int, sequence: Active, aux: Tensor) -> None:
    """The states that wait for the draft are the residual stream at their positions."""
    states = run.rows.states
    assert states is not None
    for position in range(sequence.drafted, len(sequence.tokens) - 1):
        ours, theirs = states[row, position % states.shape[1]].float(), aux[0, position].float()
        if _differ(ours[None], theirs[None], run.verifier.dtype)[0]:
            raise BrokenInvariant("auxiliary states", f"what waits for position {position} of row {row} is not the verifier's state there")


def _draft(proposer: EagleDraft, row: int, drafted: int, tokens: Tensor, aux: Tensor) -> None:
    draft = proposer.draft
    if not drafted:
        return
    tokens, aux = tokens[:, 1 : drafted + 1].to(draft.device), aux[:, :drafted].to(draft.device)

    def read(shift: int) -> Cache:
        fresh = draft.new_cache(drafted + abs(shift))
        positions = torch.arange(drafted, device=tokens.device)[None] + shift
        draft(tokens, draft.fuse(aux), draft.step(positions, drafted + abs(shift)), fresh)
        return fresh

    place = _first_difference(proposer.cache, row, read(0), drafted, draft.dtype)
    if place is None:
        return
    shifted = read(1)
    if _first_difference(proposer.cache, row, shifted, drafted + 1, draft.dtype, start=1) is None:
        raise BrokenInvariant("draft positions", f"pair i of row {row} lies at position i + 1, not i")
    raise BrokenInvariant("draft cache", f"slot {place} of row {row} is not that of the {drafted} pairs that were taken in")


def _first_difference(ours: Cache, row: int, fresh: Cache, count: int, dtype: torch.dtype, start: int = 0) -> int | None:
    """The first of slots start .. count - 1 that differs in any layer; fresh holds one row."""
    for mine, theirs in zip(ours.layers, fresh.layers, strict=True):
        left, right = (kv[i, :, start:count].transpose(0, 1).flatten(1).float() for kv, i in ((mine.kv, row), (theirs.kv, 0)))
        differ = _differ(left, right, dtype)
        if differ.any():
            return start + int(differ.int().argmax())
    return None


def _differ(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """Which rows [n, width] differ by more than rounding, bool [n]."""
    return ~((ours - theirs).abs().amax(1) <= TOLERANCE[dtype] * theirs.abs().amax().clamp_min(1e-6))

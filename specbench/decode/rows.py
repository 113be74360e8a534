"""The sequences of a batch as tensors: one row each, the active ones in front.

What enters: requests that were admitted, tokens that were committed. What leaves: views for one round. It does not know models, drafts or
acceptance. Committed tokens live here and on the host; rejected ones are never written anywhere that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import Settings

RING = 64  # states that wait for the draft at most, but in wide blocks; see `Rows.states`


def ring_of(block: int) -> int:
    """Room for states where a round may commit `block` tokens."""
    return max(RING, 2 * block)


def shorter(lengths: Tensor, longest: int) -> bool:
    """Whether any of lengths [b] may be below `longest`. A CPU is asked; another device is not, which would stop it."""
    return lengths.shape[0] > 1 or lengths.device.type != "cpu" or int(lengths[0]) < longest


@dataclass(slots=True)
class Rows:
    """tokens: int64 [R, S], prompt and output. lengths: int64 [R], committed tokens, the last one pending. limits: int64 [R], tokens that a
    row may come to. drafted: int64 [R], pairs (token i + 1, state i) that the draft has taken in, from i = 0. states: [R, ring, width], the
    verifier's auxiliary states of committed positions that wait for the draft, position i at i % ring; None without a draft."""

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    drafted: Tensor
    states: Tensor | None
    settings: Settings

    @classmethod
    def empty(
        cls, rows: int, length: int, width: int, block: int, vocab: int, penalised: bool, dtype: torch.dtype, device: torch.device
    ) -> Rows:
        """Room for `rows` sequences of `length` tokens; block: tokens that a round may commit."""
        lengths, limits = (torch.full((rows,), 2, dtype=torch.int64, device=device) for _ in range(2))
        drafted = torch.zeros(rows, dtype=torch.int64, device=device)
        states = torch.zeros(rows, ring_of(block), width, dtype=dtype, device=device) if width else None
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        return cls(tokens, lengths, limits, drafted, states, Settings.empty(rows, vocab, penalised, device))

    def tensors(self) -> list[Tensor]:
        """Every tensor with a row a sequence: what moves when one leaves, and what a round writes."""
        own = [self.tokens, self.lengths, self.limits, self.drafted, *self.settings.tensors()]
        return own if self.states is None else [*own, self.states]

    def move(self, source: int, target: int) -> None:
        """Row `source` over row `target`."""
        for tensor in self.tensors():
            tensor[target] = tensor[source]

    def park(self, row: int) -> None:
        """Leave `row` such that rounds over it, inside a larger captured batch, stay where they are."""
        self.lengths[row] = self.limits[row] = 2
        self.drafted[row] = 0

    def pending(self, batch: int) -> Tensor:
        """The last committed token of the first `batch` rows, int64 [batch, 1]."""
        return self.tokens[:batch].gather(1, self.lengths[:batch, None] - 1)

    def allowed(self, batch: int, block: int) -> Tensor:
        """How many proposals each row may still accept, int64 [batch]: one place is the bonus token's."""
        return (self.limits[:batch] - self.lengths[:batch] - 1).clamp(0, block)

    def waiting(self, batch: int, width: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Pairs that the draft has not taken in: tokens and positions [batch, width], states [batch, width, *], and the index
        of the last real one, int64 [batch]; what comes after it is to be overwritten before anyone sees it."""
        positions = self.drafted[:batch, None] + torch.arange(width, device=self.tokens.device)
        positions = positions.clamp(max=self.tokens.shape[1] - 2)  # one that waits long beside one that is near its end
        tokens = self.tokens[:batch].gather(1, positions + 1)
        states = None
        if self.states is not None:
            rows = torch.arange(batch, device=self.tokens.device)[:, None]
            states = self.states[rows, positions % self.states.shape[1]]
        last = (self.lengths[:batch] - 2 - self.drafted[:batch]).clamp(min=0)  # parked rows have no pair
        return tokens, states, positions, last

    def keep(self, batch: int, aux: Tensor | None, row: int = 0) -> None:
        """Let states [batch, n, width] of positions lengths - 1 ... of `batch` rows from `row` on wait for the draft."""
        if aux is None or self.states is None:
            return
        places = self.lengths[row : row + batch, None] - 1
        if aux.shape[1] > 1:
            places = places + torch.arange(aux.shape[1], device=aux.device)
        places = places % self.states.shape[1]
        if batch == 1:  # one operator, and cheap: rounds without proposals pay for it as well
            self.states[row].index_copy_(0, places[0], aux[0])
        else:
            self.states[torch.arange(row, row + batch, device=aux.device)[:, None], places] = aux

    def commit(self, batch: int, tokens: Tensor, accepted: Tensor, row: int = 0) -> None:
        """Append tokens [batch, n] up to index accepted [batch] to `batch` rows from `row` on; what is behind it lies beyond the length,
        seen by nobody."""
        chosen = slice(row, row + batch)
        lengths = self.lengths[chosen]
        index = torch.arange(tokens.shape[1], device=tokens.device)
        self.tokens[chosen].scatter_(1, lengths[:, None] + index, tokens)
        if self.settings.counts is not None:
            real = (index <= accepted[:, None]).to(torch.int16)
            self.settings.counts[chosen].scatter_add_(1, tokens, real)
        torch.minimum(lengths + accepted + 1, self.limits[chosen], out=lengths)

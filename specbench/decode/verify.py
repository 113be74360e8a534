"""Verify and accept: one verifier pass over the pending token and its proposals, then the longest prefix it agrees with.

What enters: token ids and the verifier's caches. What leaves: how many proposals stand, the tokens to commit, and the auxiliary states of
the rows that stay. It does not know how proposals were made.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..models.cache import Cache
from ..models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Verified:
    """best: the verifier's own next token after each row, int64 [n]. aux: [1, n, K * hidden], or None without a draft."""

    best: Tensor
    aux: Tensor | None


def verify(verifier: Decoder, cache: Cache, tokens: Tensor, positions: Tensor, limit: int, aux_layers: tuple[int, ...]) -> Verified:
    """Run `tokens` [1, n] at `positions` [1, n]; every row is scored. Ties go to the lowest id, for any n alike."""
    hidden, aux = verifier(tokens, verifier.step(positions, limit, masked=tokens.shape[1] > 1), cache, aux_layers)
    return Verified(verifier.lm_head(hidden)[0].argmax(-1), aux)


def prefill(verifier: Decoder, cache: Cache, tokens: Tensor, positions: Tensor, aux_layers: tuple[int, ...]) -> Verified:
    """The prompt pass: `tokens` [1, n]; only the last row is scored (`best` is [1])."""
    n = tokens.shape[1]
    hidden, aux = verifier(tokens, verifier.step(positions, n, masked=n > 1), cache, aux_layers)
    return Verified(verifier.lm_head(hidden[:, -1:])[0].argmax(-1), aux)


def accept(proposed: list[int], best: list[int]) -> int:
    """How many of `proposed` stand: the longest prefix in which each is the verifier's own choice. `best` has one more, the bonus."""
    count = 0
    for ours, theirs in zip(proposed, best, strict=False):
        if ours != theirs:
            break
        count += 1
    return count

"""Verify and accept: one verifier pass over the pending token and its proposals, then the longest path that stands.

What enters: proposals and the verifier's caches. What leaves: how many proposals stand, the tokens to commit, and the auxiliary states of
the rows that stay. It does not know how proposals were made, only what they were drawn from.

Proposals that are the draft's best tokens are compared with the token that the verifier chooses at each place, by argmax or with the
request's own random number: the output is then what the verifier alone would have written, token for token. Proposals drawn from the
draft's distribution q are accepted with probability min(1, p / q) and otherwise replaced by a draw from max(p - q, 0) (Leviathan et al.,
arXiv 2211.17192): the output follows p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.cache import Cache
from .draft import Proposal
from .rows import shorter
from .sampling import ACCEPT, CHOOSE, Settings, choose, draw, penalise, probabilities, uniform
from .tree import ancestry, spread


@dataclass(frozen=True, slots=True)
class Scored:
    """scores: [b, n, vocab] of the token after the pending one and after each proposal. aux: [b, n, width] or None. seen: bool
    [b or 1, n, n], the rows on the way to each, itself counted. chosen: int64 [b, n], the best tokens, where scores were not asked for and
    are empty, [b, n, 0]."""

    scores: Tensor
    aux: Tensor | None
    seen: Tensor
    chosen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """tokens: int64 [b, m], to commit up to index count. count: int64 [b], proposals that stand. path: int64 [b, m], the scored row that
    gave each token; None in a chain, where it is the index."""

    tokens: Tensor
    count: Tensor
    path: Tensor | None = None


def verify(
    verifier: Any,
    cache: Cache,
    pending: Tensor,
    proposal: Proposal | None,
    lengths: Tensor,
    longest: int,
    aux_layers: tuple[int, ...],
    best_of: Callable[[Tensor], Tensor] | None = None,
) -> Scored:
    """Score the pending token [b, 1] and what is proposed after it.

    Args:
        lengths: int64 [b], committed tokens; the pending one has position lengths - 1. longest: the greatest of them, a host integer.
        best_of: finds the best token after each hidden state, where nothing else is wanted and scores need not be.
    """
    block = pending if proposal is None else torch.cat((pending, proposal.tokens), 1)
    batch, n = block.shape
    index = torch.arange(n, device=block.device)
    slots = lengths[:, None] - 1 + index
    limit = longest - 1 + n
    if proposal is None or proposal.parents is None or proposal.depths is None:
        step = verifier.step(slots, limit, masked=n > 1 or shorter(lengths, longest))
        seen = (index[:, None] >= index)[None]
    else:
        depths = torch.cat((torch.zeros_like(pending), proposal.depths), 1)
        seen = ancestry(proposal.parents, proposal.longest)
        visible, key_positions = spread(seen, depths, lengths - 1, limit)
        step = verifier.step(lengths[:, None] - 1 + depths, limit, slots=slots, seen=visible, key_positions=key_positions)
    hidden, aux = verifier(block, step, cache, aux_layers)
    if best_of is not None:
        return Scored(hidden[..., :0], aux, seen, best_of(hidden))
    return Scored(verifier.lm_head(hidden), aux, seen)


def accept(scored: Scored, proposal: Proposal | None, settings: Settings, lengths: Tensor, allowed: Tensor, sampled: bool) -> Accepted:
    """Which proposals stand.

    Args:
        lengths: int64 [b]. allowed: int64 [b], the most that each sequence may accept. sampled: whether any row has a temperature.
    """
    index = torch.arange(scored.scores.shape[1], device=lengths.device)
    tokens = None if proposal is None else proposal.tokens
    before = scored.seen[:, :, 1:].float() if settings.counts is not None else None
    scores = penalise(scored.scores, settings, tokens, before)

    def chosen(place: Tensor) -> Tensor:
        return choose(scores, settings, place, sampled) if scored.chosen is None else scored.chosen

    if proposal is None:
        return Accepted(chosen(lengths[:, None]), torch.zeros_like(lengths))
    if proposal.drawn_from is not None and sampled:
        return _accept_drawn(probabilities(scores, settings), proposal, settings, lengths, allowed)
    if proposal.parents is None or proposal.depths is None:
        found = chosen(lengths[:, None] + index)
        agrees = (proposal.tokens == found[:, :-1]) & (index[:-1] < allowed[:, None])
        return Accepted(found, agrees.cumprod(1).sum(1))
    place = lengths[:, None] + torch.cat((torch.zeros_like(lengths)[:, None], proposal.depths), 1)
    return _accept_tree(chosen(place), proposal, scored.seen, allowed)


def _accept_tree(chosen: Tensor, proposal: Proposal, seen: Tensor, allowed: Tensor) -> Accepted:
    """Follow the verifier's choice down the tree: a node stands if it and all nodes on its way are their parents' choices."""
    assert proposal.parents is not None and proposal.depths is not None
    agrees = (proposal.tokens == chosen.gather(1, proposal.parents)) & (proposal.depths <= allowed[:, None])
    agrees = torch.cat((torch.ones_like(agrees[:, :1]), agrees), 1)  # the pending token stands
    stands = (agrees[:, None] | ~seen).all(2)  # [b, n]
    depths = torch.cat((torch.zeros_like(proposal.depths[:, :1]), proposal.depths), 1)
    # siblings differ, so one node stands per depth at most; depths where none does fall back to node 0, and are not committed
    path = torch.zeros(chosen.shape[0], proposal.longest + 2, dtype=torch.int64, device=chosen.device)
    rows = torch.arange(chosen.shape[1], device=chosen.device).expand_as(depths)
    path.scatter_(1, torch.where(stands, depths, proposal.longest + 1), rows)  # the last column is a bin
    path = path[:, :-1]
    return Accepted(chosen.gather(1, path), stands.sum(1) - 1, path)


def _accept_drawn(p: Tensor, proposal: Proposal, settings: Settings, lengths: Tensor, allowed: Tensor) -> Accepted:
    """Speculative sampling of a chain. p: float32 [b, n, vocab], the verifier's processed distributions."""
    assert proposal.drawn_from is not None
    index = torch.arange(p.shape[1], device=p.device)
    place = lengths[:, None] + index
    q = expand(proposal, p.shape[2])  # [b, n - 1, vocab]
    ours, theirs = (t.gather(2, proposal.tokens[..., None])[..., 0] for t in (q, p[:, :-1]))
    accepts = uniform(settings.seed, place[:, :-1], ACCEPT) * ours < theirs
    count = (accepts & (index[:-1] < allowed[:, None])).cumprod(1).sum(1)
    here = p.gather(1, count[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]  # [b, vocab]
    drafted = torch.cat((q, torch.zeros_like(q[:, :1])), 1).gather(1, count[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]
    # at the limit nothing was rejected: the next proposal never counted, and the verifier chooses freely
    rest = torch.where((count < allowed)[:, None], (here - drafted).clamp(min=0), here)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, here)
    last = draw(rest, uniform(settings.seed, lengths + count, CHOOSE))
    tokens = torch.cat((proposal.tokens, last[:, None]), 1)
    return Accepted(tokens.scatter(1, count[:, None], last[:, None]), count)


def expand(proposal: Proposal, vocab: int) -> Tensor:
    """The distributions that a proposal was drawn from, over the verifier's vocabulary, float32 [b, m, vocab]."""
    assert proposal.drawn_from is not None and proposal.targets is not None
    full = proposal.drawn_from.new_zeros(*proposal.tokens.shape, vocab)
    return full.index_add_(2, proposal.targets, proposal.drawn_from)

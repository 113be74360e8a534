"""Draft trees that grow where the draft is sure (EAGLE-2, arXiv 2406.16858, section 4), with static shapes.

What enters: the draft's state after the last committed token of every sequence. What leaves: the tree's tokens, parents and depths, and the
visibility that verifying it needs. It does not know the verifier or what is accepted. A chain is the tree with top_k 1.

Each level feeds back the `top_k` most probable of all children of the level before, probable meaning the product of the draft's
probabilities along the path; of all children ever seen the `nodes` most probable are the tree. A parent is at least as probable as its
children and comes before them, so that the choice is a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ..models.cache import Cache
from ..models.eagle3 import Eagle3


@dataclass(frozen=True, slots=True)
class Tree:
    """Shape of a draft tree. depth: levels, drafted tokens on the longest path. top_k: children looked at per node, and nodes fed back per
    level. nodes: drafted tokens that the verifier scores, besides the pending one (EAGLE's total_token is one more, SGLang's
    speculative_num_draft_tokens as well)."""

    depth: int
    top_k: int
    nodes: int

    def __post_init__(self) -> None:
        if min(self.depth, self.top_k, self.nodes) < 1:
            raise ConfigError(f"tree is depth {self.depth}, top_k {self.top_k}, nodes {self.nodes}; each must be at least 1")
        if not self.depth <= self.nodes <= self.candidates:
            raise ConfigError(
                f"tree of depth {self.depth} and top_k {self.top_k} has {self.candidates} candidates; nodes is {self.nodes}, expected "
                f"{self.depth} to {self.candidates}"
            )

    @property
    def candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def slots(self) -> int:
        """Cache slots that growing takes in the draft."""
        return (self.depth - 1) * self.top_k


def grow(draft: Eagle3, cache: Cache, hidden: Tensor, lengths: Tensor, longest: int, tree: Tree) -> tuple[Tensor, int, Tensor, Tensor]:
    """Tokens int64 [b, nodes] (verifier ids), the depth, parents and depths int64 [b, nodes] (see `draft.Proposal`).

    Args:
        hidden: [b, 1, hidden], the draft's state of the last committed pair.
        lengths: int64 [b], committed tokens; the first fed-back node has position lengths - 1.
        longest: the greatest of lengths, a host integer.
    """
    batch, k = hidden.shape[0], tree.top_k
    device = hidden.device
    first = torch.arange(k, device=device)
    scores, best = _top(draft, hidden, k)  # [b, 1, k]
    scores, tokens = scores[:, 0], draft.to_target(best[:, 0])  # [b, k]
    all_scores, all_tokens = [scores], [tokens]
    all_parents, all_depths = [torch.zeros_like(tokens)], [torch.ones_like(tokens)]
    # the frontier: which of all candidates are fed back, with their states; their ancestors among fed-back nodes, bool [b, k, fed]
    number, states = first.expand(batch, -1), hidden.expand(-1, k, -1)
    ancestors = torch.zeros(batch, k, 0, dtype=torch.bool, device=device)
    for level in range(1, tree.depth):
        fed = (level - 1) * k
        own = torch.eye(k, dtype=torch.bool, device=device).expand(batch, -1, -1)
        ancestors = torch.cat((ancestors, own), 2)  # [b, k, level * k]
        positions = (lengths - 2 + level)[:, None].expand(-1, k)
        slots = lengths[:, None] - 1 + fed + first
        limit = longest - 1 + level * k
        levels = torch.arange(level, device=device).repeat_interleave(k)
        seen, key_positions = spread(ancestors, levels[None].expand(batch, -1), lengths - 1, limit)
        step = draft.step(positions, limit, slots=slots, seen=seen, key_positions=key_positions)
        states = draft(tokens, states, step, cache)
        more, best = _top(draft, states, k)  # [b, k, k]
        candidates = (scores[..., None] + more).flatten(1)  # [b, k * k]
        fresh = draft.to_target(best).flatten(1)
        base = sum(t.shape[1] for t in all_tokens)
        all_scores.append(candidates)
        all_tokens.append(fresh)
        all_parents.append((number + 1).repeat_interleave(k, 1))
        all_depths.append(torch.full_like(fresh, level + 1))
        scores, chosen = candidates.topk(k, 1)
        tokens, parent = fresh.gather(1, chosen), chosen // k
        number = base + chosen
        states = states.gather(1, parent[..., None].expand(-1, -1, states.shape[2]))
        ancestors = ancestors.gather(1, parent[..., None].expand(-1, -1, ancestors.shape[2]))
    return (*_select(torch.cat(all_scores, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1), torch.cat(all_depths, 1), tree),)


def _top(draft: Eagle3, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best log-probabilities and draft ids [b, n, k]; a state that is no number gives any ids at log-probability 0."""
    scores = torch.nan_to_num(draft.logits(states).float().log_softmax(-1))
    best = scores.topk(min(k, scores.shape[-1]), -1)
    return best.values.clamp(max=0), best.indices


def _select(scores: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, tree: Tree) -> tuple[Tensor, int, Tensor, Tensor]:
    """The most probable candidates, in their own order, with parents counted among themselves."""
    ranked = torch.sort(scores, dim=1, descending=True, stable=True).indices  # stable: of equal ones the parent comes first
    chosen = ranked[:, : tree.nodes].sort(1).values
    place = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.int64, device=scores.device)
    index = torch.arange(1, tree.nodes + 1, device=scores.device).expand(chosen.shape[0], -1)
    place.scatter_(1, chosen + 1, index)
    parents = place.gather(1, parents.gather(1, chosen))
    return tokens.gather(1, chosen), tree.depth, parents, depths.gather(1, chosen)


def ancestry(parents: Tensor, longest: int) -> Tensor:
    """Which nodes lie on the way to each, itself counted: bool [b, m + 1, m + 1], node 0 the pending token; parents int64 [b, m]."""
    batch, m = parents.shape
    direct = torch.zeros(batch, m + 1, m + 1, dtype=torch.float32, device=parents.device)
    direct[:, 1:].scatter_(2, parents[..., None], 1.0)
    reach = torch.eye(m + 1, device=parents.device).expand(batch, -1, -1)
    hop = reach
    for _ in range(longest):
        hop = hop @ direct
        reach = reach + hop
    return reach > 0


def spread(ancestors: Tensor, depths: Tensor, start: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Visibility over cache slots for nodes that lie in slots start + i.

    Args:
        ancestors: bool [b, n, m], which of the m nodes each query sees. depths: int64 [b, m], position of each node less `start`.
        start: int64 [b]; every slot below it is seen.

    Returns:
        seen: bool [b, n, limit]. key_positions: int64 [b, limit].
    """
    slots = torch.arange(limit, device=start.device).expand(start.shape[0], -1)  # [b, limit]
    node = slots - start[:, None]
    inside = (node >= 0) & (node < ancestors.shape[2])
    index = node.clamp(0, ancestors.shape[2] - 1)
    among = ancestors.gather(2, index[:, None].expand(-1, ancestors.shape[1], -1))
    seen = (node < 0)[:, None] | (among & inside[:, None])
    return seen, torch.where(inside, start[:, None] + depths.gather(1, index), slots)

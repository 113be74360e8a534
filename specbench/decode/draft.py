"""Draft: take in what was committed, propose what may follow.

What enters: committed pairs (token i + 1, the verifier's state i) of every sequence. What leaves: proposed verifier ids, as a chain or a
tree. It does not know the verifier's weights, text, or what will be accepted. A `Proposer` is anything with these methods; the EAGLE-3
draft is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ConfigError
from ..models.eagle3 import Eagle3
from .rows import shorter
from .sampling import PROPOSE, Settings, best, draw, probabilities, uniform
from .tree import Tree, grow


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed ids of b sequences.

    tokens: int64 [b, m]. parents: int64 [b, m] for a tree, the index of each token's parent, 0 the pending token, i + 1 proposal i; parents
    come before their children. None for a chain. depths: int64 [b, m], 1 for children of the pending token; None for a chain. longest: the
    greatest depth. drawn_from: float32 [b, m, draft_vocab], the distribution that each was drawn from, of the verifier's ids in targets
    int64 [draft_vocab]; None where they are the draft's best.
    """

    tokens: Tensor
    longest: int
    parents: Tensor | None = None
    depths: Tensor | None = None
    drawn_from: Tensor | None = None
    targets: Tensor | None = None

    def to(self, device: torch.device) -> Proposal:
        """The same on `device`."""
        parts = (self.parents, self.depths, self.drawn_from, self.targets)
        return Proposal(self.tokens.to(device), self.longest, *(None if t is None else t.to(device) for t in parts))


class Proposer(Protocol):
    """What the decode loop needs from a draft. Every id is the verifier's; rows are the batch's."""

    width: int  # of the auxiliary states that it reads; 0 reads none

    def begin(self, rows: int, length: int) -> None:
        """Make room for `rows` sequences of at most `length` tokens."""

    def extend(self, tokens: Tensor, aux: Tensor | None, positions: Tensor, last: Tensor, row: int, limit: int, causal: bool) -> None:
        """Take in pairs: tokens [b, n], states [b, n, width], positions [b, n] of the states, for rows row .. row + b - 1. What comes after
        index last [b] is no pair. limit: one more than the highest position. causal: positions are 0 .. n - 1."""

    def propose(self, count: int, lengths: Tensor, longest: int, settings: Settings | None) -> Proposal:
        """`count` ids, or fewer, in a chain for the first b rows, which have lengths [b] tokens, `longest` at most; drawn with `settings`,
        or the best ones without."""

    def move(self, source: int, target: int, length: int) -> None:
        """Row `source` over row `target`."""


class EagleDraft:
    """An EAGLE-3 draft over a static cache: a chain of its own best (or drawn) tokens, or with `tree` its best tree.

    The state that a step feeds back is its own; the pair of position i lies in slot i, as the verifier's token does.

    Args:
        p_min: a chain ends with its first token at which the product of the draft's own probabilities so far is below this, for every
            sequence of the batch; 0 never ends it early. What a draft doubts is rarely accepted, and costs a step and a row to verify.
            (llama.cpp's --draft-p-min, of the whole path.) Which tokens are committed does not depend on it.

    Raises:
        ConfigError: p_min outside [0, 1), or beside a tree, which has one shape.
    """

    def __init__(self, draft: Eagle3, tree: Tree | None = None, p_min: float = 0.0) -> None:
        if not 0 <= p_min < 1 or (p_min and tree is not None):
            raise ConfigError(f"draft_p_min is {p_min}; expected 0 to below 1, and 0 beside a tree (given: {tree})")
        self.draft, self.tree, self.p_min = draft, tree, p_min
        self.width = draft.config.num_aux_layers * draft.config.target_hidden_size

    def begin(self, rows: int, length: int) -> None:
        vocab = self.draft.config.draft_vocab_size
        if self.tree is not None and self.tree.top_k > vocab:
            raise ConfigError(f"tree has top_k {self.tree.top_k}; the draft's vocabulary has {vocab} tokens")
        self.cache = self.draft.new_cache(length + (self.tree.slots if self.tree else 0), rows)
        self.hidden = torch.zeros(rows, 1, self.draft.config.hidden_size, dtype=self.draft.dtype, device=self.draft.device)
        self.targets = self.draft.to_target(torch.arange(self.draft.config.draft_vocab_size, device=self.draft.device))

    def extend(
        self, tokens: Tensor, aux: Tensor | None, positions: Tensor, last: Tensor, row: int = 0, limit: int = 0, causal: bool = False
    ) -> None:
        assert aux is not None, "the loop refuses an EAGLE-3 draft without states"
        batch, n = tokens.shape
        tokens, aux, positions, last = (t.to(self.draft.device) for t in (tokens, aux, positions, last))
        step = self.draft.step(positions, limit, row=row, masked=batch > 1 or n > 1, causal=causal)
        hidden = self.draft(tokens, self.draft.fuse(aux), step, self.cache)
        self.hidden[row : row + batch] = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))

    def propose(self, count: int, lengths: Tensor, longest: int, settings: Settings | None = None) -> Proposal:
        home, device = lengths.device, self.draft.device
        if home == device:
            return self._propose(count, lengths, longest, settings)
        return self._propose(count, lengths.to(device), longest, None if settings is None else settings.to(device)).to(home)

    def _propose(self, count: int, lengths: Tensor, longest: int, settings: Settings | None) -> Proposal:
        batch = lengths.shape[0]
        if self.tree is not None:
            return Proposal(*grow(self.draft, self.cache, self.hidden[:batch], lengths, longest, self.tree))
        hidden, ids, distributions = self.hidden[:batch], [], []
        masked, path = shorter(lengths, longest), torch.zeros((), device=self.draft.device) if self.p_min else None
        for j in range(count):
            scores = self.draft.logits(hidden)  # [b, 1, draft_vocab]
            if settings is None:
                chosen = best(scores)
            else:
                shares = probabilities(torch.nan_to_num(scores.float()), settings)
                chosen = draw(shares, uniform(settings.seed, lengths[:, None] + j, PROPOSE))
                distributions.append(shares)
            token = self.draft.to_target(chosen)  # [b, 1]
            ids.append(token)
            if path is not None and j + 1 < count:
                path = path + scores.gather(2, chosen[..., None])[..., 0].float() - scores.float().logsumexp(-1)
                if float(path.max()) < math.log(self.p_min):
                    break
            if j + 1 < count:
                step = self.draft.step(lengths[:, None] - 1 + j, longest + j, masked=masked)
                hidden = self.draft(token, hidden, step, self.cache)
        drawn_from = torch.cat(distributions, 1) if distributions else None
        return Proposal(torch.cat(ids, 1), len(ids), drawn_from=drawn_from, targets=self.targets)

    def move(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)
        self.hidden[target] = self.hidden[source]

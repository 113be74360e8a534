"""Draft: propose a chain of tokens, one draft step after another.

What enters: the draft's state after the last committed token. What leaves: proposed verifier ids. It does not know the verifier's weights,
text, or what will be accepted. A `Proposer` is anything with these three methods; the EAGLE-3 draft is one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..errors import ConfigError
from ..models.eagle3 import Eagle3


class Proposer(Protocol):
    """What the decode loop needs from a draft. Positions are those of the states; every id is the verifier's."""

    def begin(self, length: int) -> None:
        """Start a sequence of at most `length` tokens."""

    def extend(self, tokens: Tensor, aux: Tensor | None, start: int) -> None:
        """Take in committed pairs: `tokens` [1, n], token i + 1 beside the auxiliary states `aux` [1, n, K * hidden] of position i, from
        i = start on; None where no layers were asked for."""

    def propose(self, count: int) -> Tensor:
        """The next `count` ids, int64 [1, count], following the last extended pair."""


class EagleChain:
    """A greedy EAGLE-3 chain: each step feeds back its own state and its own best token."""

    def __init__(self, draft: Eagle3) -> None:
        self.draft = draft

    def begin(self, length: int) -> None:
        self.cache = self.draft.new_cache(length)
        self.slots = torch.arange(length, device=self.draft.device)[None]

    def extend(self, tokens: Tensor, aux: Tensor | None, start: int) -> None:
        if aux is None:
            raise ConfigError("an EAGLE-3 draft reads auxiliary states of the verifier; pass aux_layers=draft.aux_layers")
        end = start + tokens.shape[1]
        step = self.draft.step(self.slots[:, start:end], end, masked=tokens.shape[1] > 1)
        self.hidden = self.draft(tokens, self.draft.fuse(aux), step, self.cache)[:, -1:]
        self.end = end

    def propose(self, count: int) -> Tensor:
        hidden, ids = self.hidden, []
        for j in range(count):
            token = self.draft.to_target(self.draft.logits(hidden).argmax(-1))  # [1, 1]
            ids.append(token)
            if j + 1 < count:
                position = self.end + j
                step = self.draft.step(self.slots[:, position : position + 1], position + 1, masked=False)
                hidden = self.draft(token, hidden, step, self.cache)
        return torch.cat(ids, 1)

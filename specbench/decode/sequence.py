"""An active sequence as the host sees it: its tokens, counts and times, and where it ends.

What enters: committed tokens of a round. What leaves: those that stay, with the reason for an end, and at last a `Generation`. It does not
know tensors of models, drafts or other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from .request import FinishReason, Generation, Logprob, Request, Timing


@dataclass(slots=True, eq=False)
class Active:
    """The host's side of an active sequence; `drafted` mirrors Rows.drafted."""

    index: int
    request: Request
    tokens: list[int]
    limit: int
    cut: FinishReason
    stops: frozenset[int]
    seed: int
    admitted: float
    drafted: int = 0
    timing: Timing = field(default_factory=Timing)
    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    emitted_at: list[float] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    def generation(self, reason: FinishReason) -> Generation:
        prompt = list(self.request.prompt_ids)
        logprobs = list(self.logprobs) if self.request.logprobs is not None else None
        return Generation(
            prompt, self.tokens[len(prompt) :], list(self.accepted), list(self.proposed), reason, replace(self.timing), list(self.nodes),
            list(self.emitted_at), self.seed, logprobs,
        )  # fmt: skip

    def keep(self, new: list[int]) -> tuple[list[int], FinishReason | None]:
        """Append new tokens up to a stop or the limit. A stop counts before the limit, as it does one token at a time."""
        reason: FinishReason | None = None
        new = new[: self.limit - len(self.tokens)]
        stop = next((i for i, token in enumerate(new) if token in self.stops), None)
        if stop is not None:
            new, reason = new[: stop + 1], "eos"
        if self.request.ends_at is not None:
            output = self.tokens[len(self.request.prompt_ids) :] + new
            kept = self.request.ends_at(output, len(new))
            if kept is not None and (reason is None or kept < len(output)):
                new, reason = new[: len(new) - (len(output) - kept)], "stop"
        self.tokens += new
        if reason is None and len(self.tokens) >= self.limit:
            reason = self.cut
        return new, reason


def log_probabilities(scores: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, ...]:
    """log_softmax of raw scores [b, n, vocab], row i for token i of tokens [b, m]: tokens, values [b, m], best values and ids
    [b, m, top]."""
    logs = scores[:, : tokens.shape[1]].float().log_softmax(-1)
    values = logs.gather(2, tokens[..., None])[..., 0]
    best = logs.topk(max(top, 1), -1)
    return tokens, values, best.values[..., :top], best.indices[..., :top]


def unpack_logprobs(found: tuple[Tensor, ...] | None, wanted: Sequence[int | None]) -> list[list[Logprob]]:
    """Per sequence and token, with as many best ones as each sequence wants; empty where it wants none."""
    if found is None:
        return [[] for _ in wanted]
    found = tuple(t[: len(wanted)] for t in found)
    return [
        [] if top is None else [Logprob(v, dict(zip(i[:top], b[:top], strict=True)) | {t: v}) for t, v, b, i in zip(*row, strict=True)]
        for top, *row in zip(wanted, *(t.tolist() for t in found), strict=True)
    ]

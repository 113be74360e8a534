"""From scores to tokens: penalties, temperature, filters, and random numbers that belong to a request.

What enters: the verifier's (or draft's) scores with each row's settings. What leaves: processed probabilities, and tokens drawn from them.
It does not know drafts, acceptance or caches. Everything is a tensor operation without a host synchronisation.

Random numbers are a hash of (seed, place of the token, purpose): no state to carry, the same on every device and in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .request import Sampling

# Purposes of a random number: choosing the verifier's token, drawing a proposal, accepting it.
CHOOSE, PROPOSE, ACCEPT = 0, 1, 2
_GOLDEN, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's constants as signed 64-bit


@dataclass(slots=True)
class Settings:
    """Sampling settings of the rows of a batch, a value a row: temperature, top_p, min_p and the penalties float32 [R]; top_k and seed
    int64 [R] (top_k 0 is all). counts: how often each token is in a row's output, int16 [R, vocab]; in_prompt: bool [R, vocab]; None where
    no request has penalties."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    counts: Tensor | None = None
    in_prompt: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, vocab: int, penalised: bool, device: torch.device) -> Settings:
        temperature, top_p, min_p, repetition, presence, frequency = (torch.zeros(rows, device=device) for _ in range(6))
        top_k, seed = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        counts = torch.zeros(rows, vocab, dtype=torch.int16, device=device) if penalised else None
        in_prompt = torch.zeros(rows, vocab, dtype=torch.bool, device=device) if penalised else None
        top_p += 1  # rows that nobody has used yet run along in recorded stages
        return cls(temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, counts, in_prompt)

    def set(self, row: int, sampling: Sampling, seed: int, prompt: Tensor) -> None:
        """Settings of a new sequence in `row`; prompt: its ids, int64 [n]."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            getattr(self, name)[row] = getattr(sampling, name)
        self.top_k[row] = max(sampling.top_k, 0)
        self.seed[row] = seed
        if self.counts is not None and self.in_prompt is not None:
            self.counts[row] = 0
            self.in_prompt[row] = False
            self.in_prompt[row, prompt] = True

    def first(self, rows: int, start: int = 0) -> Settings:
        """Views on rows [start, start + rows)."""
        return Settings(*(None if t is None else t[start : start + rows] for t in self.tensors(all=True)))

    def to(self, device: torch.device) -> Settings:
        """The same on `device`."""
        return Settings(*(None if t is None else t.to(device) for t in self.tensors(all=True)))

    def tensors(self, all: bool = False) -> list[Tensor]:
        found = [getattr(self, name) for name in self.__dataclass_fields__]
        return found if all else [t for t in found if t is not None]


def uniform(seed: Tensor, place: Tensor, purpose: int) -> Tensor:
    """Numbers in [0, 1), float64, one for each `place` int64 [b, ...] with its row's `seed` int64 [b]; splitmix64 (Steele et al. 2014)."""
    seed = seed.view(-1, *[1] * (place.dim() - 1))
    return (_hash(_hash(seed + (place * 4 + purpose) * _GOLDEN)) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _hash(z: Tensor) -> Tensor:
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _MIX1  # >> keeps the sign: the mask makes it logical
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _MIX2
    return z ^ (z >> 31 & (1 << 33) - 1)


def penalise(scores: Tensor, settings: Settings, tokens: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """Scores with penalties, float32 [b, n, vocab].

    Args:
        scores: [b, n, vocab].
        tokens: ids [b, m] that a draft proposed after the committed text.
        before: float32 [b or 1, n, m], 1 where proposal j stands before row i's next token.
    """
    if settings.counts is None or settings.in_prompt is None:
        return scores
    scores = scores.float()
    counts = settings.counts.float()[:, None].expand(-1, scores.shape[1], -1)
    if tokens is not None and before is not None and tokens.shape[1]:
        batch, n, _ = scores.shape
        counts = counts.scatter_add(2, tokens[:, None].expand(-1, n, -1), before.expand(batch, -1, -1))
    present = counts > 0
    penalty = settings.repetition_penalty[:, None, None]
    scaled = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(present | settings.in_prompt[:, None], scaled, scores)
    return scores - settings.frequency_penalty[:, None, None] * counts - settings.presence_penalty[:, None, None] * present


def probabilities(scores: Tensor, settings: Settings) -> Tensor:
    """Processed distribution, float32 [b, n, vocab], of scores [b, n, vocab] after penalties. Rows of temperature 0 are one-hot at the
    best token, ties to the lowest id."""
    temperature = settings.temperature[:, None, None]
    greedy = temperature == 0
    top = best(scores)[..., None]
    scores = scores.float()
    scores = (scores - scores.gather(-1, top)) / torch.where(greedy, 1.0, temperature)  # the best is 0: no temperature overflows
    found = filtered(scores, settings).softmax(-1)
    return torch.where(greedy, torch.zeros_like(found).scatter_(-1, top, 1.0), found)


def filtered(scores: Tensor, settings: Settings) -> Tensor:
    """-inf for what min_p, top_k and top_p drop, in that order; scores float32 [b, n, vocab] after temperature.

    Equal scores at the edge of top_k or top_p stand or fall by their id, the lower ones first: exactly k tokens stay.
    """
    min_p, top_k, top_p = (t[:, None, None] for t in (settings.min_p, settings.top_k, settings.top_p))
    floor = scores.amax(-1, keepdim=True) + torch.log(min_p)  # log(0) is -inf: nothing is below
    scores = scores.masked_fill(scores < floor, float("-inf"))
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    shares = ordered.softmax(-1)
    before = shares.double().cumsum(-1) - shares.double()
    ordered = ordered.masked_fill((top_p < 1) & (before >= top_p.double()) & (rank > 0), float("-inf"))
    return torch.empty_like(scores).scatter_(-1, order, ordered)


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Tokens, int64 [...], drawn from weights [..., vocab] (not negative, not all zero; need not add up to 1) with one number in [0, 1)
    each: the first token whose cumulative weight exceeds number * total."""
    cumulative = weights.double().cumsum(-1)
    wanted = numbers[..., None] * cumulative[..., -1:]
    found = torch.searchsorted(cumulative, wanted, right=True)[..., 0]
    return found.clamp_(max=weights.shape[-1] - 1)


def best(scores: Tensor) -> Tensor:
    """The best token, int64 [...], of scores [..., vocab]; ties to the lowest id. max is four times as fast as argmax in bf16 on a CPU."""
    return scores.max(-1).indices


def choose(scores: Tensor, settings: Settings, place: Tensor, sampled: bool) -> Tensor:
    """The verifier's own next token for each row, int64 [b, n].

    Args:
        scores: [b, n, vocab], penalties applied.
        place: int64 [b, n], place in the sequence of the token to choose.
        sampled: whether any row has a temperature; without, nothing but argmax runs.
    """
    if not sampled:
        return best(scores)
    return draw(probabilities(scores, settings), uniform(settings.seed, place, CHOOSE))

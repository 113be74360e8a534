"""The decode loop: draft -> verify -> accept -> commit.

What enters: a verifier, a draft or none, prompt token ids. What leaves: token ids with the accepted count of every round and where the time
went. It does not know text, files, quantization or devices.

Bookkeeping, once: with `committed` tokens (prompt and output, the last one pending), both caches hold committed - 1 entries that matter.
The verifier reads the pending token and the proposals at positions committed - 1 ...; the draft holds pairs (token i + 1, state i) for i <
committed - 1. Rejected rows stay in their slots, seen by nobody, until the next round writes over them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..errors import ConfigError
from ..models.decoder import Decoder
from .draft import Proposer
from .verify import accept, prefill, verify

FinishReason = Literal["eos", "length", "context"]


@dataclass(slots=True)
class Timing:
    """Seconds. prefill_s ends with the first token; decode_s is everything after it: draft, verify and other."""

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0

    @property
    def other_s(self) -> float:
        return self.decode_s - self.draft_s - self.verify_s

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Generation:
    """One decoded sequence.

    token_ids: generated ids, an EOS included. accepted_per_round: draft tokens that each round committed (the bonus token not counted; a
    last round cut by EOS or a limit counts what was kept). proposed_per_round: draft tokens that each round really proposed.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    accepted_per_round: list[int]
    proposed_per_round: list[int]
    finish_reason: FinishReason
    timing: Timing = field(repr=False)


@torch.inference_mode()
def decode(
    verifier: Decoder,
    proposer: Proposer | None,
    prompt_ids: list[int],
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    aux_layers: tuple[int, ...] = (),
    eos_ids: Iterable[int] | None = None,
) -> Generation:
    """Greedy decoding of one prompt; the output is the verifier's own greedy output whatever the draft proposes.

    Args:
        num_speculative_tokens: k, proposals a round; 0 runs the verifier alone and never touches the draft.
        max_new_tokens: at least 1.
        aux_layers: ascending ids of the verifier states that the proposer reads (see `Decoder.forward`).
        eos_ids: stop after one of these; None takes the verifier's.

    Raises:
        ConfigError: an empty prompt, ids outside the vocabulary, or a prompt that leaves no room in the context.
    """
    k = _check_arguments(verifier, proposer, prompt_ids, num_speculative_tokens, max_new_tokens)
    stops = verifier.eos_ids if eos_ids is None else frozenset(eos_ids)
    context = verifier.config.max_position_embeddings
    room = min(max_new_tokens, context - len(prompt_ids))
    cut: FinishReason = "length" if room == max_new_tokens else "context"
    aux_layers = aux_layers if k else ()
    length = len(prompt_ids) + room
    timing, clock = Timing(), Clock(verifier.device)

    cache = verifier.new_cache(length)
    slots = torch.arange(length, device=verifier.device)[None]
    tokens = list(prompt_ids)
    first = prefill(verifier, cache, slots.new_tensor([tokens]), slots[:, : len(tokens)], aux_layers)
    tokens.append(int(first.best))
    timing.prefill_s = clock.lap()
    if k and proposer is not None:
        proposer.begin(length)
        proposer.extend(slots.new_tensor([tokens[1:]]), first.aux, 0)
    timing.draft_s += clock.lap()

    accepted_per_round: list[int] = []
    proposed_per_round: list[int] = []
    while tokens[-1] not in stops and len(tokens) < length:
        start = len(tokens) - 1
        count = min(k, length - len(tokens) - 1)  # the bonus token needs a place as well

        proposals = proposer.propose(count) if count and proposer is not None else slots[:, :0]
        timing.draft_s += clock.lap()

        block = torch.cat((slots.new_tensor([tokens[-1:]]), proposals), 1)
        verified = verify(verifier, cache, block, slots[:, start : start + 1 + count], start + 1 + count, aux_layers if count else ())
        drafted, best = proposals[0].tolist(), verified.best.tolist()
        timing.verify_s += clock.lap()

        accepted = accept(drafted, best)
        kept = until_stop([*drafted[:accepted], best[accepted]], stops)
        tokens += kept
        accepted_per_round.append(min(accepted, len(kept)))
        proposed_per_round.append(count)

        if count and proposer is not None and tokens[-1] not in stops and len(tokens) < length:
            clock.lap()  # bookkeeping above is neither draft nor verify
            proposer.extend(slots.new_tensor([tokens[start + 1 :]]), None if verified.aux is None else verified.aux[:, : len(kept)], start)
            timing.draft_s += clock.lap()
    timing.decode_s = clock.total() - timing.prefill_s
    finish: FinishReason = "eos" if tokens[-1] in stops else cut
    return Generation(list(prompt_ids), tokens[len(prompt_ids) :], accepted_per_round, proposed_per_round, finish, timing)


def until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """`tokens` up to and including the first stop id."""
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens


class Clock:
    """Laps on a synchronised clock, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.started = self.last = self._now()

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self.last = self.last, self._now()
        return self.last - before

    def total(self) -> float:
        """Seconds since the start."""
        return self._now() - self.started


def _check_arguments(verifier: Decoder, proposer: Proposer | None, prompt_ids: list[int], k: int, max_new_tokens: int) -> int:
    vocab, context = verifier.config.vocab_size, verifier.config.max_position_embeddings
    if not prompt_ids:
        raise ConfigError("the prompt holds no token; at least one is needed")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab:
        found = f"{min(prompt_ids)}..{max(prompt_ids)}"
        raise ConfigError(f"prompt ids run {found}; the verifier's vocabulary is 0..{vocab - 1}: wrong tokenizer?")
    if len(prompt_ids) >= context:
        raise ConfigError(f"the prompt has {len(prompt_ids)} tokens and the verifier's context {context}; nothing can follow")
    if k < 0 or max_new_tokens < 1:
        raise ConfigError(f"num_speculative_tokens is {k} and max_new_tokens {max_new_tokens}; at least 0 and 1 are expected")
    if k and proposer is None:
        raise ConfigError(f"num_speculative_tokens is {k} but there is no draft; load one, or pass 0")
    return k

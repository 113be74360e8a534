"""What is asked of decoding, and what comes back: requests, sampling settings, generations.

What enters and leaves are token ids. It does not know text, models or how decoding works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the verifier's scores. Names and meaning are vLLM's (SamplingParams, 0.32).

    temperature: 0 takes the best token, ties to the lowest id. top_k: 0 or -1 is all. top_p: smallest set of at least that probability.
    min_p: drops tokens below that share of the best one's probability. repetition_penalty: divides positive and multiplies negative scores
    of every token of prompt and output (CTRL, arXiv 1909.05858). presence_penalty, frequency_penalty: subtracted once, or per occurrence,
    for tokens of the output (OpenAI). seed: of this request alone; None draws one, which the generation tells.

    Order: penalties, temperature, min_p, top_k, top_p. The seed decides every random number together with the token's place, so a request
    gets the same tokens alone, in a batch or after others. With greedy proposals they are the same for every k, and without a draft; with
    proposals drawn from the draft they are reproducible for each k.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= -1 and self.top_k == int(self.top_k), "-1, 0 (both: all) or a count"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "min_p": (0 <= self.min_p <= 1, "0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 is none"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "-2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "-2 to 2"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "None, or 0 to 2**63 - 1"),
        }
        for name, (good, expected) in checks.items():
            value = getattr(self, name)
            if not good or (isinstance(value, float) and not math.isfinite(value)):
                raise ConfigError(f"{name} is {value!r}; expected {expected}")

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    stop_ids: an output ends with one of these, which it includes; None takes the verifier's EOS ids. ends_at: looks at the output ids so
    far and how many of them are new, and returns how many to keep where the output is over (a stop string), else None. logprobs: None, or
    how many alternatives to report beside each token's own log-probability.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 256
    sampling: Sampling = Sampling()
    stop_ids: Iterable[int] | None = None
    ends_at: Callable[[list[int], int], int | None] | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How to decode. num_speculative_tokens: k, 0 is the verifier alone. batch_size: sequences at a time. draft_sampling: "greedy" proposes
    the draft's best tokens at any temperature (as vLLM does by default), "probabilistic" draws them. adaptive: choose k per round, up to
    num_speculative_tokens. graphs: record CUDA graphs; None where the device has them and the verifier is known to bear it. check: hold
    every round to `invariants`, at the price of reading the whole text again."""

    num_speculative_tokens: int = 3
    batch_size: int = 1
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    adaptive: bool = False
    graphs: bool | None = None
    check: bool = False


@dataclass(slots=True)
class Timing:
    """Seconds. prefill_s: the verifier's prompt pass, up to the first token. decode_s: everything after it, made up of draft_prefill_s (the
    draft's prompt pass), draft_s, verify_s and other_s. In a batch, what passed while the sequence was in it, and of prompt passes those of
    all that joined with it."""

    prefill_s: float = 0.0
    draft_prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0

    @property
    def other_s(self) -> float:
        return self.decode_s - self.draft_prefill_s - self.draft_s - self.verify_s

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Logprob:
    """log_softmax of the verifier's raw scores (before penalties, temperature and filters) for the emitted token, and the best `top`
    with the emitted one among them (one more where it is none of the best)."""

    value: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Generation:
    """One decoded sequence.

    token_ids: generated ids, an EOS included. accepted_per_round: draft tokens that each round committed (the bonus token not counted).
    proposed_per_round: the longest chain of draft tokens that each round could have committed, 0 where none was drafted; a round that a
    stop ended counts as far as the stop. nodes_per_round: draft tokens that the verifier scored, more than proposed in trees. emitted_at_s:
    seconds from admission to each round's tokens, the prompt pass first.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    accepted_per_round: list[int]
    proposed_per_round: list[int]
    finish_reason: FinishReason
    timing: Timing = field(repr=False)
    nodes_per_round: list[int] = field(default_factory=list, repr=False)
    emitted_at_s: list[float] = field(default_factory=list, repr=False)
    seed: int | None = None
    logprobs: list[Logprob] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Update:
    """What one round did for one sequence. request: its index. token_ids: newly committed. finish_reason: None while it goes on."""

    request: int
    token_ids: list[int]
    accepted: int
    proposed: int
    finish_reason: FinishReason | None

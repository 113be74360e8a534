"""Text in, text out: prompts through the verifier's chat template and tokenizer into the decode loop.

What enters: loaded models and prompts. What leaves: generations with their text. It is the only place where decoding meets text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .decode.draft import EagleDraft
from .decode.engine import Run
from .decode.request import Generation, Options, Request, Sampling, Timing, Update
from .decode.tree import Tree
from .errors import ConfigError
from .models.eagle3 import Eagle3

SEED_STEP = 1_000_003  # between the seeds of prompts that share one given seed


@dataclass(frozen=True, slots=True)
class Generations:
    """One `Generation` per prompt, and what they add up to.

    text: empty without a tokenizer. rounds_past_draft_limit: rounds that began beyond the draft's own max_position_embeddings, where its
    rotary table was extended.
    """

    items: tuple[Generation, ...]
    text: list[str]
    rounds_past_draft_limit: int = 0

    def __iter__(self) -> Iterator[Generation]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Generation:
        return self.items[index]

    @property
    def token_ids(self) -> list[list[int]]:
        return [g.token_ids for g in self.items]

    @property
    def accepted_per_round(self) -> list[list[int]]:
        return [g.accepted_per_round for g in self.items]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted draft tokens per round that drafted: the bonus token counts, the mean is over all rounds of all prompts. NaN without
        such a round. Rounds that proposed nothing are no drafts (vLLM's num_drafts)."""
        rounds = [a for a, p in self._rounds() if p]
        return 1 + sum(rounds) / len(rounds) if rounds else float("nan")

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of rounds that proposed position i and kept it (unconditional), for i = 1, 2, ..."""
        pairs = self._rounds()
        longest = max((p for _, p in pairs), default=0)
        return [sum(a > i for a, _ in pairs) / sum(p > i for _, p in pairs) for i in range(longest)]

    def _rounds(self) -> list[tuple[int, int]]:
        return [pair for g in self.items for pair in zip(g.accepted_per_round, g.proposed_per_round, strict=True)]

    @property
    def timing(self) -> Timing:
        """Sums over prompts; in a batch, prompts share time and the sums are longer than the clock's."""
        names = ("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "decode_s")
        return Timing(**{name: sum(getattr(g.timing, name) for g in self.items) for name in names})


class Stream:
    """A run to iterate over: each step yields an `Update` (a sequence's newly committed tokens). `result()` at any time gives what there
    is; sequences that were not finished say "cancelled". Breaking off the loop is the way to cancel."""

    def __init__(self, run: Run, tokenizer: Any, draft_limit: int | None) -> None:
        self.run, self.tokenizer, self.draft_limit = run, tokenizer, draft_limit
        self.updates = iter(run)

    def __iter__(self) -> Iterator[Update]:
        return self.updates

    def __next__(self) -> Update:
        return next(self.updates)

    def close(self) -> None:
        """Decode no further."""
        self.updates.close()  # type: ignore[attr-defined]

    def result(self) -> Generations:
        items = self.run.generations()
        text = [decode_text(self.tokenizer, g.token_ids) for g in items] if self.tokenizer is not None else []
        past = sum(_rounds_past(g, self.draft_limit) for g in items) if self.draft_limit is not None else 0
        return Generations(tuple(items), text, past)


def stream(
    verifier: Any,
    draft: Eagle3 | None,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 3,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int | None = None,
    sampling: Sequence[Sampling] | None = None,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    batch_size: int = 1,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    adaptive: bool = False,
    draft_p_min: float = 0.0,
    tree: Tree | tuple[int, int, int] | None = None,
    tokenizer: Any = None,
    graphs: bool | None = None,
) -> Stream:
    """Begin to decode; iterate over what is returned.

    Args:
        verifier: from `load_verifier`, or `models.hf.HFVerifier`.
        draft: may be None where `num_speculative_tokens` is 0.
        prompts: a text, texts (sent through the tokenizer's chat template), or lists of token ids (taken as they are).
        num_speculative_tokens: k; 0 is the verifier alone.
        max_new_tokens: per prompt.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: see
            `decode.request.Sampling`; temperature 0 is greedy.
        seed: prompt i uses seed + i * 1000003, whatever the batch; None draws seeds, which generations tell.
        sampling: settings of each prompt, instead of the eight above.
        stop: an output ends with the token that completes one of these texts; text, ids and log-probabilities then end there alike.
        ignore_eos: decode on past EOS.
        logprobs: also report each token's log-probability, and those of so many best ones.
        batch_size: sequences at a time; further prompts join as others end.
        draft_sampling: how a draft proposes at a temperature: "greedy", its best tokens (vLLM's default), or "probabilistic", drawn from
            its own distribution. Both leave the verifier's distribution as it is; the first also leaves the very tokens of its seed.
        adaptive: choose k per round, up to num_speculative_tokens; never much slower than k = 0.
        draft_p_min: end a chain where the draft's own probability of the whole chain falls below this (see `decode.draft.EagleDraft`).
        tree: (depth, top_k, nodes) of a dynamic draft tree instead of a chain; num_speculative_tokens is then not read, unless it is 0.
        tokenizer: a transformers tokenizer; None uses the one in the verifier's folder where text is involved.
        graphs: record CUDA graphs; None where there is CUDA.

    Raises:
        ConfigError: see `decode.engine.Run`; text or `stop` without a tokenizer; settings for another number of prompts.
    """
    texts: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
    stops = [stop] if isinstance(stop, str) else list(stop)
    if tokenizer is None and (stops or any(isinstance(p, str) for p in texts) or _has_tokenizer(verifier)):
        tokenizer = load_tokenizer(verifier)
    common = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty)
    settings = list(sampling) if sampling is not None else _seeded(common, seed, len(texts))
    if len(settings) != len(texts):
        raise ConfigError(f"sampling has settings for {len(settings)} prompts; there are {len(texts)}")
    requests = [
        Request(
            encode(tokenizer, prompt) if isinstance(prompt, str) else list(prompt),
            max_new_tokens,
            one,
            () if ignore_eos else None,
            stop_strings(tokenizer, stops) if stops else None,
            logprobs,
        )
        for prompt, one in zip(texts, settings, strict=True)
    ]
    shape = Tree(*tree) if isinstance(tree, tuple) else tree
    proposer = EagleDraft(draft, shape, draft_p_min) if draft is not None and num_speculative_tokens else None
    options = Options(num_speculative_tokens, batch_size, draft_sampling, adaptive, graphs)
    run = Run(verifier, proposer, requests, options, draft.aux_layers if draft is not None else ())
    return Stream(run, tokenizer, draft.config.max_position_embeddings if draft is not None and proposer else None)


def generate(
    verifier: Any,
    draft: Eagle3 | None,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 3,
    max_new_tokens: int = 256,
    progress: bool = False,
    **options: Any,
) -> Generations:
    """Decode every prompt; greedily and one after another unless told otherwise.

    Args:
        progress: show a bar of tokens, with the mean acceptance length so far in every round.
        options: everything else that `stream` takes: temperature, seed, batch_size, tree, ...

    Raises:
        ConfigError: see `stream`.
    """
    from tqdm.auto import tqdm

    running = stream(verifier, draft, prompts, num_speculative_tokens=num_speculative_tokens, max_new_tokens=max_new_tokens, **options)
    if not progress:
        for _ in running:
            pass
        return running.result()
    prompts_left, accepted, rounds = len(running.run.requests), 0, 0
    total, made = prompts_left * max_new_tokens, [0] * prompts_left
    with tqdm(total=total, desc=f"k={num_speculative_tokens}", unit="token") as bar:
        for update in running:
            accepted, rounds = accepted + update.accepted, rounds + (update.proposed > 0)
            made[update.request] += len(update.token_ids)
            if update.finish_reason is not None:
                prompts_left -= 1
                total -= max_new_tokens - made[update.request]  # it stopped early
                bar.total = total
            bar.set_postfix(mean_acceptance_length=f"{1 + accepted / max(rounds, 1):.2f}", prompts_left=prompts_left, refresh=False)
            bar.update(len(update.token_ids))
    return running.result()


def _seeded(common: Sampling, seed: int | None, count: int) -> list[Sampling]:
    return [common if seed is None else replace(common, seed=(seed + i * SEED_STEP) % 2**63) for i in range(count)]


def stop_strings(tokenizer: Any, stops: Sequence[str]) -> Callable[[list[int], int], int | None]:
    """Where an output ends that shall end with the token completing one of `stops`: see `Request.ends_at`.

    Raises:
        ConfigError: an empty stop string.
    """
    if not all(stops):
        raise ConfigError(f"stop is {list(stops)!r}; an empty text would end every output")
    longest = max(len(stop.encode()) for stop in stops)  # a token is at least a byte; 8 more for those that show nothing

    def ends_at(output: list[int], new: int) -> int | None:
        for count in range(len(output) - new + 1, len(output) + 1):
            tail = decode_text(tokenizer, output[max(0, count - longest - 8) : count])
            before = decode_text(tokenizer, output[max(0, count - longest - 8) : count - 1])
            if any(stop in tail and stop not in before for stop in stops):
                return count
        return None

    return ends_at


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of output ids, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _rounds_past(generation: Generation, limit: int) -> int:
    """Rounds that began with `limit` or more committed tokens."""
    committed, count = len(generation.prompt_ids) + 1, 0
    for accepted in generation.accepted_per_round:
        count += committed > limit
        committed += accepted + 1
    return count


def load_tokenizer(verifier: Any) -> Any:
    """The tokenizer in the verifier's folder.

    Raises:
        ConfigError: the folder has none.
    """
    from transformers import AutoTokenizer

    if not _has_tokenizer(verifier):
        raise ConfigError(f"the verifier's folder {verifier.folder} has no tokenizer; pass tokenizer=, or token ids instead of text")
    return AutoTokenizer.from_pretrained(verifier.folder, trust_remote_code=False)


def _has_tokenizer(verifier: Any) -> bool:
    return verifier.folder is not None and (verifier.folder / "tokenizer_config.json").is_file()


def encode(tokenizer: Any, prompt: str, system: str | None = None) -> list[int]:
    """Token ids of one user turn through the chat template, ready for the answer; plain text where the tokenizer has no template."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

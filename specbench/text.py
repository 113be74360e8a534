"""Text in, text out: prompts through the verifier's chat template and tokenizer into the decode loop.

What enters: loaded models and prompts. What leaves: generations with their text. It is the only place where decoding meets text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .decode.draft import EagleChain
from .decode.engine import Generation, Timing, decode
from .errors import ConfigError
from .models.decoder import Decoder
from .models.eagle3 import Eagle3


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
        """1 + accepted draft tokens per round: the bonus token counts, the mean is over all rounds of all prompts. NaN without a round."""
        rounds = [a for g in self.items for a in g.accepted_per_round]
        return 1 + sum(rounds) / len(rounds) if rounds else float("nan")

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of rounds that proposed position i and kept it (unconditional), for i = 1, 2, ..."""
        pairs = [(a, p) for g in self.items for a, p in zip(g.accepted_per_round, g.proposed_per_round, strict=True)]
        longest = max((p for _, p in pairs), default=0)
        return [sum(a > i for a, _ in pairs) / sum(p > i for _, p in pairs) for i in range(longest)]

    @property
    def timing(self) -> Timing:
        """Sums over prompts."""
        names = ("prefill_s", "draft_s", "verify_s", "decode_s")
        return Timing(**{name: sum(getattr(g.timing, name) for g in self.items) for name in names})


def generate(
    verifier: Decoder,
    draft: Eagle3 | None,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 3,
    max_new_tokens: int = 256,
    tokenizer: Any = None,
    progress: bool = False,
) -> Generations:
    """Decode every prompt greedily, one after another.

    Args:
        draft: may be None where `num_speculative_tokens` is 0.
        prompts: a text, texts (sent through the tokenizer's chat template), or lists of token ids (taken as they are).
        num_speculative_tokens: k; 0 is the verifier alone.
        max_new_tokens: per prompt.
        tokenizer: a transformers tokenizer; None uses the one in the verifier's folder where text is involved.
        progress: show a bar with the mean acceptance length so far.

    Raises:
        ConfigError: see `decode.engine.decode`; or text without a tokenizer.
    """
    from tqdm.auto import tqdm

    texts: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
    needs_text = any(isinstance(p, str) for p in texts)
    if tokenizer is None and (needs_text or _has_tokenizer(verifier)):
        tokenizer = load_tokenizer(verifier)
    items = []
    aux_layers = draft.aux_layers if draft is not None else ()
    bar = tqdm(texts, desc=f"k={num_speculative_tokens}", disable=not progress)
    for prompt in bar:
        ids = encode(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        proposer = EagleChain(draft) if draft is not None else None
        items.append(
            decode(
                verifier, proposer, ids, num_speculative_tokens=num_speculative_tokens, max_new_tokens=max_new_tokens, aux_layers=aux_layers
            )
        )
        rounds = [a for g in items for a in g.accepted_per_round]
        bar.set_postfix(mean_acceptance_length=f"{1 + sum(rounds) / max(len(rounds), 1):.2f}", refresh=False)
    text = [tokenizer.decode(g.token_ids, skip_special_tokens=True) for g in items] if tokenizer is not None else []
    limit = draft.config.max_position_embeddings if draft is not None and num_speculative_tokens else None
    past = sum(_rounds_past(g, limit) for g in items) if limit is not None else 0
    return Generations(tuple(items), text, past)


def _rounds_past(generation: Generation, limit: int) -> int:
    """Rounds that began with `limit` or more committed tokens."""
    committed, count = len(generation.prompt_ids) + 1, 0
    for accepted in generation.accepted_per_round:
        count += committed > limit
        committed += accepted + 1
    return count


def load_tokenizer(verifier: Decoder) -> Any:
    """The tokenizer in the verifier's folder.

    Raises:
        ConfigError: the folder has none.
    """
    from transformers import AutoTokenizer

    if not _has_tokenizer(verifier):
        raise ConfigError(f"the verifier's folder {verifier.folder} has no tokenizer; pass tokenizer=, or token ids instead of text")
    return AutoTokenizer.from_pretrained(verifier.folder, trust_remote_code=False)


def _has_tokenizer(verifier: Decoder) -> bool:
    return verifier.folder is not None and (verifier.folder / "tokenizer_config.json").is_file()


def encode(tokenizer: Any, prompt: str, system: str | None = None) -> list[int]:
    """Token ids of one user turn through the chat template, ready for the answer; plain text where the tokenizer has no template."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(prompt)["input_ids"])
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

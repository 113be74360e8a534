"""Training prompts that the verifier invents itself: it continues the user's turn from a few first words.

What enters: `openers.txt` (category and first words, one a line), a loaded verifier, the evaluation prompts to stay clear of.
What leaves: `invented.jsonl`, one `{"category": str, "prompt": str}` a line. It does not know the draft or the answers.
Interrupt it at any time: the writing goes on from finished shards.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from generate import read_text, write_text
from tqdm.auto import tqdm

HERE = Path(__file__).parent
EVALUATION = HERE.parent / "prompts" / "specbench.jsonl"
SHINGLE = 8  # words in a row that no training prompt may share with an evaluation prompt
LONGEST = 100  # tokens; a turn that is not finished by then is dropped


def openers() -> list[tuple[str, str]]:
    """(category, first words) of every line of `openers.txt`."""
    lines = (HERE / "openers.txt").read_text().splitlines()
    return [(category, words) for category, words in (line.split(": ", 1) for line in lines if line)]


def shingles(text: str) -> set[tuple[str, ...]]:
    """All runs of `SHINGLE` words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def fold(text: str) -> str:
    return " ".join(text.lower().split())


def content(text: str) -> set[str]:
    """The words of more than three letters, which carry the subject."""
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 3}


def near_copy(words: set[str], other: set[str]) -> bool:
    """Whether half of an evaluation prompt's content words, or three in four of one's own, are shared."""
    shared = len(words & other)
    return shared >= 3 and (2 * shared >= len(other) or 4 * shared >= 3 * len(words))


def admitted(rows: Iterable[dict[str, str]], evaluation: list[str]) -> list[dict[str, str]]:
    """The rows with 5 to 120 words that repeat neither each other nor an evaluation prompt, and come near none of those."""
    forbidden: set[tuple[str, ...]] = set().union(*map(shingles, evaluation))
    contents = [content(prompt) for prompt in evaluation]
    seen = {fold(prompt) for prompt in evaluation}
    kept = []
    for row in rows:
        prompt = row["prompt"]
        words = content(prompt)
        if not 5 <= len(prompt.split()) <= 120 or fold(prompt) in seen or shingles(prompt) & forbidden:
            continue
        if not any(near_copy(words, other) for other in contents):
            seen.add(fold(prompt))
            kept.append(row)
    return kept


def evaluation_prompts(path: Path = EVALUATION) -> list[str]:
    return [turn for line in path.read_text().splitlines() for turn in json.loads(line)["turns"]]


def invent(verifier: Any, tokenizer: Any, work: Path, count: int, *, temperature: float = 0.9, seed: int = 0, batch: int = 192) -> Path:
    """Let `verifier` write `count` user turns; returns the file of those that are finished, distinct and admitted."""
    out = work / "invented.jsonl"
    if out.exists():
        return out
    rng, starts = random.Random(seed), openers()
    chosen = [rng.choice(starts) for _ in range(count)]
    marker = "\x00"
    frame = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False).split(marker)[0]

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    encoded = [encode(frame + words) for _, words in chosen]
    write_text(
        verifier,
        encoded,
        work,
        aux_layers=(),
        eos_ids=verifier.eos_ids,
        max_new_tokens=LONGEST,
        batch=batch,
        sampled_share=1.0,
        temperature=temperature,
        seed=seed,
    )
    rows = finished_turns(work, tokenizer, verifier.eos_ids, [category for category, _ in chosen], len(encode(frame)))
    rng.shuffle(rows)
    kept = admitted(rows, evaluation_prompts())
    partial = out.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    partial.rename(out)
    return out


def finished_turns(work: Path, tokenizer: Any, eos_ids: frozenset[int], categories: list[str], skip: int) -> list[dict[str, str]]:
    """The turns in the shards of `work` that end; the first `skip` tokens are not theirs."""
    rows = []
    for shard in tqdm(list(read_text(work)), desc="shards"):
        begin = 0
        for length, prompt_id in zip(shard["lengths"].tolist(), shard["prompt_ids"].tolist(), strict=True):
            tokens = shard["tokens"][begin : begin + length].tolist()
            begin += length
            if tokens[-1] in eos_ids:
                text = tokenizer.decode(tokens[skip:], skip_special_tokens=True).strip()
                rows.append({"category": categories[prompt_id], "prompt": text})
    return rows

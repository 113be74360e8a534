"""Prompt sets: jsonl files in the shape of EAGLE's question.jsonl.

What enters: a file, or the name of a shipped set. What leaves: `Prompt`s in file order, and a hash of what they say. It does not know
tokenizers, chat templates or models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: user turns, to be asked one after another in one conversation."""

    question_id: int
    category: str
    turns: tuple[str, ...]


def load_prompts(path_or_name: str | Path = "specbench") -> list[Prompt]:
    """The prompts of a file, in its order.

    Args:
        path_or_name: name of a shipped set ("specbench": 64 prompts, 8 in each of 8 categories), else a path. Each line is an object
            with `question_id` (int), `category` (str) and `turns` (list of str); other keys (`reference`, ...) are not read. Blank
            lines are skipped.

    Raises:
        DataError: a line is not of that shape or repeats an id (the text names file and line), or there is no prompt.
        FileNotFoundError: neither a shipped set nor a file.
    """
    path = _locate(path_or_name)
    prompts: list[Prompt] = []
    first_line: dict[int, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        prompt = _parse(line, f"{path}, line {number}")
        if prompt.question_id in first_line:
            before = first_line[prompt.question_id]
            raise DataError(f"{path}, line {number}: question_id {prompt.question_id} was already used on line {before}; make it unique")
        first_line[prompt.question_id] = number
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} holds no prompt; expected one JSON object per line with question_id, category and turns")
    return prompts


def as_prompts(prompts: str | Path | Sequence[Prompt | str] | None) -> list[Prompt]:
    """What callers may give as prompts, as a list: None (the shipped set), a name or path, `Prompt`s, or bare texts.

    Bare texts get ids by their place, from 1, and the category "custom".

    Raises:
        DataError: the sequence is empty, mixes the two kinds or repeats an id.
    """
    if prompts is None:
        return load_prompts()
    if isinstance(prompts, str | Path):
        return load_prompts(prompts)
    given = list(prompts)
    kinds = {type(prompt).__name__ for prompt in given}
    if len(kinds) != 1 or not isinstance(given[0], Prompt | str):
        raise DataError(f"prompts hold {sorted(kinds) or 'nothing'}; expected Prompt objects only, or texts only")
    listed = [p if isinstance(p, Prompt) else Prompt(i, "custom", (p,)) for i, p in enumerate(given, 1)]
    ids = [prompt.question_id for prompt in listed]
    repeated = sorted({i for i in ids if ids.count(i) > 1})
    if repeated:
        raise DataError(f"question_ids {repeated} occur more than once in the given prompts; ids must be unique")
    return listed


def prompt_set_hash(prompts: Sequence[Prompt]) -> str:
    """sha256 (hex) of the canonical content: one line [question_id, category, turns] per prompt as compact ASCII JSON, in the given order.

    Spacing, key order and unread keys of the file do not change it; any other change of ids, texts or order does.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.question_id, prompt.category, list(prompt.turns)], separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def limit_per_category(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first `limit` prompts of every category, in the given order: a smaller set with the same balance."""
    if limit < 1:
        raise DataError(f"limit per category is {limit}; expected at least 1")
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def _locate(path_or_name: str | Path) -> Path:
    shipped = sorted(path.stem for path in SHIPPED.glob("*.jsonl"))
    if isinstance(path_or_name, str) and path_or_name in shipped:
        return SHIPPED / f"{path_or_name}.jsonl"
    path = Path(path_or_name)
    if not path.is_file():
        names = ", ".join(shipped) or "none"
        raise FileNotFoundError(f"prompts: {path_or_name!r} is neither a file nor a shipped set; shipped in {SHIPPED}: {names}")
    return path


def _parse(line: bytes, where: str) -> Prompt:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise DataError(f"{where}: not JSON in UTF-8 ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}; expected an object with question_id, category and turns")
    question_id, category, turns = (_field(row, key, where) for key in ("question_id", "category", "turns"))
    if not isinstance(question_id, int) or isinstance(question_id, bool):
        raise DataError(f"{where}: question_id is {question_id!r}; expected an integer")
    if not isinstance(category, str) or not category.strip():
        raise DataError(f"{where}: category is {category!r}; expected a text that is not blank")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DataError(f"{where}: turns is {turns!r}; expected a list of texts, none of them blank")
    try:
        "".join([category, *turns]).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a text holds half of a surrogate pair ({error}); no tokenizer can read it") from error
    return Prompt(question_id, category, tuple(turns))


def _field(row: dict[str, object], key: str, where: str) -> object:
    if key not in row:
        raise DataError(f"{where}: no key {key!r}; it has {sorted(row)}, expected question_id, category and turns")
    return row[key]

"""Prompt sets: the shipped one, files in the shapes that circulate, data sets of the hub.

What enters: a name, a file, a hub id, or texts. What leaves: a `PromptSet`, in the order of its source, which knows its licence; and a hash
of what it asks. It does not know tokenizers, chat templates or models.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, SupportsIndex, overload

from ..errors import DataError
from .prompt_shapes import LICENCES, NOT_STATED, TEXT, Shape, licence_of, shape_of

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "prompts"
HUB = "hub:"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: user turns, to be asked one after another in one conversation."""

    question_id: int
    category: str
    turns: tuple[str, ...]


class PromptSet(list[Prompt]):
    """Prompts with where they come from; a list of them in every other respect.

    name: of the set, "" for prompts given one by one. source: path, hub id or "given by the caller". licence: what is known of it.
    """

    def __init__(self, prompts: Iterable[Prompt], name: str = "", source: str = "given by the caller", licence: str = NOT_STATED) -> None:
        super().__init__(prompts)
        self.name, self.source, self.licence = name, source, licence

    @overload
    def __getitem__(self, index: SupportsIndex) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptSet: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Prompt | PromptSet:
        found = super().__getitem__(index)
        return found if isinstance(found, Prompt) else self.of(found)

    def of(self, prompts: Iterable[Prompt]) -> PromptSet:
        """Some of these prompts, as a set of the same name and licence."""
        return PromptSet(prompts, self.name, self.source, self.licence)

    def describe(self) -> dict[str, Any]:
        """name, source, licence, sha256 (`prompt_set_hash`), num_prompts, categories with their counts; JSON values only."""
        categories = [prompt.category for prompt in self]
        return {
            "name": self.name, "source": self.source, "licence": self.licence, "sha256": prompt_set_hash(self), "num_prompts": len(self),
            "categories": {name: categories.count(name) for name in dict.fromkeys(categories)},
        }  # fmt: skip

    def __repr__(self) -> str:
        d = self.describe()
        named = f"{len(self)} prompts of {self.name or 'the caller'} in {len(d['categories'])} categories"
        return f"{named}; licence: {self.licence}; sha256 {d['sha256'][:12]}"


def load_prompts(source: str | Path = "specbench", *, licence: str | None = None) -> PromptSet:
    """The prompts of a source, in its order.

    Args:
        source: name of a shipped set ("specbench": 64 prompts, 8 in each of 8 categories); a path of .jsonl, .json (a list) or .parquet,
            the first two also .gz, in one of the shapes of `prompt_shapes`; or "hub:<dataset id>", "hub:<id>:<config>",
            "hub:<id>:<config>:<split>" for a data set of the hub (needs `datasets`). Blank lines are skipped.
        licence: what the caller knows of it, in place of what the set's name or shape tells.

    Raises:
        DataError: a line is of no shape, of another shape than the first, or repeats an id (the text names file and line); no prompt; or
            `datasets` is missing, or the split is not clear.
        FileNotFoundError: neither a shipped set nor a file.
    """
    if isinstance(source, str) and source.startswith(HUB):
        name, rows, known = _from_hub(source.removeprefix(HUB))
        where = source
    else:
        path = _locate(source)
        where, rows = "shipped with specbench" if path.parent == SHIPPED else str(source), _lines(path)
        name = path.name.partition(".")[0]
        known = LICENCES.get(name) if path.parent == SHIPPED else None
    prompts, shape = _parse_all(rows)
    if not prompts:
        raise DataError(
            f"{where} holds no prompt; expected one JSON object per line with question_id, category and turns, or another shape"
        )
    seen = licence_of(shape, [prompt.category for prompt in prompts], [prompt.question_id for prompt in prompts])
    return PromptSet(prompts, name, where, licence or known or seen)


def as_prompts(prompts: str | Path | Sequence[Prompt | str] | None) -> PromptSet:
    """What callers may give as prompts, as a set: None (the shipped one), what `load_prompts` takes, `Prompt`s, or bare texts.

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
    return prompts.of(listed) if isinstance(prompts, PromptSet) else PromptSet(listed)


def prompt_set_hash(prompts: Sequence[Prompt]) -> str:
    """sha256 (hex) of the canonical content: one line [question_id, category, turns] per prompt as compact ASCII JSON, in the given order.

    Spacing, key order and unread keys of the file do not change it; any other change of ids, texts or order does.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.question_id, prompt.category, list(prompt.turns)], separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def limit_per_category(prompts: Sequence[Prompt], limit: int) -> PromptSet:
    """The first `limit` prompts of every category, in the given order: a smaller set with the same balance."""
    if limit < 1:
        raise DataError(f"limit per category is {limit}; expected at least 1")
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= limit:
            kept.append(prompt)
    return prompts.of(kept) if isinstance(prompts, PromptSet) else PromptSet(kept)


Rows = Iterator[tuple[str, int, Any]]  # where it stands, its number, the decoded line


def _locate(source: str | Path) -> Path:
    shipped = sorted(path.stem for path in SHIPPED.glob("*.jsonl"))
    if isinstance(source, str) and source in shipped:
        return SHIPPED / f"{source}.jsonl"
    path = Path(source)
    if not path.is_file():
        names = ", ".join(shipped) or "none"
        raise FileNotFoundError(
            f"prompts: {source!r} is neither a file nor a shipped set; shipped in {SHIPPED}: {names}; a data set of the hub is {HUB}<id>"
        )
    return path


def _lines(path: Path) -> Rows:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    kind = path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix
    if kind == ".parquet":
        import pyarrow.parquet as pq

        yield from ((f"{path}, row {number}", number, row) for number, row in enumerate(pq.read_table(path).to_pylist(), 1))
    elif kind == ".json":
        rows = _decode(data, str(path))
        if not isinstance(rows, list):
            raise DataError(f"{path}: a {type(rows).__name__}; expected a list of prompts, or one JSON object per line in a .jsonl file")
        yield from ((f"{path}, entry {number}", number, row) for number, row in enumerate(rows, 1))
    else:
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                yield f"{path}, line {number}", number, _decode(line, f"{path}, line {number}")


def _decode(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise DataError(f"{where}: not JSON in UTF-8 ({error})") from error


def _from_hub(text: str) -> tuple[str, Rows, str | None]:
    """Name, rows and licence of a data set of the hub, or of a folder in the hub's layout."""
    name, config, split = (*text.split(":"), "", "")[:3]
    if find_spec("datasets") is None:
        raise DataError(f"{HUB}{text} needs the package datasets, which is not installed; next: pip install 'specbench[datasets]'")
    datasets: Any = import_module("datasets")
    splits = [split] if split else datasets.get_dataset_split_names(name, config or None)
    if len(splits) != 1:
        raise DataError(f"{HUB}{text} has the splits {', '.join(splits)}; say which: {HUB}{name}:{config}:{splits[0]}")
    table = datasets.load_dataset(name, config or None, split=splits[0])
    known = LICENCES.get(name) or table.info.license or None
    return name, ((f"{HUB}{text}, row {number}", number, dict(row)) for number, row in enumerate(table, 1)), known


def _parse_all(rows: Rows) -> tuple[list[Prompt], Shape]:
    prompts: list[Prompt] = []
    first_place: dict[int, str] = {}
    shape: Shape | None = None
    for where, number, row in rows:
        if not isinstance(row, dict):
            raise DataError(
                f"{where}: a {type(row).__name__}; expected an object with question_id, category and turns, or of another shape"
            )
        try:
            found = shape_of(row)
            if shape is not None and found is not shape:
                raise DataError(f"its keys {sorted(row)} are those of {found.name}, and all before it are of {shape.name}")
            shape = found
            prompt = _prompt(*found.read(row, number))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if prompt.question_id in first_place:
            before = first_place[prompt.question_id].rpartition(", ")[2]
            raise DataError(f"{where}: question_id {prompt.question_id} was already used on {before}; make it unique")
        first_place[prompt.question_id] = where
        prompts.append(prompt)
    return prompts, shape or TEXT


def _prompt(question_id: Any, category: Any, turns: Any) -> Prompt:
    if not isinstance(question_id, int) or isinstance(question_id, bool):
        raise DataError(f"question_id is {question_id!r}; expected an integer")
    if not isinstance(category, str) or not category.strip():
        raise DataError(f"category is {category!r}; expected a text that is not blank")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DataError(f"turns is {turns!r}; expected a list of texts, none of them blank")
    try:
        "".join([category, *turns]).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a text holds half of a surrogate pair ({error}); no tokenizer can read it") from error
    return Prompt(question_id, category, tuple(turns))

"""What a run leaves on disk: rows of one schema, their provenance, and a folder that stays readable after a crash.

What enters: measured rows and the facts of the run. What leaves: `provenance.json` and `results.parquet` in a folder of their own, and
tables read back from such folders. It does not know how rows are measured, nor any figure derived from them.
"""

from __future__ import annotations

import contextlib
import json
import re
import types
import typing
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from .atomic import write_bytes, write_json

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 1
PROVENANCE, RESULTS = "provenance.json", "results.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt turn at one k, in one repeat of one run. Raw: every rate is derived later (`metrics`, `summary`).

    run_id: name of the run folder, after that of the folder around it. engine: whose loop decoded, "specbench" or "transformers".
    verifier, draft: names as given; draft and policy are "" where no draft exists. verifier_format: "bf16", "w4a16", ... k:
    num_speculative_tokens, 0 for plain decoding. temperature: 0.0, greedy. dtype: of activations. threads: of torch on the CPU.
    prompt_set_hash: see `prompts.prompt_set_hash`. turn: place in the conversation, from 0. repeat: from 0. status: "ok", or "failed" with
    `error` ("" if ok); a failed row keeps no count or time of an earlier one. finish_reason: "eos", "length", "context", or "" if failed.
    num_prompt_tokens: None if failed before it was known. accepted_per_round: draft tokens kept, bonus not counted. proposed_per_round:
    draft tokens really proposed. The first output token belongs to no round. token_ids: the output. Times are seconds, None where not
    measured: prefill_s ends with the first token, decode_s = draft_s + verify_s + other_s is everything after it, total_s = prefill_s +
    decode_s.
    """

    run_id: str
    schema_version: int = SCHEMA_VERSION
    engine: str
    verifier: str
    verifier_format: str
    draft: str
    policy: str
    k: int
    temperature: float = 0.0
    dtype: str
    device: str
    threads: int
    max_new_tokens: int
    prompt_set_hash: str
    question_id: int
    turn: int
    category: str
    repeat: int
    status: str
    error: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    accepted_per_round: list[int]
    proposed_per_round: list[int]
    token_ids: list[int]
    prefill_s: float | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    other_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


def schema() -> pa.Schema:
    """The Arrow schema of a table of rows, read off `Row`'s annotations."""
    import pyarrow as pa

    arrow = {str: pa.string(), int: pa.int64(), float: pa.float64(), list[int]: pa.list_(pa.int64())}
    fields = []
    for name, hint in typing.get_type_hints(Row).items():
        nullable = isinstance(hint, types.UnionType)
        kind = typing.get_args(hint)[0] if nullable else hint
        fields.append(pa.field(name, arrow[kind], nullable=nullable))
    return pa.schema(fields)


def to_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Rows as a tidy table with the columns of `Row`; empty tables have them too. `num_prompt_tokens` is Int64, to hold a missing value."""
    import pyarrow as pa

    return _to_pandas(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema()))


def new_run(root: str | Path, label: str = "run") -> Path:
    """Make an empty run folder `<label>-<UTC date>-<time>` under `root`; one that exists is never reused, a number is appended instead."""
    if not re.fullmatch(r"\w[\w.+-]*", label):
        raise DataError(f"run label is {label!r}; expected a file name of letters, digits and . + - _, not starting with . + -")
    stem = f"{label}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        folder = Path(root) / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=False)
            return folder
    raise DataError(f"{root} already holds 999 runs named {stem}; choose another label")


class Recorder:
    """Fills one run folder: provenance when entered, rows as they come, `"complete": true` only when left without an exception.

    Args:
        folder: an empty folder (see `new_run`).
        provenance: facts of the run, known before it (see `provenance.provenance`).
    """

    def __init__(self, folder: str | Path, provenance: dict[str, Any]) -> None:
        self.folder = Path(folder).resolve()
        self.run_id = f"{self.folder.parent.name}/{self.folder.name}"
        self.rows: list[Row] = []
        self._provenance = {"run_id": self.run_id, "schema_version": SCHEMA_VERSION, **provenance, "complete": False}

    def __enter__(self) -> Recorder:
        self.folder.mkdir(parents=True, exist_ok=True)
        taken = [name for name in (PROVENANCE, RESULTS) if (self.folder / name).exists()]
        if taken:
            raise DataError(f"{self.folder} already holds {', '.join(taken)} of an earlier run; give a new folder")
        self._stamp()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._provenance["finished"] = now()
        self._provenance["complete"] = kind is None
        if kind is not None:
            self._provenance["stopped_by"] = f"{kind.__name__}: {error}"
        self._stamp()

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows and bring results.parquet up to date."""
        self.rows.extend(rows)
        write_table(self.frame(), self.folder / RESULTS)

    def frame(self) -> pd.DataFrame:
        """All rows so far."""
        return to_frame(self.rows)

    def _stamp(self) -> None:
        write_json(self.folder / PROVENANCE, self._provenance)


def now() -> str:
    """UTC time, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_table(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a table as Parquet, whole or not at all; a table of rows keeps the types of the schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = schema()
    known = rows if list(frame.columns) == rows.names else None
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pandas(frame, schema=known, preserve_index=False), sink)
    write_bytes(Path(path), sink.getvalue().to_pybytes())


def load_runs(folder: str | Path, *, mixed_prompts: bool = False) -> pd.DataFrame:
    """Every row under a run folder, or under a folder of run folders.

    Acceptance depends on content, so runs over different prompts are not put into one table unless `mixed_prompts` says so. Runs that
    did not finish are read as far as they got, with a warning that names them.

    Raises:
        FileNotFoundError: no results.parquet in or right below `folder`.
        DataError: runs with different prompt-set hashes, another schema version, or columns that are not the schema's.
    """
    import pandas as pd

    root = Path(folder)
    files = [root / RESULTS] if (root / RESULTS).is_file() else sorted(root.glob(f"*/{RESULTS}"))
    if not files:
        raise FileNotFoundError(f"no {RESULTS} in {root} or in a folder right below it; `specbench.benchmark` writes one")
    tables = [_read(file) for file in files]
    hashes = {str(file.parent): sorted(set(table.prompt_set_hash)) for file, table in zip(files, tables, strict=True)}
    if len({value for found in hashes.values() for value in found}) > 1 and not mixed_prompts:
        listed = "; ".join(f"{where}: {', '.join(value[:12] for value in found)}" for where, found in hashes.items())
        raise DataError(
            f"the runs used different prompts, so their figures do not compare (prompt-set hashes {listed}); "
            "read one run, or pass mixed_prompts=True"
        )
    unfinished = [file.parent.name for file in files if not _is_complete(file.parent)]
    if unfinished:
        warnings.warn(f"not finished, read as far as they got: {', '.join(unfinished)}", stacklevel=2)
    return pd.concat(tables, ignore_index=True)


def _read(file: Path) -> pd.DataFrame:
    import pyarrow.parquet as pq

    table, expected = pq.read_table(file), schema()
    versions = set(table["schema_version"].to_pylist()) if "schema_version" in table.column_names else {None}
    if versions - {SCHEMA_VERSION}:
        raise DataError(f"{file} has schema version {sorted(map(str, versions))}; this version of specbench reads {SCHEMA_VERSION}")
    missing, unknown = set(expected.names) - set(table.column_names), set(table.column_names) - set(expected.names)
    if missing or unknown:
        raise DataError(f"{file} is not a table of rows: it lacks {sorted(missing)} and has unknown {sorted(unknown)}")
    return _to_pandas(table.select(expected.names).cast(expected))


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas()
    return frame.astype({"num_prompt_tokens": "Int64"})


def _is_complete(folder: Path) -> bool:
    try:
        return json.loads((folder / PROVENANCE).read_text(encoding="utf-8")).get("complete") is True
    except (FileNotFoundError, ValueError):
        return False

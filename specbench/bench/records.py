"""What a run leaves on disk: rows of one schema, their provenance, and a folder that stays readable after a crash.

What enters: measured rows (`schema.Row`) and the facts of the run. What leaves: `provenance.json` and `results.parquet` in a folder of
their own, and one table read back from many such folders. It does not know how rows are measured, nor any figure derived from them.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from .atomic import json_object, write_bytes, write_json
from .schema import SCHEMA_VERSION, Row, schema, to_frame, to_pandas, upgrade

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Recorder", "Row", "load_runs", "new_run", "now", "read_provenance", "to_frame", "write_table"]
PROVENANCE, RESULTS = "provenance.json", "results.parquet"


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
    """Every row of every run at or below a folder, as one table; tables of older schema versions are brought up to this one.

    Acceptance depends on content, so runs over different prompts are not put into one table unless `mixed_prompts` says so. Runs that
    did not finish are read as far as they got, with a warning that names them. Folders whose name starts with a dot are not read.

    Raises:
        FileNotFoundError: no results.parquet at or below `folder`.
        DataError: runs with different prompt-set hashes, the same run twice, a newer schema version, or columns that are not the schema's.
    """
    import pandas as pd

    root = Path(folder)
    stamped = _below(root, PROVENANCE)
    files = _below(root, RESULTS)
    unfinished = [path.parent for path in stamped if not _is_complete(path.parent)]
    unfinished += [file.parent for file in files if not (file.parent / PROVENANCE).is_file()]
    if not files:
        began = f" ({len(unfinished)} runs began and have no row yet)" if unfinished else ""
        raise FileNotFoundError(f"no {RESULTS} at or below {root}{began}; `specbench.benchmark` writes one")
    tables = [_read(file) for file in files]
    _check_prompts(files, tables, mixed_prompts)
    homes: dict[str, Path] = {}
    for file, table in zip(files, tables, strict=True):
        for run_id in table.run_id.unique():
            if run_id in homes:
                raise DataError(
                    f"run {run_id} is there twice, in {homes[run_id]} and in {file.parent}; read one of them, or remove the copy"
                )
            homes[run_id] = file.parent
    if unfinished:
        names = ", ".join(sorted(folder.name for folder in unfinished))
        warnings.warn(f"not finished, read as far as they got: {names}", stacklevel=2)
    return pd.concat([table for table in tables if len(table)] or tables, ignore_index=True)


def _below(root: Path, name: str) -> list[Path]:
    found = [path for path in root.rglob(name) if path.is_file()]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts))


def _check_prompts(files: Sequence[Path], tables: Sequence[pd.DataFrame], mixed_prompts: bool) -> None:
    hashes = {str(file.parent): sorted(set(table.prompt_set_hash)) for file, table in zip(files, tables, strict=True)}
    if len({value for found in hashes.values() for value in found}) > 1 and not mixed_prompts:
        listed = "; ".join(f"{where}: {', '.join(value[:12] for value in found)}" for where, found in hashes.items())
        raise DataError(
            f"the runs used different prompts, so their figures do not compare (prompt-set hashes {listed}); "
            "read one run, or pass mixed_prompts=True"
        )


def _read(file: Path) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file).read()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} is no Parquet file ({error}); specbench writes it whole, so it was cut or replaced later") from error
    return to_pandas(upgrade(table, str(file)))


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """What a run folder says of its run; empty where it says nothing readable."""
    return json_object(Path(folder) / PROVENANCE)


def _is_complete(folder: Path) -> bool:
    return read_provenance(folder).get("complete") is True

"""The index of a sweep folder: one row per run, as CSV for people and Parquet for programs.

What enters: rows of plain values. What leaves: `index.csv` and `index.parquet`, each written whole. It does not know how runs are made.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic import write_bytes

if TYPE_CHECKING:
    import pandas as pd

CSV, PARQUET = "index.csv", "index.parquet"


def write_index(folder: Path, rows: Sequence[Mapping[str, Any]], earlier: pd.DataFrame | None = None) -> pd.DataFrame:
    """Write both files and return their table: `rows`, then those of an `earlier` index whose run_id is not among them.

    Lists, dictionaries and columns of mixed kinds are kept as JSON text, since a column of a file has one type.
    """
    import pandas as pd

    table = pd.DataFrame(rows)
    if earlier is not None:
        kept = earlier[~earlier.run_id.isin(table.run_id)]
        table = pd.concat([table, kept.dropna(axis=1, how="all")], ignore_index=True) if len(kept) else table
    stored = table.apply(_one_type)
    stored = stored.astype({"exit_status": "Int64"})
    data = io.BytesIO()
    stored.to_parquet(data, index=False)
    write_bytes(folder / PARQUET, data.getvalue())
    write_bytes(folder / CSV, stored.to_csv(index=False).encode())
    return table


def read_index(folder: str | Path) -> pd.DataFrame | None:
    """The index of a sweep folder; None where there is none."""
    import pandas as pd

    path = Path(folder) / PARQUET
    return pd.read_parquet(path) if path.is_file() else None


def _one_type(column: pd.Series[Any]) -> pd.Series[Any]:
    kinds = {type(value) for value in column if value is not None and value == value}
    if kinds <= {str} or kinds <= {bool} or kinds <= {int} or kinds <= {int, float}:
        return column
    return column.map(lambda value: value if value is None or isinstance(value, str) else json.dumps(value, default=str))

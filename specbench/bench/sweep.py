"""Run one notebook several times, each in a process of its own.

What enters: a notebook and a list of parameter sets. What leaves: one run folder and one row per set; a set that fails is a failed row and
does not stop the others. Works inside a notebook too, as nothing runs in the caller's event loop.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .notebooks import RECORD, check_parameters

if TYPE_CHECKING:
    import pandas as pd


def sweep(notebook: str | Path, run_dir: str | Path, grid: Sequence[Mapping[str, Any]], *, progress: bool = True) -> pd.DataFrame:
    """Run `notebook` once per entry of `grid`, one after another, into `run_dir/00`, `run_dir/01`, ..., each with its log beside it.

    A set that already lies complete in its folder is not run again.

    Returns:
        A row per set: its parameters, then `status` ("complete" or "failed"), `exit_status`, `seconds`, `error`, `folder`, and what the
        notebook gave to `finish`.

    Raises:
        ConfigError: a set has an unknown name or a value of another type; nothing was started.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    source, folder = Path(notebook).resolve(), Path(run_dir).resolve()
    for parameters in grid:
        check_parameters(source, parameters)
    rows = []
    for index, parameters in enumerate(tqdm(grid, desc=source.stem, disable=not progress)):
        child, log = folder / f"{index:02d}", folder / f"{index:02d}.log"
        folder.mkdir(parents=True, exist_ok=True)
        pairs = [text for name, value in parameters.items() for text in ("-p", name, value if isinstance(value, str) else repr(value))]
        command = [sys.executable, "-m", "specbench.bench.notebooks", str(source), "--run-dir", str(child), "--resume", "--quiet", *pairs]
        with log.open("wb") as stream:
            exit_status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
        rows.append({**parameters, **_outcome(child, exit_status, log), "folder": str(child)})
    return pd.DataFrame(rows)


def _outcome(child: Path, exit_status: int, log: Path) -> dict[str, Any]:
    record = json.loads((child / RECORD).read_bytes()) if (child / RECORD).is_file() else {}
    good = exit_status == 0 and record.get("complete", False)
    error = None if good else record.get("error") or f"see {log}"
    facts = record["facts"] if good else {}
    status = "complete" if good else "failed"
    return {"status": status, "exit_status": exit_status, "seconds": record.get("seconds"), "error": error, **facts}

"""Run one notebook over many parameter sets, each in a process of its own.

What enters: a notebook and parameter sets, or a sweep file (`sweep_spec`). What leaves: a run folder per set, and an index of them. It does
not know what a notebook measures. Works inside a notebook too, as nothing runs in the caller's event loop.

A run is known by its id: a hash of the notebook and of all its parameter values. One that lies in the folder complete is never run again or
written over; one that failed or was interrupted moves to `.earlier/` and is run anew. A failing run does not stop the others.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .atomic import json_object, write_json
from .notebooks import RECORD, check_parameters
from .records import now
from .session import MARKER
from .sweep_index import read_index, write_index
from .sweep_local import Task, run_local
from .sweep_spec import read_spec

if TYPE_CHECKING:
    import pandas as pd

SWEEP, LOCK, EARLIER = "sweep.json", ".lock", ".earlier"
DIGITS = 10  # of a run id's hash


@dataclass(frozen=True, slots=True)
class Run:
    """One parameter set. given: as the caller wrote it. values: with the notebook's own values for the rest."""

    run_id: str
    folder: Path
    log: Path
    given: dict[str, Any]
    values: dict[str, Any]

    @property
    def complete(self) -> bool:
        return all(json_object(self.folder / name).get("complete") is True for name in (RECORD, MARKER))


def sweep_file(
    file: str | Path, *, jobs: int | None = None, ray: str | None = None, run_dir: str | Path | None = None, progress: bool = True
) -> pd.DataFrame:
    """Run what a sweep file describes; what is given here goes before what the file says. See `sweep`."""
    spec = read_spec(file)
    folder = spec.run_dir if run_dir is None else Path(run_dir)
    return sweep(spec.notebook, folder, spec.sets, jobs=jobs or spec.jobs, threads=spec.threads, ray=ray, progress=progress)


def sweep(
    notebook: str | Path,
    run_dir: str | Path,
    sets: Sequence[Mapping[str, Any]],
    *,
    jobs: int | None = None,
    threads: int | None = None,
    ray: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Run `notebook` once per parameter set into `run_dir/<run id>`, each with its log beside it; a page over all is `summary.html`.

    Args:
        jobs, threads: see `sweep_local.run_local`, or `sweep_ray.run_on_ray` where `ray` is given.
        ray: address of a Ray cluster; None runs on this machine.

    Returns:
        The index, also in `index.csv` and `index.parquet`: a row per set with `run_id`, its parameters, `status` ("complete", "failed",
        "not run"), `exit_status` (0 for a run that lay there complete), `seconds`, `error`, `folder` (below `run_dir`), and what the
        notebook gave to `finish`. Runs of an earlier sweep in that folder keep their rows after these.

    Raises:
        ConfigError: no set, an unknown name, a value of another type, two equal sets, or a folder at which another sweep is at work.
            Nothing was started.
    """
    from filelock import FileLock, Timeout
    from tqdm.auto import tqdm

    source, folder = Path(notebook).resolve(), Path(run_dir).resolve()
    runs = plan_runs(source, folder, sets)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"another sweep is at work in {folder}; wait for it, or give another folder") from None
    with lock:
        described = {"notebook": str(source), "argv": sys.argv, "started": now(), "runs": {run.run_id: run.values for run in runs}}
        write_json(folder / SWEEP, described)
        exits = {run.run_id: 0 for run in runs if run.complete}
        todo = [run for run in runs if run.run_id not in exits]
        earlier = read_index(folder)
        with tqdm(total=len(runs), initial=len(exits), desc=source.stem, unit="run", disable=not progress) as bar:
            try:
                for run, status in _execute(source, folder, todo, jobs, threads, ray):
                    exits[run.run_id] = status
                    write_index(folder, [_row(one, exits) for one in runs], earlier)
                    if status or not run.complete:
                        bar.write(f"{run.run_id} failed: {_row(run, exits)['error']}", file=sys.stderr)
                    bar.update()
            finally:
                table = write_index(folder, [_row(one, exits) for one in runs], earlier)
        from ..page import sweep_page

        sweep_page(folder)
    return table


def plan_runs(notebook: Path, folder: Path, sets: Sequence[Mapping[str, Any]]) -> list[Run]:
    """The runs of a sweep, checked as a whole before any is started."""
    if not sets:
        raise ConfigError(f"no parameter set for {notebook.name}; give at least one, {{}} for the notebook's own values")
    runs = []
    for number, given in enumerate(sets, 1):
        try:
            values = check_parameters(notebook, {**given, "run_dir": ""})
        except ConfigError as error:
            raise ConfigError(f"set {number} of {len(sets)}: {error}; nothing was started") from error
        if "run_dir" in given:
            raise ConfigError(f"set {number} of {len(sets)} gives run_dir; a sweep chooses the folder of each run below its own")
        runs.append(_run(notebook, folder, dict(given), values))
    ids = [run.run_id[-DIGITS:] for run in runs]
    twice = next((i for i, run_id in enumerate(ids) if run_id in ids[:i]), None)
    if twice is not None:
        raise ConfigError(f"sets {ids.index(ids[twice]) + 1} and {twice + 1} are equal ({runs[twice].given}); nothing was started")
    return runs


def _run(notebook: Path, folder: Path, given: dict[str, Any], values: dict[str, Any]) -> Run:
    identity = {"notebook": hashlib.sha256(notebook.read_bytes()).hexdigest(), "values": {**values, "run_dir": None}}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:DIGITS]
    words = "_".join(re.sub(r"[^\w.+]+", "-", str(value)).strip("-.")[-24:] for value in given.values() if value not in ("", [], None))
    # The hash is the identity; the words before it are for people, and may differ for the same values.
    found = next((path.name for path in folder.glob(f"*{digest}") if path.is_dir()), None)
    run_id = found or f"{words[:60].strip('-_.') or 'run'}-{digest}"
    return Run(run_id, folder / run_id, folder / f"{run_id}.log", given, values)


def _execute(
    notebook: Path, folder: Path, runs: Sequence[Run], jobs: int | None, threads: int | None, ray: str | None
) -> Iterator[tuple[Run, int]]:
    tasks = []
    for run in runs:
        _set_aside(run, folder / EARLIER)
        given = json.dumps({name: value for name, value in run.values.items() if name in run.given})
        arguments = ("-m", "specbench.bench.notebooks", str(notebook), "--run-dir", str(run.folder), "--quiet", "--parameters", given)
        tasks.append(Task(arguments, run.log))
    if ray is None:
        ends = run_local(tasks, jobs, threads)
    else:
        from .sweep_ray import run_on_ray

        ends = run_on_ray(tasks, ray, folder / SWEEP, jobs, threads)
    for index, status in ends:
        yield runs[index], status


def _set_aside(run: Run, earlier: Path) -> None:
    """Keep what an attempt left that did not finish."""
    left = [path for path in (run.folder, run.log) if path.exists()]
    if left:
        number = next(n for n in range(1, 10**6) if not (earlier / f"{run.run_id}-{n}").exists())
        target = earlier / f"{run.run_id}-{number}"
        target.mkdir(parents=True)
        for path in left:
            path.rename(target / path.name)


def _row(run: Run, exits: Mapping[str, int]) -> dict[str, Any]:
    exit_status, record = exits.get(run.run_id), json_object(run.folder / RECORD)
    good = exit_status == 0 and run.complete
    status = "not run" if exit_status is None else "complete" if good else "failed"
    error = None if good or exit_status is None else record.get("error") or _last_line(run.log)
    facts = record.get("facts", {}) if good else {}
    known = {
        "run_id": run.run_id, **run.given, "status": status, "exit_status": exit_status, "seconds": record.get("seconds"), "error": error,
        "folder": run.folder.name,
    }  # fmt: skip
    return known | {f"found_{name}" if name in known else name: value for name, value in facts.items()}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output") + f" (log: {log})"

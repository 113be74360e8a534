"""Run a notebook with parameters, and know afterwards whether it really finished.

What enters: a notebook with one cell tagged `parameters`, values for some of them, a run folder. What leaves: in that folder the executed
notebook, an HTML report, `run.json` (what was run and how it ended) and `result.json`, the marker that the notebook's own last cell writes
through `session.finish`. It does not know what a notebook measures.

papermill executes. Around it: unknown parameters are refused before anything starts, the kernel is this interpreter's, and a run is good
only with its marker, since a cell can fail without raising.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SpecbenchError
from .atomic import json_object, write_json
from .kernel import KernelError, kernel_manager_class
from .report import write_report
from .session import MARKER, state

RECORD = "run.json"
PARAMETERS, INJECTED = "parameters", "injected-parameters"
PAPERMILL_BANNER = "papermill-error-cell-tag"  # papermill removes cells with this tag when it runs an output again


class NotebookError(SpecbenchError, RuntimeError):
    """A notebook did not finish. `run` says where its output lies and how far it came."""

    def __init__(self, message: str, run: NotebookRun) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True, slots=True)
class NotebookRun:
    """One execution of one notebook.

    status: "complete" or "failed". seconds: wall clock. facts: what the notebook gave to `finish`. error: first line of what stopped it.
    reused: the folder already held this run, complete, and nothing was executed.
    """

    notebook: Path
    output: Path
    report: Path
    parameters: dict[str, Any]
    status: str
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    reused: bool = False


def run_notebook(
    notebook: str | Path,
    run_dir: str | Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    progress: bool = True,
    cell_timeout_s: float | None = None,
) -> NotebookRun:
    """Execute `notebook` into `run_dir`.

    Args:
        parameters: values by name; `run_dir` is set here. A value has the type of the notebook's own.
        resume: where `run_dir` holds this notebook with these parameters, complete, return that run. Any other run there is removed.
        progress: show cells and the bars inside them on stderr.
        cell_timeout_s: longest time for one cell; None waits.

    Raises:
        ConfigError: not exactly one `parameters` cell, an unknown name, another type, a folder of other files. Nothing was started.
        KernelError: this interpreter lacks what notebooks need. Nothing was started.
        NotebookError: a cell failed, the kernel died, or the end came without the marker. Output, report and record are written.
    """
    source, folder = Path(notebook).resolve(), Path(run_dir).resolve()
    values = check_parameters(source, {**(parameters or {}), "run_dir": str(folder)})
    output, report = folder / source.name, folder / f"{source.stem}.html"
    if output == source:
        raise ConfigError(f"{source} would be overwritten by its own output; give another run folder than {folder}")
    record = {"notebook": source.name, "notebook_sha256": hashlib.sha256(source.read_bytes()).hexdigest(), "parameters": values}
    if resume and (found := _finished(folder, record)) is not None:
        return NotebookRun(source, output, report, values, "complete", found["seconds"], found["facts"], reused=True)
    manager = kernel_manager_class()
    _clear(folder)
    record |= {"python": sys.executable, "output": str(output), "report": str(report), "started": datetime.now(UTC).isoformat()}
    write_json(folder / RECORD, record | state("running"))
    write_json(folder / MARKER, state("running"))
    start = time.perf_counter()
    try:
        _execute(source, output, values, manager, progress, cell_timeout_s)
        facts = _marker_facts(folder, source)
    except BaseException as error:  # an interrupt leaves a record too
        where, reason, seconds = _mark_output(output), _first_line(error), time.perf_counter() - start
        failure = state("failed") | {"cell": where, "error": reason}
        write_json(folder / MARKER, failure)
        write_json(folder / RECORD, record | failure | {"seconds": seconds})
        if not isinstance(error, Exception):
            raise
        write_report(output, report, values)
        run = NotebookRun(source, output, report, values, "failed", seconds, error=reason)
        raise NotebookError(f"{source.name} failed at {where}: {reason}\nIts output, incomplete: {output}", run) from error
    seconds = time.perf_counter() - start
    write_report(output, report, values)
    write_json(folder / RECORD, record | state("complete") | {"seconds": seconds, "facts": facts})
    return NotebookRun(source, output, report, values, "complete", seconds, facts)


def check_parameters(notebook: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook's own parameter values with `given` in their places.

    Raises:
        ConfigError: the notebook lacks a `parameters` cell or has several, does not define a given name, or gives it another type.
    """
    defaults = read_parameters(notebook)
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ConfigError(f"{notebook.name} has no parameter {', '.join(unknown)}; its parameters cell defines {', '.join(defaults)}")
    for name, value in given.items():
        default = defaults[name]
        if default is not None and type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
            raise ConfigError(
                f"{notebook.name}: parameter {name} is {value!r} ({type(value).__name__}); "
                f"its parameters cell has {default!r} ({type(default).__name__})"
            )
    return {**defaults, **given}


def read_parameters(notebook: Path) -> dict[str, Any]:
    """Names and literal values of the one cell tagged `parameters`, in order. A value that is no literal is None."""
    cells = [cell for cell in _read(notebook)["cells"] if PARAMETERS in cell.get("metadata", {}).get("tags", [])]
    if len(cells) != 1:
        raise ConfigError(f"{notebook.name} has {len(cells)} cells tagged {PARAMETERS!r}; exactly one is expected")
    values: dict[str, Any] = {}
    for statement in ast.parse("".join(cells[0]["source"])).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            values |= {target.id: _literal(statement.value) for target in targets if isinstance(target, ast.Name)}
    return values


def _literal(value: ast.expr | None) -> Any:
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _read(notebook: Path) -> dict[str, Any]:
    try:
        document = json.loads(notebook.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"notebook {notebook} does not exist") from None
    except ValueError as error:
        raise ConfigError(f"{notebook} is no notebook: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise ConfigError(f"{notebook} is no notebook: it has no list of cells")
    return document


def _execute(source: Path, output: Path, values: dict[str, Any], manager: type[Any], progress: bool, timeout_s: float | None) -> None:
    import papermill

    _normalized_copy(source, output)
    papermill.execute_notebook(
        output,
        output,
        values,
        kernel_name="python3",  # names the language only: the manager starts this interpreter
        language="python",
        kernel_manager_class=manager,
        progress_bar={"desc": source.stem} if progress else False,
        stderr_file=sys.stderr if progress else None,
        execution_timeout=timeout_s,
    )


def _normalized_copy(source: Path, output: Path) -> None:
    """The notebook with every field that the format wants and papermill reads: editors and scripts leave some out."""
    import nbformat
    from nbformat.validator import normalize

    document = _read(source)
    for cell in document["cells"]:
        tags = cell.setdefault("metadata", {}).get("tags")
        if isinstance(tags, list):
            cell["metadata"]["tags"] = list(dict.fromkeys(tags))  # the format allows each once
        if cell.get("cell_type") == "code":
            cell |= {"outputs": [], "execution_count": None}
    _, document = normalize(document)
    nbformat.write(nbformat.reads(json.dumps(document), as_version=4), output)


def _clear(folder: Path) -> None:
    """Remove an earlier run; a folder that is no run's is left alone."""
    if (folder / RECORD).is_file():
        shutil.rmtree(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds files but no {RECORD}, so it is no run folder; give a new or empty one")


def _marker_facts(folder: Path, source: Path) -> dict[str, Any]:
    marker = json_object(folder / MARKER)
    if marker.get("status") != "complete":
        raise ConfigError(
            f"{source.name} ran to its end without its marker ({folder / MARKER} says {marker.get('status')!r}); "
            "a cell failed without raising, or the last cell does not call finish(run_dir)"
        )
    return dict(marker.get("facts", {}))


def _finished(folder: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    record = json_object(folder / RECORD)
    same = all(record.get(key) == value for key, value in wanted.items())
    return record if same and record.get("complete") and json_object(folder / MARKER).get("complete") else None


def _mark_output(output: Path) -> str:
    """Put a first cell into a failed output that says where it stopped; returns that place, "cell 3 of 5"."""
    import nbformat

    notebook = nbformat.read(output, as_version=4)
    if notebook.cells and PAPERMILL_BANNER in notebook.cells[0].metadata.get("tags", []):
        del notebook.cells[0]
    own = [cell for cell in notebook.cells if not {INJECTED, PAPERMILL_BANNER} & set(cell.metadata.get("tags", []))]
    reached = [i for i, cell in enumerate(own, 1) if cell.metadata.get("papermill", {}).get("start_time")]
    where = f"cell {reached[-1]} of {len(own)}" if reached else "its start"
    text = f"**This run failed at {where}.** What follows is incomplete."
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(text, metadata={"tags": [PAPERMILL_BANNER]}))
    nbformat.write(notebook, output)
    return where


def _first_line(error: BaseException) -> str:
    name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    return f"{name}: {value}".strip().splitlines()[0]


def parse_value(text: str, default: Any) -> Any:
    """A value from a shell: text where the notebook's own value is text, else the literal that it spells (`64`, `[1, 3]`, `true`)."""
    if isinstance(default, str):
        return text
    try:
        return {"true": True, "false": False, "null": None}[text] if text in ("true", "false", "null") else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(arguments: list[str] | None = None) -> int:
    """`python -m specbench.bench.notebooks NOTEBOOK --run-dir DIR -p NAME VALUE ...`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specbench.bench.notebooks", description="Run a notebook into a folder.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True, help="where output, report, run.json and result.json go")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="pairs", help="a parameter")
    parser.add_argument("--parameters", type=json.loads, default={}, metavar="JSON", help="parameters as one JSON object")
    parser.add_argument("--resume", action="store_true", help="do nothing where this very run lies there, complete")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    try:
        defaults = read_parameters(options.notebook)
        parameters = {**options.parameters, **{name: parse_value(value, defaults.get(name)) for name, value in options.pairs}}
        run = run_notebook(options.notebook, options.run_dir, parameters, resume=options.resume, progress=not options.quiet)
    except (ConfigError, KernelError, NotebookError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{run.notebook.name}: complete\nreport: {run.report}")
    return 0


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt("told to stop")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)  # whoever stops this process gets a record and no kernel left behind
    sys.exit(main())

"""`make demo`: build the bundled pair, run the notebooks, say what they found.

What enters: nothing but an optional run name. What leaves: a run folder below data/runs with a folder per notebook, and a short table. A
notebook that already lies there complete is not run again; the default name changes with the code, the notebooks and the data, so a new
state of any of them is a new run.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .bench.notebooks import NotebookError, NotebookRun, check_parameters, run_notebook
from .bench.session import runs_root
from .errors import ConfigError, SpecbenchError

ROOT = Path(__file__).resolve().parents[1]
# Smaller than the notebooks' own defaults: all four together take some minutes on two cores.
PARAMETERS: dict[str, dict[str, Any]] = {
    "01_reproduce_keyerror": {},
    "02_apply_the_fix": {"max_new_tokens": 48},
    "04_acceptance": {"prompts_per_category": 1, "max_new_tokens": 64, "formats": []},
    "05_throughput": {"prompts_per_category": 1, "max_new_tokens": 64, "repeats": 1, "formats": []},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specbench.demo", description="Build the bundled pair and run the notebooks on it.")
    parser.add_argument("--run", help="name of the run folder below data/runs; by default one that stands for the present code and data")
    options = parser.parse_args(arguments)
    try:
        folder = runs_root() / (options.run or f"demo-{fingerprint()}")
        for name, parameters in PARAMETERS.items():
            check_parameters(ROOT / "notebooks" / f"{name}.ipynb", parameters)
        prepare()
    except SpecbenchError as error:
        print(error, file=sys.stderr)
        return 1
    runs = [run_one(name, folder, parameters) for name, parameters in PARAMETERS.items()]
    print(table(runs))
    print(f"\nReports, tables and figures: {folder}")
    if all(run.reused for run in runs):
        print("All of it was complete already; make demo ARGS='--run NAME' runs it again under another name.")
    return 0 if all(run.status == "complete" for run in runs) else 1


def prepare() -> None:
    """Build the bundled pair in its cache folder, or find it there."""
    from .bundled import bundled_pair

    for precision in ("bf16", "w4a16"):
        pair = bundled_pair(precision)
        print(f"bundled pair, {precision}: {pair.verifier.path}", flush=True)


def run_one(name: str, folder: Path, parameters: dict[str, Any]) -> NotebookRun:
    """One notebook, resumed; a failure is told and returned, so that the others still run."""
    try:
        return run_notebook(ROOT / "notebooks" / f"{name}.ipynb", folder / name, parameters, resume=True)
    except NotebookError as error:
        print(error, file=sys.stderr)
        return error.run


def fingerprint() -> str:
    """Eight hex digits that change with the package, the notebooks, the bundled data and the version of torch.

    Raises:
        ConfigError: the package is installed without its notebooks.
    """
    if not (ROOT / "notebooks").is_dir():
        raise ConfigError(f"{ROOT} has no notebooks; run the demo from a checkout of the repository")
    digest = hashlib.sha256(f"{sys.version} {version('torch')}".encode())
    for pattern in ("specbench/**/*.py", "notebooks/*.ipynb", "data/draft/*", "data/prompts/*"):
        for path in sorted(path for path in ROOT.glob(pattern) if path.is_file()):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def table(runs: list[NotebookRun]) -> str:
    """A line per notebook: name, status, seconds, and what it gave to `finish`, or what stopped it."""
    lines = [f"\n{'notebook':24}{'status':10}{'seconds':>8}  found"]
    for run in runs:
        found = run.error if run.status == "failed" else ", ".join(f"{name} {_brief(value)}" for name, value in run.facts.items())
        lines.append(f"{run.notebook.stem:24}{run.status:10}{run.seconds:8.0f}  {found}")
    return "\n".join(lines)


def _brief(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

"""What a notebook calls around its measurements: its pair, its run folder, its end.

What enters: the values of a parameters cell. What leaves: a pair, a folder, and the marker `result.json` that says the notebook reached its
end. It does not know who executes the notebook: JupyterLab, papermill or `notebooks.run_notebook`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .atomic import write_json

if TYPE_CHECKING:
    from ..pair import Pair

MARKER = "result.json"
BUNDLED = "bundled:"


def pair_from_parameters(verifier: str, draft: str = "") -> Pair:
    """The pair that two texts name.

    Args:
        verifier: "bundled:w4a16" or "bundled:bf16", a folder, or a hub id.
        draft: a folder or hub id; "" is the bundled draft, beside a bundled verifier only.

    Raises:
        ConfigError: no draft for a verifier that is not bundled, or an unknown bundled one.
    """
    from ..pair import open_pair

    if not verifier.startswith(BUNDLED):
        if not draft:
            raise ConfigError(f"verifier is {verifier!r} and draft is empty; give the draft's folder or hub id (bundled: brings its own)")
        return open_pair(verifier, draft)
    from ..bundled import bundled_pair

    pair = bundled_pair(verifier.removeprefix(BUNDLED))
    return open_pair(pair.verifier.path, draft) if draft else pair


def open_run(run_dir: str, name: str) -> Path:
    """The run folder that a notebook writes to: `run_dir`, or a new `data/runs/<name>-<time>` of this checkout where that is empty."""
    from .records import new_run

    if run_dir:
        folder = Path(run_dir).resolve()
        folder.mkdir(parents=True, exist_ok=True)
    else:
        folder = new_run(runs_root(), name)
    write_json(folder / MARKER, state("running"))
    return folder


def runs_root() -> Path:
    """`data/runs` of the checkout that holds this package; `runs` in the working directory where it is installed without one."""
    data = Path(__file__).resolve().parents[2] / "data"
    return data / "runs" if data.is_dir() else Path("runs")


def finish(run_dir: str | Path, **facts: Any) -> Path:
    """Say that a notebook reached its end: the call of its last cell. Writes `result.json` whole, and returns its path.

    Args:
        facts: the run's headline numbers, as JSON values; NaN is refused (ValueError).
    """
    path = Path(run_dir) / MARKER
    write_json(path, state("complete") | {"facts": facts})
    return path


def state(status: str) -> dict[str, Any]:
    """What a record says of a run: "running", "failed" or "complete"."""
    return {"status": status, "complete": status == "complete"}

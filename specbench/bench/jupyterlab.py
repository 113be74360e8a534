"""Open notebooks in a real JupyterLab, run them top to bottom in headless Chromium, and say what a person would have seen go wrong.

What enters: notebooks, parameters, a folder. What leaves: a finding per notebook (failed cells, errors of the page, damaged layout), its
executed copy and screenshots. It does not know what notebooks measure. Sources are copied first: JupyterLab saves what it runs.

    python -m specbench.bench.jupyterlab notebooks/*.ipynb [-p NAME VALUE] [--out FOLDER]

needs playwright (`pip install 'specbench[browser]'`) and a Chromium: the system's, else playwright's own.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .atomic import json_object, write_json
from .notebooks import check_parameters, parse_value, read_parameters
from .records import new_run
from .report import WIDGET
from .session import MARKER, runs_root
from .sweep_local import child_environment

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1400, 900)
START_S, RENDER_S = 90, 3
# Runs in the page: what is there once all cells have run. Output wider than its cell is damage unless it can be scrolled.
LOOK = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  const notebook = panel.content.model.toJSON();
  const wide = [...document.querySelectorAll('.jp-OutputArea-output')].filter(e => {
    const scrolls = [e, ...e.querySelectorAll('*')].some(x => ['auto', 'scroll'].includes(getComputedStyle(x).overflowX));
    return e.scrollWidth > e.clientWidth + 1 && !scrolls;
  }).map(e => e.innerText.slice(0, 80));
  const right = document.querySelector('.jp-NotebookPanel').getBoundingClientRect().right;
  const images = [...document.querySelectorAll('.jp-OutputArea-output img')];
  return {
    notebook, wide,
    broken_images: images.filter(e => e.complete && e.naturalWidth === 0).length,
    cut_images: images.filter(e => e.getBoundingClientRect().right > right + 1).length,
    images: images.length,
  };
}"""


@dataclass(slots=True)
class Opened:
    """What one notebook was in JupyterLab. errors: failed cells, a missing marker, errors of the page. layout: what looks damaged. bars:
    cells that show a progress bar. figures: images in outputs."""

    notebook: str
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    layout: list[str] = field(default_factory=list)
    figures: int = 0
    bars: int = 0
    screenshots: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.errors and not self.layout


def open_notebooks(
    notebooks: Sequence[str | Path], out: str | Path, parameters: Mapping[str, Any] | None = None, *, timeout_s: float = 3600
) -> list[Opened]:
    """Run every notebook in one JupyterLab; each gets those of `parameters` that it has, and a folder of its own below `out` as run_dir.

    Raises:
        ConfigError: playwright or a browser is missing, JupyterLab does not start, or no notebook has one of the parameters.
    """
    folder = Path(out).resolve()
    sources = [Path(notebook).resolve() for notebook in notebooks]
    copies = _copies(sources, folder, dict(parameters or {}))
    with _server(folder) as (address, token), _browser() as browser:
        found = [_open(browser, address, token, copy, folder, timeout_s) for copy in copies]
    write_json(folder / "jupyterlab.json", [asdict(one) | {"good": one.good} for one in found])
    return found


def _copies(sources: Sequence[Path], folder: Path, parameters: dict[str, Any]) -> list[Path]:
    import nbformat
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    known = {source: read_parameters(source) for source in sources}
    unknown = sorted(set(parameters) - {name for names in known.values() for name in names})
    if unknown:
        raise ConfigError(f"none of the notebooks has a parameter {', '.join(unknown)}")
    copies = []
    for source in sources:
        run_dir = folder / source.stem
        run_dir.mkdir(parents=True, exist_ok=True)
        given = {name: value for name, value in parameters.items() if name in known[source]} | {"run_dir": str(run_dir)}
        check_parameters(source, given)
        document = parameterize_notebook(load_notebook_node(str(source)), given, kernel_name="python3", language="python")
        # Without a kernel that it knows JupyterLab asks for one.
        document.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(document, folder / source.name)
        copies.append(folder / source.name)
    return copies


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, str]]:
    """A JupyterLab of this interpreter on a free port of this machine, its log in `folder`."""
    token = secrets.token_hex(16)
    log = folder / "jupyterlab.log"
    command = [
        sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0",
        f"--ServerApp.root_dir={folder}",
        f"--IdentityProvider.token={token}", "--LabApp.news_url=", "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    # Out of the way of the user's own servers and settings.
    environment = child_environment(None, None) | {
        "JUPYTER_RUNTIME_DIR": str(folder / ".runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / ".lab"),
    }
    with log.open("wb") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        yield _address(server, folder / ".runtime", token, log), token
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], runtime: Path, token: str, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        for record in runtime.glob(f"jpserver-{server.pid}.json"):
            address = str(json.loads(record.read_bytes())["url"])
            try:
                urllib.request.urlopen(f"{address}api/status?token={token}", timeout=5).close()
            except (urllib.error.URLError, OSError):
                break
            return address
        time.sleep(0.3)
    raise ConfigError(f"JupyterLab did not start within {START_S} s; its log: {log}")


@contextmanager
def _browser() -> Iterator[Any]:
    if find_spec("playwright") is None:
        raise ConfigError("opening notebooks in JupyterLab needs playwright; next: pip install 'specbench[browser]', and a Chromium")
    api: Any = import_module("playwright.sync_api")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=path, args=["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
            )
        except api.Error as error:
            raise ConfigError(
                f"no Chromium starts ({str(error).splitlines()[0]}); install one, or run: playwright install chromium"
            ) from error
        try:
            yield browser
        finally:
            browser.close()


def _open(browser: Any, address: str, token: str, notebook: Path, folder: Path, timeout_s: float) -> Opened:
    """One notebook in a workspace of its own."""
    opened = Opened(notebook.name)
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 1000})
    page.on("pageerror", lambda error: opened.errors.append(f"page: {str(error).splitlines()[0]}"))
    page.goto(f"{address}lab/workspaces/{notebook.stem}/tree/{notebook.name}?token={token}&reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=1000 * START_S)
    ready = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    page.wait_for_function(ready, timeout=1000 * START_S)
    start = time.monotonic()
    page.evaluate(
        "() => { window.ran = null; window.jupyterapp.commands.execute('notebook:run-all-cells').then(v => { window.ran = String(v) }) }"
    )
    try:
        page.wait_for_function("() => window.ran !== null", timeout=1000 * timeout_s, polling=500)
    except Exception as error:  # noqa: BLE001 - playwright's own class of a package that may be missing; told, with what there is
        opened.errors.append(f"not at its end after {timeout_s:g} s ({type(error).__name__})")
    opened.seconds = time.monotonic() - start
    _look(page, opened, notebook, folder)
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.close()
    return opened


def _look(page: Any, opened: Opened, notebook: Path, folder: Path) -> None:
    page.evaluate("() => { window.jupyterapp.shell.collapseLeft(); window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0 }")
    for width in WIDTHS:
        # Tall enough that no cell is left out: JupyterLab draws only those in sight.
        page.set_viewport_size({"width": width, "height": 9000})
        page.evaluate("() => document.querySelectorAll('.jp-WindowedPanel-outer').forEach(e => { e.scrollTop = 0 })")
        page.wait_for_timeout(1000 * RENDER_S)
        seen = page.evaluate(LOOK)
        opened.layout += [f"{width} px: output wider than its cell: {text!r}" for text in seen["wide"]]
        opened.layout += [f"{width} px: {seen[name]} {name.replace('_', ' ')}" for name in ("broken_images", "cut_images") if seen[name]]
        path = folder / f"{notebook.stem}-{width}.png"
        page.screenshot(path=str(path))
        opened.screenshots.append(path.name)
    cells = [cell for cell in seen["notebook"]["cells"] if cell["cell_type"] == "code"]
    outputs = [(number, output) for number, cell in enumerate(cells, 1) for output in cell["outputs"]]
    opened.errors += [f"code cell {n}: {o['ename']}: {o['evalue']}" for n, o in outputs if o["output_type"] == "error"]
    opened.errors += [f"code cell {n} did not run" for n, cell in enumerate(cells, 1) if cell["execution_count"] is None]
    opened.figures = seen["images"]
    opened.bars = len(
        {n for n, o in outputs if WIDGET in o.get("data", {}) or (o.get("name") == "stderr" and "it/s" in "".join(o["text"]))}
    )
    marker = folder / notebook.stem / MARKER
    if json_object(marker).get("complete") is not True:
        opened.errors.append(f"{marker} does not say that it is complete")


def main(arguments: Sequence[str] | None = None) -> int:
    """Open the notebooks that are named; returns 1 where one has an error or damaged layout."""
    parser = argparse.ArgumentParser(prog="python -m specbench.bench.jupyterlab", description="Run notebooks in a real JupyterLab.")
    parser.add_argument("notebooks", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="folder for copies and screenshots (default: a new one below data/runs)")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="pairs", help="a parameter")
    options = parser.parse_args(arguments)
    try:
        defaults = {name: value for notebook in options.notebooks for name, value in read_parameters(notebook).items()}
        parameters = {name: parse_value(value, defaults.get(name)) for name, value in options.pairs}
        folder = options.out or new_run(runs_root(), "jupyterlab")
        found = open_notebooks(options.notebooks, folder, parameters)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for one in found:
        said = f"{'good' if one.good else 'BAD'}, {one.seconds:.0f} s, {one.figures} figures, {one.bars} cells with progress bars"
        sys.stdout.write("\n  ".join([f"{one.notebook}: {said}", *one.errors, *one.layout]) + "\n")
    sys.stdout.write(f"screenshots: {folder}\n")
    return 0 if all(one.good for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())

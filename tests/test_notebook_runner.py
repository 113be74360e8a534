"""The notebook runner on small notebooks: what is refused, what counts as finished, what is left on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

from specbench.bench import kernel
from specbench.bench.notebooks import NotebookError, NotebookRun, main, parse_value, read_parameters, run_notebook
from specbench.bench.session import finish, open_run, pair_from_parameters
from specbench.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PARAMETERS = 'run_dir: str = ""\nk: int = 3  # draft tokens'
FINISH = "from specbench.bench.session import finish\nfinish(run_dir, k=k)"

PRINTS_A_TRACEBACK = "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()"


def write(path: Path, *cells: str, tagged: tuple[int, ...] = (0,), kernelspec: dict[str, str] | None = None) -> Path:
    """A notebook of code cells; those in `tagged` are `parameters` cells, the others have no metadata at all."""
    document: dict[str, Any] = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    if kernelspec:
        document["metadata"]["kernelspec"] = kernelspec
    for index, source in enumerate(cells):
        cell: dict[str, Any] = {"cell_type": "code", "id": f"c{index}", "source": source, "outputs": [], "execution_count": None}
        if index in tagged:
            cell["metadata"] = {"tags": ["parameters"]}
        document["cells"].append(cell)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def run(notebook: Path, folder: Path, **parameters: Any) -> NotebookRun:
    return run_notebook(notebook, folder, parameters, progress=False)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def source_of(path: Path) -> list[Any]:
    return list(nbformat.read(path, as_version=4).cells)


# --- before anything starts


@pytest.mark.parametrize("tagged", [(), (0, 1)])
def test_exactly_one_parameters_cell(tmp_path: Path, tagged: tuple[int, ...]) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, PARAMETERS, tagged=tagged)
    with pytest.raises(ConfigError, match=f"{len(tagged)} cells tagged 'parameters'"):
        run(notebook, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_parameter_is_refused_before_starting(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, FINISH)
    with pytest.raises(ConfigError, match="no parameter num_tokens; its parameters cell defines run_dir, k"):
        run(notebook, tmp_path / "run", num_tokens=4)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["4", 4.0, True, [4]])
def test_parameter_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, FINISH)
    with pytest.raises(ConfigError, match=r"parameter k is .*has 3 \(int\)"):
        run(notebook, tmp_path / "run", k=value)


def test_cells_without_tags_are_read(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", "'intro'", PARAMETERS + "\nprompts = [1, 2]\nscale = 2 * 3", FINISH, tagged=(1,))
    assert read_parameters(notebook) == {"run_dir": "", "k": 3, "prompts": [1, 2], "scale": None}


def test_a_notebook_without_run_dir_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no parameter run_dir"):
        run(write(tmp_path / "n.ipynb", "k = 1"), tmp_path / "run")


@pytest.mark.parametrize("content", ["", "[]", '{"cells": 3}'])
def test_a_file_that_is_no_notebook(tmp_path: Path, content: str) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="is no notebook"):
        run(path, tmp_path / "run")
    with pytest.raises(ConfigError, match="does not exist"):
        run(tmp_path / "absent.ipynb", tmp_path / "run")


def test_output_never_replaces_its_source(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, FINISH)
    before = notebook.read_bytes()
    with pytest.raises(ConfigError, match="would be overwritten"):
        run(notebook, tmp_path)
    assert notebook.read_bytes() == before


def test_a_folder_of_other_files_is_left_alone(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, FINISH)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files but no run.json"):
        run(notebook, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_verifier_that_is_not_bundled_needs_a_draft() -> None:
    with pytest.raises(ConfigError, match="draft is empty"):
        pair_from_parameters("organisation/model")


def test_run_folder_is_the_given_one_or_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_run(str(tmp_path / "given"), "01") == tmp_path / "given"
    monkeypatch.setattr("specbench.bench.session.runs_root", lambda: tmp_path / "runs")
    first, second = open_run("", "01_name"), open_run("", "01_name")
    assert first != second and {first.parent, second.parent} == {tmp_path / "runs"} and first.name.startswith("01_name-")
    assert read(first / "result.json")["complete"] is False


def test_missing_packages_are_named_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "find_spec", lambda name: None if name == "papermill" else object())
    with pytest.raises(kernel.KernelError, match=r"papermill missing for .*registered kernels: .*pip install 'specbench\[notebooks\]'"):
        kernel.kernel_manager_class()


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [("64", 3, 64), ("[1, 3]", [0], [1, 3]), ("64", "x", "64"), ("true", False, True), ("org/name", None, "org/name"), ("0.5", 1.0, 0.5)],
)
def test_values_from_a_shell(text: str, default: object, value: object) -> None:
    assert parse_value(text, default) == value


def test_parameters_as_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, FINISH)
    assert main([str(notebook), "--run-dir", str(tmp_path / "run"), "--parameters", '{"k": "4"}']) == 1
    assert "parameter k is '4' (str)" in capsys.readouterr().err, "no guessing of types"


def test_the_marker_holds_json_numbers_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        finish(tmp_path, speedup=float("nan"))
    assert list(tmp_path.iterdir()) == []


# --- with a kernel


@pytest.mark.notebook
@pytest.mark.parametrize("kernelspec", [None, {"name": "my_env", "display_name": "Mine", "language": "python"}])
def test_kernel_is_this_interpreter_whatever_the_notebook_names(tmp_path: Path, kernelspec: dict[str, str] | None) -> None:
    check = "import sys\nfrom specbench.bench.session import finish\nfinish(run_dir, k=k, python=sys.executable)"
    done = run(write(tmp_path / "n.ipynb", PARAMETERS, check, kernelspec=kernelspec), tmp_path / "run", k=5)
    assert done.status == "complete" and done.facts == {"k": 5, "python": sys.executable}
    record = read(tmp_path / "run" / "run.json")
    assert record["complete"] and record["parameters"] == {"run_dir": str(tmp_path / "run"), "k": 5}


@pytest.mark.notebook
@pytest.mark.parametrize("cell", ["%run missing.py", "!false", PRINTS_A_TRACEBACK])
def test_without_its_marker_no_run_is_good(tmp_path: Path, cell: str) -> None:
    with pytest.raises(NotebookError):
        run(write(tmp_path / "n.ipynb", PARAMETERS, cell), tmp_path / "run")
    record, marker = read(tmp_path / "run" / "run.json"), read(tmp_path / "run" / "result.json")
    assert record["status"] == marker["status"] == "failed"
    assert record["complete"] is marker["complete"] is False


@pytest.mark.notebook
def test_a_failed_cell_a_dead_kernel_and_a_time_limit(tmp_path: Path) -> None:
    stored = "from pathlib import Path\nPath(run_dir, 'early.txt').write_text('partial')"
    for name, cell, error in [
        ("raises", "1 / 0", "ZeroDivisionError: division by zero"),
        ("dies", "import os\nos._exit(1)", "DeadKernelError"),
        ("hangs", "import time\ntime.sleep(600)", "CellTimeoutError"),
    ]:
        notebook = write(tmp_path / f"{name}.ipynb", PARAMETERS, stored, cell, "'never'", FINISH)
        with pytest.raises(NotebookError) as caught:
            run_notebook(notebook, tmp_path / name, {}, progress=False, cell_timeout_s=5)
        output = tmp_path / name / f"{name}.ipynb"
        assert str(output) in str(caught.value) and "cell 3 of 5" in str(caught.value)
        assert "failed at cell 3 of 5" in source_of(output)[0].source
        marker = read(tmp_path / name / "result.json")
        assert marker["complete"] is False and marker["cell"] == "cell 3 of 5" and error in marker["error"]
        assert (tmp_path / name / "early.txt").exists() and (tmp_path / name / f"{name}.html").exists()


@pytest.mark.notebook
def test_a_good_run_replaces_a_failed_one_and_is_resumed(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, "assert k < 4", FINISH)
    with pytest.raises(NotebookError):
        run(notebook, tmp_path / "run", k=7)
    failed_output = source_of(tmp_path / "run" / "n.ipynb")
    assert any("papermill-error-cell-tag" in cell.metadata.get("tags", []) for cell in failed_output)

    good = run_notebook(notebook, tmp_path / "run", {"k": 2}, resume=True, progress=False)
    assert not good.reused and read(tmp_path / "run" / "result.json") == {"status": "complete", "complete": True, "facts": {"k": 2}}
    assert "failed" not in source_of(good.output)[0].source

    stamp = good.output.stat().st_mtime_ns
    again = run_notebook(notebook, tmp_path / "run", {"k": 2}, resume=True, progress=False)
    assert again.reused and again.facts == {"k": 2} and again.output.stat().st_mtime_ns == stamp
    assert not run_notebook(notebook, tmp_path / "run", {"k": 1}, resume=True, progress=False).reused


@pytest.mark.notebook
def test_old_outputs_and_injected_cells_do_not_survive(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, FINISH)
    document = read(notebook)
    document["cells"][1]["outputs"] = [{"output_type": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": []}]
    notebook.write_text(json.dumps(document), encoding="utf-8")
    first = run(notebook, tmp_path / "one", k=1)
    second = run(first.output, tmp_path / "two", k=2)
    assert second.facts == {"k": 2}
    injected = [cell for cell in source_of(second.output) if "injected-parameters" in cell.metadata.get("tags", [])]
    assert len(injected) == 1 and "k = 2" in injected[0].source


@pytest.mark.notebook
def test_report_shows_findings_without_code_and_opens_offline(tmp_path: Path) -> None:
    shows = (
        "import sys\nimport matplotlib.pyplot as plt\nfrom tqdm.auto import tqdm\n"
        "list(tqdm(range(3), desc='a-progress-bar'))\nprint('a finding'); plt.plot([1, 2]);"
    )
    notebook = write(tmp_path / "n.ipynb", PARAMETERS + "\nname: str = ''", shows, FINISH)
    done = run(notebook, tmp_path / "run", name="<script>alert(1)</script>")
    report = done.report.read_text(encoding="utf-8")
    assert "a finding" in report and "data:image/png;base64" in report and "&lt;script&gt;alert(1)" in report
    assert 'alt="figure: n"' in report
    assert "plt.plot" not in report and "a-progress-bar" not in report and "<script>alert(1)" not in report
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["']?https?:""", report)
    streams = [output for cell in source_of(done.output) for output in cell.get("outputs", []) if output.get("name") == "stderr"]
    assert any("a-progress-bar" in stream.text for stream in streams), "the bar is text, not a widget"


@pytest.mark.notebook
def test_command_returns_the_status_and_prints_the_output_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, "assert k < 4", FINISH)
    assert main([str(notebook), "--run-dir", str(tmp_path / "bad"), "-p", "k", "9", "--quiet"]) == 1
    assert str(tmp_path / "bad" / "n.ipynb") in capsys.readouterr().err
    assert main([str(notebook), "--run-dir", str(tmp_path / "bad"), "-p", "n", "9", "--quiet"]) == 1
    assert "no parameter n" in capsys.readouterr().err
    good = subprocess.run(
        [sys.executable, "-m", "specbench.bench.notebooks", str(notebook), "--run-dir", str(tmp_path / "good"), "-p", "k", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert good.returncode == 0 and str(tmp_path / "good" / "n.html") in good.stdout
    assert "n:" in good.stderr, "progress is shown"


@pytest.mark.notebook
def test_an_interrupt_leaves_a_failed_record_and_no_kernel(tmp_path: Path) -> None:
    hangs = "import os, time\nfrom pathlib import Path\nPath(run_dir, 'pid').write_text(str(os.getpid()))\ntime.sleep(k)"
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, hangs, FINISH)
    command = [sys.executable, "-m", "specbench.bench.notebooks", str(notebook), "--run-dir", str(tmp_path / "run"), "-p", "k", "200"]
    child = subprocess.Popen(command, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    started = tmp_path / "run" / "pid"
    while not started.exists() and child.poll() is None:
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.wait() != 0
    record = read(tmp_path / "run" / "run.json")
    assert record["status"] == "failed" and record["cell"] == "cell 2 of 3" and "KeyboardInterrupt" in record["error"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)

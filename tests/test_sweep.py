"""Sweeps on small notebooks: what a file expands to, what is refused, what runs, what is resumed, what lies in the folder afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from filelock import FileLock

from specbench.bench import sweep_local
from specbench.bench.notebooks import run_notebook
from specbench.bench.sweep import plan_runs, sweep, sweep_file
from specbench.bench.sweep_local import Task, child_environment, run_local, visible_gpus
from specbench.bench.sweep_spec import expand, read_spec
from specbench.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PARAMETERS = 'run_dir: str = ""\nk: int = 3  # draft tokens\nnames: list = []\nflag: str = ""'
WORK = "from pathlib import Path\nPath(run_dir, 'worked.txt').write_text(str(k))\nassert k != 2"
FINISH = "from specbench.bench.session import finish\nfinish(run_dir, square=k * k, k=-k)"


def write(path: Path, *cells: str) -> Path:
    """A notebook of code cells, the first tagged."""
    made = [
        {"cell_type": "code", "id": f"c{i}", "source": source, "outputs": [], "execution_count": None, "metadata": {}}
        for i, source in enumerate(cells)
    ]
    made[0]["metadata"] = {"tags": ["parameters"]}
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    return path


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write(tmp_path / "inner.ipynb", PARAMETERS, WORK, FINISH)


def spec_file(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- the file


def test_grid_sets_and_constants(tmp_path: Path) -> None:
    text = (
        "notebook: nb/x.ipynb\nrun_dir: out\njobs: 2\nthreads: 3\nparameters: {max_new_tokens: 64}\n"
        "grid:\n  k: [[1, 3], [5]]\n  repeats: [1, 2]\nsets:\n  - {verifier: a, draft: b}\n  - {verifier: c, draft: ''}\n"
    )
    spec = read_spec(spec_file(tmp_path, text))
    assert (spec.notebook, spec.run_dir) == (tmp_path / "nb" / "x.ipynb", tmp_path / "out"), "relative to the file"
    assert (spec.jobs, spec.threads, len(spec.sets)) == (2, 3, 8)
    assert spec.sets[0] == {"max_new_tokens": 64, "verifier": "a", "draft": "b", "k": [1, 3], "repeats": 1}
    assert spec.sets[-1] == {"max_new_tokens": 64, "verifier": "c", "draft": "", "k": [5], "repeats": 2}
    assert [entry["verifier"] for entry in spec.sets] == ["a"] * 4 + ["c"] * 4
    assert expand({}, "x") == [{}]


def test_run_dir_of_a_file_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.bench.sweep_spec.runs_root", lambda: tmp_path / "runs")
    assert read_spec(spec_file(tmp_path, "notebook: x.ipynb")).run_dir == tmp_path / "runs" / "sweep"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("notebook: x.ipynb\ngird: {}", "unknown key gird; a sweep file has notebook"),
        ("grid: {}", "notebook is None"),
        ("- 1", "holds list"),
        ("notebook: [", "is not YAML"),
        ("notebook: x\ngrid: {k: 3}", r"grid.k is 3; expected a list"),
        ("notebook: x\ngrid: {k: []}", r"grid.k is \[\]"),
        ("notebook: x\ngrid: [k]", "grid is"),
        ("notebook: x\nsets: {k: 1}", "sets is"),
        ("notebook: x\ngrid: {k: [1]}\nparameters: {k: 2}", "k in more than one of"),
        ("notebook: x\ngrid: {k: [1]}\nsets: [{k: 2}]", "k in more than one of"),
        ("notebook: x\ngrid:\n  k: [1]\n  k: [2]", "line 3: key 'k' stands twice"),
        ("notebook: x\njobs: 0", "jobs is 0"),
        ("notebook: x\nthreads: true", "threads is True"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_spec(spec_file(tmp_path, text))
    with pytest.raises(ConfigError, match="does not exist"):
        read_spec(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([{"k": 1}, {"draft": 1}], "set 2 of 2: .*no parameter draft; .*nothing was started"),
        ([{"k": "1"}], r"parameter k is '1' \(str\)"),
        ([{"k": 1}, {"k": 3}, {}], "sets 2 and 3 are equal"),
        ([{"run_dir": "x"}], "gives run_dir"),
        ([], "no parameter set"),
    ],
)
def test_nothing_starts_before_all_is_right(notebook: Path, tmp_path: Path, sets: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sweep(notebook, tmp_path / "runs", sets, progress=False)
    assert not (tmp_path / "runs").exists()


def test_two_sweeps_do_not_share_a_folder(notebook: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with FileLock(tmp_path / "runs" / ".lock"), pytest.raises(ConfigError, match="another sweep is at work"):
        sweep(notebook, tmp_path / "runs", [{}], progress=False)


# --- the local executor, on plain commands


def print_and_exit(tmp_path: Path, *sources: str) -> list[Task]:
    return [Task(("-c", source), tmp_path / f"{i}.log") for i, source in enumerate(sources)]


def test_each_worker_has_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert visible_gpus() == ["3", "GPU-abc"]
    tell = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], time.time()); time.sleep(0.5); print(time.time())"
    assert dict(run_local(print_and_exit(tmp_path, *[tell] * 4))) == dict.fromkeys(range(4), 0), "two at a time, one per GPU"
    spans: dict[str, list[tuple[float, float]]] = {"3": [], "GPU-abc": []}
    for log in tmp_path.glob("*.log"):
        gpu, start, end = log.read_text().split()
        spans[gpu].append((float(start), float(end)))
    for used in spans.values():
        (_, first_end), (second_start, _) = sorted(used)
        assert second_start >= first_end, "one run at a time on a GPU"
    with pytest.warns(UserWarning, match="3 runs at a time share 2 GPUs"):
        list(run_local([], jobs=3))
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert visible_gpus() == []


def test_cores_are_shared_among_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep_local.os, "cpu_count", lambda: 8)
    tell = "import os; print(os.environ.get('OMP_NUM_THREADS'))"

    def threads(**options: Any) -> set[str]:
        tasks = [Task(("-S", "-c", tell), tmp_path / f"{i}.log") for i in range(2)]  # -S: nothing of this machine sets it
        list(run_local(tasks, **options))
        return {task.log.read_text().strip() for task in tasks}

    assert threads() == {"None"} and threads(jobs=2) == {"4"} and threads(jobs=2, threads=3) == {"3"}
    assert child_environment(None, None, {"PYTHONPATH": "x"}) == {"PYTHONPATH": f"{ROOT}{os.pathsep}x"}


def test_exit_statuses_and_crashes_stay_apart(tmp_path: Path) -> None:
    tasks = print_and_exit(tmp_path, "raise SystemExit(3)", "print('fine')", "import os; os.kill(os.getpid(), 9)")
    assert dict(run_local(tasks, jobs=2)) == {0: 3, 1: 0, 2: -9}
    assert tasks[1].log.read_text() == "fine\n"


def test_closing_stops_what_runs(tmp_path: Path) -> None:
    tasks = print_and_exit(
        tmp_path, "pass", f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    ends = run_local(tasks, jobs=2)
    assert next(ends) == (0, 0)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    ends.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# --- whole sweeps


@pytest.mark.notebook
def test_a_failing_run_stops_nothing_and_only_it_is_run_again(notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    text = f"notebook: {notebook.name}\nrun_dir: runs\nparameters: {{flag: 'a/b c'}}\ngrid:\n  k: [1, 2]\n  names: [[x, 'y z']]\n"
    table = sweep_file(spec_file(tmp_path, text), jobs=2)
    told = capsys.readouterr().err
    assert "2/2" in told and "failed: AssertionError" in told
    assert list(table.status) == ["complete", "failed"] and list(table.exit_status) == [0, 1] and list(table.k) == [1, 2]
    assert "AssertionError" in table.error[1] and pd.isna(table.error[0])
    assert list(table.square.fillna(0)) == [1, 0] and table.found_k[0] == -1, "facts that share a parameter's name are told apart"
    good, bad = (folder / name for name in table.folder)
    assert good.name.startswith("1_") and (good / "inner.html").is_file() and (bad / "inner.html").is_file()
    assert json.loads((good / "run.json").read_bytes())["parameters"]["names"] == ["x", "y z"]

    stored = pd.read_parquet(folder / "index.parquet")
    assert list(stored.names) == ['["x", "y z"]'] * 2 and stored.run_id.tolist() == table.run_id.tolist()
    assert list(pd.read_csv(folder / "index.csv").status) == ["complete", "failed"]

    stamps = {path: path.stat().st_mtime_ns for path in good.rglob("*")}
    again = sweep(
        notebook, folder, [{"flag": "a/b c", "k": 4, "names": []}, *({"k": k, "flag": "a/b c", "names": ["x", "y z"]} for k in (1, 2))]
    )
    assert list(again.status) == ["complete", "complete", "failed"] and set(table.run_id) < set(again.run_id), (
        "the order of keys is no matter"
    )
    assert {path: path.stat().st_mtime_ns for path in good.rglob("*")} == stamps, "a complete run is not touched"
    assert (folder / ".earlier" / f"{bad.name}-1" / bad.name / "run.json").is_file(), "nor is a failed one lost"

    third = sweep(notebook, folder, [{"k": 1, "flag": "a/b c", "names": ["x", "y z"]}], progress=False)
    assert list(third.run_id)[0] == good.name and set(third.run_id) == set(again.run_id), "earlier rows stay in the index"
    assert sorted(pd.read_parquet(folder / "index.parquet").status) == ["complete", "complete", "failed"]

    source = json.loads(notebook.read_bytes())
    source["cells"][1]["source"] += "\n'changed'"
    notebook.write_text(json.dumps(source), encoding="utf-8")
    changed = sweep(notebook, folder, [{"k": 1, "flag": "a/b c", "names": ["x", "y z"]}], progress=False)
    assert changed.run_id[0] not in set(again.run_id), "another notebook is another run"


@pytest.mark.notebook
def test_b134_a_sweep_from_inside_a_notebook(notebook: Path, tmp_path: Path) -> None:
    driver = write(
        tmp_path / "driver.ipynb",
        'run_dir: str = ""\nnotebook: str = ""',
        "from specbench.bench.sweep import sweep\ntable = sweep(notebook, run_dir + '/runs', [{'k': 1}, {'k': 2}, {'k': 4}], jobs=3)",
        "from specbench.bench.session import finish\nfinish(run_dir, statuses=list(table.status), exits=list(table.exit_status))",
    )
    done = run_notebook(driver, tmp_path / "run", {"notebook": str(notebook)}, progress=False)
    assert done.facts == {"statuses": ["complete", "failed", "complete"], "exits": [0, 1, 0]}
    index = pd.read_parquet(tmp_path / "run" / "runs" / "index.parquet")
    folders = [tmp_path / "run" / "runs" / name for name in index.folder]
    assert [(folder / "worked.txt").read_text() for folder in folders] == ["1", "2", "4"]
    assert all((folder / "inner.ipynb").is_file() for folder in folders)


@pytest.mark.notebook
def test_an_interrupted_sweep_leaves_records_and_goes_on_later(tmp_path: Path) -> None:
    hangs = "import time\nfrom pathlib import Path\n"
    hangs += "if k > 1 and not Path(flag).exists():\n    Path(run_dir, 'reached').touch()\n    time.sleep(100)"
    write(tmp_path / "n.ipynb", PARAMETERS, hangs, FINISH)
    flag = str(tmp_path / "go")
    text = f"notebook: n.ipynb\nrun_dir: runs\nparameters: {{flag: {flag!r}}}\ngrid: {{k: [1, 2, 3]}}\n"
    code = f"from specbench.bench.sweep import sweep_file\nsweep_file({str(spec_file(tmp_path, text))!r}, jobs=1)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    while not list(tmp_path.glob("runs/*/reached")) and child.poll() is None:
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.wait() != 0
    index = pd.read_parquet(tmp_path / "runs" / "index.parquet")
    assert list(index.status) == ["complete", "not run", "not run"]
    (reached,) = tmp_path.glob("runs/*/reached")
    assert "KeyboardInterrupt" in json.loads((reached.parent / "run.json").read_bytes())["error"]
    Path(flag).touch()
    assert list(sweep_file(tmp_path / "sweep.yaml", progress=False).status) == ["complete"] * 3
    assert len(list(tmp_path.glob("runs/.earlier/*"))) == 1


@pytest.mark.parametrize("file", sorted((ROOT / "data" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_can_start(file: Path) -> None:
    spec = read_spec(file)
    assert spec.run_dir.parent == ROOT / "data" / "runs" and len(plan_runs(spec.notebook, spec.run_dir, spec.sets)) == len(spec.sets) > 1

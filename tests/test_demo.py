"""The demo on two small notebooks: its table, its exit status, what it does when run again."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_notebook_runner import FINISH, PARAMETERS, write

from specbench import demo


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a notebook that works and one that fails until a file is there; its runs go to a folder of its own."""
    folder = tmp_path / "checkout"
    (folder / "notebooks").mkdir(parents=True)
    write(folder / "notebooks" / "01_good.ipynb", PARAMETERS, FINISH)
    needs = f"from pathlib import Path\nassert Path({str(tmp_path / 'there')!r}).exists(), 'not there yet'"
    write(folder / "notebooks" / "02_bad.ipynb", PARAMETERS, needs, FINISH)
    monkeypatch.setattr(demo, "ROOT", folder)
    monkeypatch.setattr(demo, "PARAMETERS", {"01_good": {"k": 4}, "02_bad": {}})
    monkeypatch.setattr(demo, "prepare", lambda: None)
    monkeypatch.setattr(demo, "runs_root", lambda: tmp_path / "runs")
    return folder


@pytest.mark.notebook
def test_a_failure_is_told_and_the_next_run_does_only_what_is_missing(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--run", "mine"]) == 1
    out, err = capsys.readouterr()
    assert "01_good                 complete" in out and "k 4" in out
    assert "02_bad                  failed" in out and "AssertionError: not there yet" in out
    assert str(tmp_path / "runs" / "mine") in out
    assert str(tmp_path / "runs" / "mine" / "02_bad" / "02_bad.ipynb") in err

    (tmp_path / "there").touch()
    good = tmp_path / "runs" / "mine" / "01_good" / "01_good.ipynb"
    before = good.stat().st_mtime_ns
    assert demo.main(["--run", "mine"]) == 0
    assert good.stat().st_mtime_ns == before, "a finished notebook is not run again"
    assert demo.main(["--run", "mine"]) == 0
    assert "complete already" in capsys.readouterr().out


def test_the_default_name_stands_for_code_notebooks_and_data(checkout: Path) -> None:
    first = demo.fingerprint()
    assert demo.fingerprint() == first and len(first) == 8
    (checkout / "data" / "draft").mkdir(parents=True)
    (checkout / "data" / "draft" / "config.json").write_text("{}")
    second = demo.fingerprint()
    (checkout / "specbench").mkdir()
    (checkout / "specbench" / "new.py").write_text("")
    assert len({first, second, demo.fingerprint()}) == 3


def test_without_notebooks_it_says_where_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    assert demo.main([]) == 1
    assert "run the demo from a checkout" in capsys.readouterr().err


def test_the_demo_runs_shipped_notebooks_with_parameters_that_they_have() -> None:
    for name, parameters in demo.PARAMETERS.items():
        demo.check_parameters(demo.ROOT / "notebooks" / f"{name}.ipynb", parameters)

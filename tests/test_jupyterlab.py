"""The JupyterLab check itself passes a sound notebook and names what is wrong with a damaged one; skipped where no browser is."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_sweep import PARAMETERS, write

from specbench.bench.jupyterlab import BROWSERS, open_notebooks
from specbench.errors import ConfigError

needs_browser = pytest.mark.skipif(
    find_spec("playwright") is None or not any(map(shutil.which, BROWSERS)), reason="no playwright, or no Chromium on this machine"
)
FINISH = "from specbench.bench.session import finish\nfinish(run_dir, k=k)"
FIGURES = "from matplotlib import pyplot\npyplot.plot([1, 2]);"
BAR = "from tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass"


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = write(tmp_path / "n.ipynb", PARAMETERS, FINISH)
    with pytest.raises(ConfigError, match="none of the notebooks has a parameter tokens"):
        open_notebooks([notebook], tmp_path / "out", {"tokens": 1})
    monkeypatch.setattr("specbench.bench.jupyterlab.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'specbench\[browser\]'"):
        open_notebooks([notebook], tmp_path / "out")


@needs_browser
@pytest.mark.notebook
def test_a_sound_and_a_damaged_notebook(tmp_path: Path) -> None:
    sound = write(tmp_path / "sound.ipynb", PARAMETERS, BAR, FIGURES, FIGURES, FINISH)
    damaged = write(tmp_path / "damaged.ipynb", PARAMETERS, "1 / 0", FINISH)
    before = sound.read_bytes()
    found = open_notebooks([sound, damaged], tmp_path / "out", {"k": 4}, timeout_s=120)
    good, bad = found
    assert good.good and good.figures == 2 and good.bars == 1, (good.errors, good.layout)
    assert sound.read_bytes() == before, "the source is not touched"
    assert json.loads((tmp_path / "out" / "sound" / "result.json").read_bytes())["facts"] == {"k": 4}
    assert not bad.good and any("ZeroDivisionError" in error for error in bad.errors) and any("complete" in error for error in bad.errors)
    assert all((tmp_path / "out" / name).stat().st_size > 5000 for one in found for name in one.screenshots)

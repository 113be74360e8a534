"""Folders that are built whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from specbench.build_once import MANIFEST, build_once, cache_folder, is_finished
from specbench.errors import CheckpointFileError, DownloadError

RECIPE = {"version": 1}


class Filler:
    """Writes two files, counts its calls, and raises `error` after the first file if there is one."""

    def __init__(self, text: str = "weights", error: Exception | None = None) -> None:
        self.text, self.error, self.calls = text, error, 0

    def __call__(self, work: Path) -> None:
        self.calls += 1
        (work / "a.bin").write_text(self.text)
        if self.error:
            raise self.error
        (work / "b.bin").write_text(self.text * 2)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".model.lock"}


def test_built_once_and_found_again(tmp_path: Path) -> None:
    fill = Filler()
    folder = build_once(tmp_path / "cache" / "model", RECIPE, 0, fill)
    assert build_once(folder, RECIPE, 0, fill) == folder
    assert fill.calls == 1
    assert names(tmp_path / "cache") == {"model"} and names(folder) == {"a.bin", "b.bin", MANIFEST}
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["recipe"] == RECIPE and manifest["files"] == {"a.bin": 7, "b.bin": 14}
    assert {"specbench", "python", "torch", "transformers"} <= set(manifest["versions"])


def test_another_recipe_replaces_the_folder(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "model", RECIPE, 0, Filler("old"))
    build_once(folder, {"version": 2}, 0, Filler("new"))
    assert (folder / "a.bin").read_text() == "new" and names(tmp_path) == {"model"}


@pytest.mark.parametrize("damage", ["cut", "missing", "no manifest", "no JSON", "other JSON"])
def test_a_damaged_folder_is_built_again(tmp_path: Path, damage: str) -> None:
    fill = Filler()
    folder = build_once(tmp_path / "model", RECIPE, 0, fill)
    if damage == "cut":
        (folder / "b.bin").write_text("weigh")
    elif damage == "missing":
        (folder / "b.bin").unlink()
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_text("{" if damage == "no JSON" else "[1]")
    assert not is_finished(folder, RECIPE)
    build_once(folder, RECIPE, 0, fill)
    assert fill.calls == 2 and is_finished(folder, RECIPE)


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("I/O error: No space left on device (os error 28)"),
    Exception("No space left on device (os error 28)"),  # as tokenizers raises it
]


@pytest.mark.parametrize("error", FULL, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("before", [False, True], ids=["first build", "rebuild"])
def test_a_full_disk_leaves_nothing_half_built(tmp_path: Path, error: Exception, before: bool) -> None:
    if before:
        build_once(tmp_path / "model", RECIPE, 0, Filler("old"))
    with pytest.raises(CheckpointFileError, match="make room there, or set SPECBENCH_CACHE"):
        build_once(tmp_path / "model", {"version": 2}, 0, Filler(error=error))
    assert names(tmp_path) == ({"model"} if before else set())
    assert not before or is_finished(tmp_path / "model", RECIPE)


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 10 << 20))
    fill = Filler()
    with pytest.raises(CheckpointFileError, match="it takes 500 MiB, 10 MiB are free.*SPECBENCH_CACHE"):
        build_once(tmp_path / "model", RECIPE, 500 << 20, fill)
    assert fill.calls == 0 and names(tmp_path) == set()


def test_what_is_raised_on_purpose_passes_through(tmp_path: Path) -> None:
    for error in (DownloadError("no network"), ZeroDivisionError("a bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            build_once(tmp_path / "model", RECIPE, 0, Filler(error=error))
        assert caught.value is error and names(tmp_path) == set()


def test_a_cache_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFileError, match="could not be built.*SPECBENCH_CACHE"):
        build_once(tmp_path / "file" / "model", RECIPE, 0, Filler())


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    left = tmp_path / ".model.abc.building" / "model"
    left.mkdir(parents=True)
    (left / "a.bin").write_text("half")
    build_once(tmp_path / "model", RECIPE, 0, Filler())
    assert names(tmp_path) == {"model"}


SCRIPT = """
import sys, time
from pathlib import Path
from specbench.build_once import build_once

def fill(work):
    with open(sys.argv[1] + "/calls", "a") as calls:
        calls.write("x")
    (work / "a.bin").write_text("weights")
    time.sleep(1)
    (work / "b.bin").write_text("weights")

folder = build_once(Path(sys.argv[1]) / "model", {"version": 1}, 0, fill)
print(sorted(path.name for path in folder.iterdir()))
"""


def test_processes_at_once_build_once_and_all_find_it(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate()[0].strip() for process in running}
    assert found == {"['a.bin', 'b.bin', 'specbench.json']"}
    assert (tmp_path / "calls").read_text() == "x"
    assert names(tmp_path) == {"model", "calls"}


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "specbench"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "specbench"
    monkeypatch.setenv("SPECBENCH_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"

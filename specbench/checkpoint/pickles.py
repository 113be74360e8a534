"""Weights in torch's pickle files (*.bin, *.pt), through the unpickler that runs no code.

What enters: files that `weight_files` chose. What leaves: tensors, or their names, shapes and dtypes without data. It does not know
models. A file that asks for anything beyond tensors and plain containers is refused.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, CheckpointFileError
from .files import DTYPES, TensorInfo, merge, read_index
from .weight_files import INDEXES, WeightFiles

NAMES = {dtype: name for name, dtype in DTYPES.items()}
# How torch's unpickler says that it will not do something (anything else is a damaged file): torch/_weights_only_unpickler.py.
REFUSALS = ("unsupported GLOBAL", "Unsupported global", "Unsupported class", "unrecognized function", "Can only")


def load_state_dict(file: Path, map_location: str | dict[str, str] = "cpu") -> dict[str, Tensor]:
    """The tensors of one pickle file by name, in its order; a zip file (torch 1.6 and later) is mapped, not read.

    Raises:
        CheckpointError: it asks to run code when unpickled, or holds something other than tensors by name.
        CheckpointFileError: missing, cut short, or no torch file.
    """
    try:
        state = torch.load(file, map_location=map_location, weights_only=True, mmap=zipfile.is_zipfile(file) or None)
    except FileNotFoundError:
        raise CheckpointFileError(f"{file} is missing; fetch it again, or correct the index beside it") from None
    except pickle.UnpicklingError as error:
        raise _unsafe(file, error) from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError, OSError) as error:
        said = f"{file} is no whole torch file ({type(error).__name__}: {_line(error)}); fetch it again"
        raise CheckpointFileError(said, code="damaged-file") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds a {type(state).__name__}; tensors by name (a state_dict) are expected", code="damaged-file")
    strange = next((key for key, value in state.items() if not isinstance(key, str) or not isinstance(value, Tensor)), None)
    if strange is not None:
        what = f"{strange!r}: {type(state[strange]).__name__}"
        said = f"{file} holds {what}; tensors by name are expected (a state_dict itself, not a dict around one)"
        raise CheckpointError(said, code="damaged-file")
    return state


def read_pickled(files: WeightFiles, map_location: str | dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, file by file, in the order of each state_dict."""
    for file in files.files:
        yield from load_state_dict(file, map_location).items()


def pickled_headers(files: WeightFiles) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes, sorted by name: each file is unpickled onto the meta device, and no tensor data is read from zip files.

    Raises:
        CheckpointError, CheckpointFileError: see `load_state_dict`; a dtype that is not read; a tensor that two files hold, or that the
            index names and no file holds.
    """
    infos = merge({name: _info(file, name, tensor) for name, tensor in load_state_dict(file, "meta").items()} for file in files.files)
    index = files.folder / INDEXES.get(files.kind, "")
    if files.kind in INDEXES and index.is_file():
        weight_map = read_index(index)
        lying = [name for name, shard in weight_map.items() if name not in infos or infos[name].file.name != shard]
        if lying:
            said = f"{index} says that {weight_map[lying[0]]} holds {lying[0]!r}, but it does not ({len(lying)} such)"
            raise CheckpointFileError(said, code="index-mismatch")
    return infos


def _info(file: Path, name: str, tensor: Tensor) -> TensorInfo:
    if tensor.dtype not in NAMES or tensor.layout != torch.strided:
        readable = ", ".join(str(dtype) for dtype in NAMES)
        said = f"{file}: {name!r} is {tensor.dtype}, {tensor.layout}; dense tensors of these are readable: {readable}"
        raise CheckpointError(said, code="damaged-file")
    return TensorInfo(name, NAMES[tensor.dtype], tuple(tensor.shape), file, 0, tensor.numel() * tensor.dtype.itemsize, pickled=True)


def _unsafe(file: Path, error: Exception) -> CheckpointError | CheckpointFileError:
    text = " ".join(str(error).split())
    asked = next((words for words in REFUSALS if words in text), None)
    if asked is None:
        return CheckpointFileError(f"{file} is no whole torch file; fetch it again", code="damaged-file")
    detail = text[text.index(asked) :].split(" Check the documentation")[0].split(" Please use")[0][:160]
    return CheckpointError(
        f"{file} asks for more than tensors when unpickled ({detail}), which could run code; refused. Get the weights as safetensors, "
        "or from someone who saved a plain state_dict",
        code="unsafe-pickle",
        evidence={f"files: {file.name}": detail},
    )


def _line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""

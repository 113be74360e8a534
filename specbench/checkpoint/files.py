"""Checkpoint folders: which files hold which tensors, and reading them straight into place.

What enters: a local folder. What leaves: tensor headers (no weight byte is read for them), and tensors on demand. It does not
know what tensors mean, which model they belong to, or how they are quantized.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, CheckpointFileError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own bound


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: name, safetensors dtype string, shape, and the bytes [begin, end) of `file` that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensor headers of one safetensors file, checked against its size.

    Raises:
        CheckpointFileError: missing, empty, cut short, or not a safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 < length <= min(HEADER_LIMIT, size - 8):
                raise CheckpointFileError(f"{path} ({size} bytes) is not a whole safetensors file; fetch it again")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is missing; fetch it again, or correct the index beside it") from None
    except ValueError as error:
        raise CheckpointFileError(f"{path}: its header is not JSON ({error}); fetch it again") from None
    base = 8 + length
    infos = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info = _tensor_info(path, name, entry, base)
        if info.end > size:
            raise CheckpointFileError(f"{path} has {size} bytes, but {name!r} ends at byte {info.end}: the file is cut short; fetch it again")
        infos[name] = info
    return infos


def _tensor_info(path: Path, name: str, entry: dict[str, Any], base: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointFileError(f"{path}: the header entry of {name!r} is {entry!r}, not dtype, shape and data_offsets") from None
    if dtype not in DTYPES:
        raise CheckpointFileError(f"{path}: {name!r} has dtype {dtype!r}; readable: {', '.join(DTYPES)}")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointFileError(f"{path}: {name!r} {dtype} {list(shape)} needs {expected} bytes, its header gives {end - begin}")
    return TensorInfo(name, dtype, shape, path, base + begin, base + end)


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Tensor headers of a checkpoint folder: single file, or shards with an index that must agree with them.

    Raises:
        CheckpointFileError: no safetensors file, a shard missing or cut short, or an index that names a tensor its shard lacks.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        infos: dict[str, TensorInfo] = {}
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise CheckpointFileError(f"{index} names {shard!r}, which lies outside the checkpoint folder; refused")
            infos.update(read_header(folder / shard))
        lying = [name for name, shard in weight_map.items() if name not in infos or infos[name].file.name != shard]
        if lying:
            raise CheckpointFileError(f"{index} says that {weight_map[lying[0]]} holds {lying[0]!r}, but its header does not ({len(lying)} such)")
        return {name: infos[name] for name in sorted(weight_map)}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointFileError(f"{folder} holds no *.safetensors file")
    infos = {}
    for file in files:
        infos.update(read_header(file))
    return dict(sorted(infos.items()))


def read_tensor(info: TensorInfo) -> Tensor:
    """The tensor of `info`, on CPU, in its stored dtype and shape."""
    out = torch.empty(info.shape, dtype=DTYPES[info.dtype])
    read_into(info, out)
    return out


def read_into(info: TensorInfo, out: Tensor) -> None:
    """Fill `out` from the file; bytes go straight into it when dtype, device and layout allow, else through one temporary.

    A dtype that differs is converted as `Tensor.copy_` does; callers that must not convert compare before.

    Raises:
        CheckpointError: shapes differ.
        CheckpointFileError: the file ends early.
    """
    if tuple(out.shape) != info.shape:
        raise CheckpointError(f"{info.name} in {info.file.name} is {list(info.shape)}; its place is {list(out.shape)}")
    if out.device.type != "cpu" or out.dtype != DTYPES[info.dtype] or not out.is_contiguous():
        out.copy_(read_tensor(info))
        return
    if info.end == info.begin:
        return
    view = memoryview(out.detach().reshape(-1).view(torch.uint8).numpy())
    with info.file.open("rb", buffering=0) as file:
        offset = 0
        while offset < len(view):
            count = os.preadv(file.fileno(), [view[offset:]], info.begin + offset)
            if count == 0:
                raise CheckpointFileError(f"{info.file} ended while {info.name!r} was read; fetch it again")
            offset += count


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointFileError: missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is missing: this is not a checkpoint folder") from None
    except ValueError as error:
        raise CheckpointFileError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointFileError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def total_bytes(infos: Mapping[str, TensorInfo]) -> int:
    """Stored bytes of all tensors."""
    return sum(info.end - info.begin for info in infos.values())

"""Checkpoint folders: which files hold which tensors, and reading them straight into place.

What enters: a local folder. What leaves: tensor headers (no weight byte is read for them), and tensors on demand. It does not
know what tensors mean, which model they belong to, or how they are quantized.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError, CheckpointFileError, CheckpointShapeError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.uint8,  # exponents, as bytes
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 32 << 20  # bytes: 200,000 tensors; parsed, a header takes some ten times its size
JSON_LIMIT = 64 << 20  # bytes of a config or an index
BLOCK = 1 << 19  # bytes of one read: what a core's cache holds


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: name, safetensors dtype string, shape, and the bytes [begin, end) of `file` that hold it.

    pickled: `file` is a pickle, which has no byte ranges: begin is 0 and end the size, and bytes come through `load_formats`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    pickled: bool = False


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensor headers of one safetensors file, checked against its size and one another.

    Raises:
        CheckpointFileError: missing, empty, cut short, or not a safetensors file; tensors that overlap or leave gaps, as
            safetensors itself refuses.
    """
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 < length <= min(HEADER_LIMIT, size - 8):
                said = f"; its header would be {length} bytes, at most {HEADER_LIMIT} are read" if HEADER_LIMIT < length else ""
                raise _damaged(f"{path} ({size} bytes) is not a whole safetensors file{said}; fetch it again")
            header = json.loads(file.read(length), object_pairs_hook=_once)
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is missing; fetch it again, or correct the index beside it", code="missing-shard") from None
    except CheckpointFileError:
        raise
    except OSError as error:
        raise _damaged(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(f"{path}: its header is not JSON ({error}); fetch it again") from None
    if not isinstance(header, dict):
        raise _damaged(f"{path}: its header is a {type(header).__name__}, not an object; fetch it again")
    return tensor_infos(path, header, 8 + length, size)


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe or device, which could block or never end, is refused."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # a directory has its own error
        raise OSError(0, "it is no regular file")
    return path.open("rb")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return found


def _damaged(text: str) -> CheckpointFileError:
    return CheckpointFileError(text, code="damaged-file")


def tensor_infos(path: Path, header: dict[str, Any], base: int, size: int) -> dict[str, TensorInfo]:
    """The entries of a safetensors header, checked against one another and against the file at `path`.

    base: the byte where data begin. size: bytes of the whole file, which need not lie there yet.

    Raises:
        CheckpointFileError: an entry that is not one, an unreadable dtype, tensors that overlap, leave gaps or do not end with the file.
    """
    infos = [_tensor_info(path, name, entry, base) for name, entry in header.items() if name != "__metadata__"]
    end, before = base, "the header"
    for info in sorted(infos, key=lambda info: (info.begin, info.end)):
        if info.begin != end:
            found = f"{info.name!r} begins at byte {info.begin}, but {before} ends at byte {end}"
            raise _damaged(f"{path}: {found}; fetch it again")
        end, before = info.end, repr(info.name)
    if end != size:
        found = "the file is cut short" if end > size else "something follows"
        raise _damaged(f"{path} has {size} bytes, but {before} ends at byte {end}: {found}; fetch it again")
    return {info.name: info for info in infos}


def _tensor_info(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        readable = isinstance(dtype, str) and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        readable = False
    if not readable:
        raise _damaged(f"{path}: the header entry of {name!r} is {repr(entry)[:200]}, not dtype, shape and data_offsets")
    if dtype not in DTYPES:
        raise _damaged(f"{path}: {name!r} has dtype {dtype[:40]!r}; readable: {', '.join(DTYPES)}")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise _damaged(f"{path}: {name!r} {dtype} {list(shape)[:8]} needs {expected} bytes, its header gives {end - begin}")
    return TensorInfo(name, dtype, shape, path, base + begin, base + end)


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Tensor headers of a checkpoint folder: single file, or shards with an index that must agree with them.

    Raises:
        CheckpointFileError: no safetensors file, a shard missing or cut short, an index that is damaged, leads out of the folder or names a
        tensor
            that its shard lacks, or a tensor that two files hold.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_index(index)
        infos = merge(read_header(folder / shard) for shard in sorted(set(weight_map.values())))
        lying = [name for name, shard in weight_map.items() if name not in infos or infos[name].file.name != shard]
        if lying:
            name = lying[0]
            said = f"{index} says that {weight_map[name]} holds {name!r}, but its header does not ({len(lying)} such)"
            raise CheckpointFileError(said, code="index-mismatch", evidence={f"{index.name}: {name}": weight_map[name]})
        return infos  # also what a shard holds and the index does not name: every engine reads whole shards
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointFileError(f"{folder} holds no *.safetensors file", code="no-weights")
    return merge(map(read_header, files))


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> name of the file beside `index` that holds it, sorted by tensor name.

    Raises:
        CheckpointFileError: missing, damaged, or a file that lies elsewhere.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointFileError(f"{index} has no weight_map from tensor names to file names; fetch it again", code="bad-json")
    for shard in weight_map.values():
        if Path(shard).name != shard or shard in ("", "..") or "\\" in shard:
            said = {f"{index.name}: weight_map": shard}
            raise CheckpointFileError(
                f"{index} names {shard!r}, which lies outside the checkpoint folder; refused", code="index-outside", evidence=said
            )
    return dict(sorted(weight_map.items()))


def merge(headers: Iterable[dict[str, TensorInfo]]) -> dict[str, TensorInfo]:
    """Headers of several files as one, sorted by tensor name.

    Raises:
        CheckpointFileError: a tensor that two files hold.
    """
    infos: dict[str, TensorInfo] = {}
    for header in headers:
        twice = sorted(infos.keys() & header.keys())
        if twice:
            name = twice[0]
            files = f"{infos[name].file} and in {header[name].file}"
            said = {f"{header[name].file.name}: {name}": "stored", f"{infos[name].file.name}: {name}": "stored"}
            raise CheckpointFileError(
                f"{name!r} lies in {files} ({len(twice)} such); remove one of the files", code="stored-twice", evidence=said
            )
        infos.update(header)
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
        CheckpointShapeError: shapes differ.
        CheckpointFileError: the file ends early.
    """
    if not same_shape(info.shape, tuple(out.shape)):
        raise CheckpointShapeError(f"{info.name} in {info.file.name} is {list(info.shape)}; its place is {list(out.shape)}")
    out = out.view(info.shape)
    if info.pickled:
        raise CheckpointError(f"{info.name} lies in the pickle {info.file.name}, which has no byte ranges; read it through load_formats")
    if fits_directly(info, out):
        for _ in read_blocks(info, out):
            pass
    else:
        out.copy_(read_tensor(info))


def fits_directly(info: TensorInfo, out: Tensor) -> bool:
    """Whether the stored bytes are those of `out` as it lies in memory."""
    return out.device.type == "cpu" and out.dtype == DTYPES[info.dtype] and out.is_contiguous() and not info.pickled


def read_blocks(info: TensorInfo, out: Tensor) -> Iterator[slice]:
    """Fill `out`, which fits directly, and give each part (of its flat view) as soon as it is read and while it lies in the cache.

    Raises:
        CheckpointFileError: the file ends early.
    """
    data: Any = out.detach().reshape(-1).view(torch.uint8).numpy()
    view, size = memoryview(data), out.dtype.itemsize
    with info.file.open("rb", buffering=0) as file:
        for start in range(0, len(view), BLOCK):
            offset, end = start, min(start + BLOCK, len(view))
            while offset < end:
                count = os.preadv(file.fileno(), [view[offset:end]], info.begin + offset)
                if count == 0:
                    raise CheckpointFileError(f"{info.file} ended while {info.name!r} was read; fetch it again")
                offset += count
            yield slice(start // size, end // size)


def same_shape(stored: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a tensor fits its place: equal shapes, or one number each (files store scalars as [] and as [1])."""
    return stored == expected or math.prod(stored) == math.prod(expected) == 1


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointFileError: missing, not JSON, or not an object.
    """
    try:
        with _open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > JSON_LIMIT:
                raise CheckpointFileError(f"{path} has {size} bytes; at most {JSON_LIMIT} are read of a config or index", code="bad-json")
            text = file.read(size)
        value = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is missing: this is not a checkpoint folder", code="no-config") from None
    except CheckpointFileError:
        raise
    except OSError as error:
        raise CheckpointFileError(f"{path} cannot be read: {error.strerror}", code="bad-json") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointFileError(f"{path} is not JSON: {error}", code="bad-json") from None
    if not isinstance(value, dict):
        raise CheckpointFileError(f"{path} holds a {type(value).__name__}, not an object", code="bad-json")
    return value


def total_bytes(infos: Mapping[str, TensorInfo]) -> int:
    """Stored bytes of all tensors."""
    return sum(info.end - info.begin for info in infos.values())

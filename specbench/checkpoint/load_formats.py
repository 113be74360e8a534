"""Weights of a checkpoint folder, one after another, as a load config asks for them.

What enters: a folder and a `LoadConfig`. What leaves: a `WeightSource`, which gives (name, tensor) in the order of vLLM's loader: files
in natural order, names sorted within a safetensors file, a pickle in the order of its state_dict. It does not know modules, plans or
policies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError
from .files import DTYPES, INDEX, TensorInfo, merge, read_header, read_headers, read_into, read_tensor
from .load_config import LoadConfig
from .numpy_cache import numpy_cache
from .pickles import load_state_dict, pickled_headers, read_pickled
from .weight_files import WeightFiles, weight_files

Stored = TensorInfo | Tensor
DUMMY_SEED, DUMMY_LIMIT = 1234, 1e-3  # vLLM model_executor/model_loader/weight_utils.py: initialize_dummy_weights


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of one folder under one load config. Iterating gives (name, tensor), tensors on the CPU unless a package loads
    elsewhere."""

    files: WeightFiles
    load_config: LoadConfig

    @property
    def dummy(self) -> bool:
        """Whether nothing is read, and weights are drawn (`fill_dummy`)."""
        return self.load_config.load_format == "dummy"

    @property
    def threads(self) -> int:
        """How many threads may copy what `stored` gives: 1 where each tensor is valid only until the next."""
        return 1 if self.load_config.load_format in ("fastsafetensors", "runai_streamer") else self.load_config.num_threads

    def headers(self) -> dict[str, TensorInfo]:
        """Names, dtypes and shapes, sorted by name; no tensor data is read (see `headers`)."""
        return headers(self.files)

    def stored(self) -> Iterator[tuple[str, Stored]]:
        """Every tensor in loading order: a `TensorInfo` where its bytes can go straight from the file into their place, else the tensor."""
        if self.dummy:
            raise ConfigError(f"load_format 'dummy' reads nothing from {self.files.folder}; draw weights with fill_dummy")
        return READERS.get(self.load_config.load_format, _read)(self)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, item in self.stored():
            yield name, item if isinstance(item, Tensor) else read_tensor(item)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with one tensor by its stored name (see `files.read_into`)."""
        infos = {} if self.files.pickled else self.headers()
        if name in infos:
            read_into(infos[name], out)
        else:
            out.copy_(self.read(name))

    def read(self, name: str) -> Tensor:
        """One tensor by its stored name, on the CPU.

        Raises:
            CheckpointError: no such tensor.
        """
        if self.files.pickled:
            for file in self.files.files:
                state = load_state_dict(file, self.load_config.pt_load_map_location)
                if name in state:
                    return state[name].cpu()
        elif name in (infos := self.headers()):
            return read_tensor(infos[name])
        raise CheckpointError(f"{self.files.folder} holds no {name!r}")


def weights(folder: Path, load_config: LoadConfig) -> WeightSource:
    """The weights of `folder` under `load_config`; no file is opened yet.

    Raises:
        CheckpointFileError: no weight files for this load format, or one that an index names is missing.
    """
    return WeightSource(weight_files(folder, load_config.load_format), load_config)


def headers(files: WeightFiles) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of all tensors, sorted by name.

    Raises:
        CheckpointFileError: a file cut short or no weight file, an index that names what its file lacks, a tensor that two files hold.
        CheckpointError: a pickle that asks for more than tensors.
    """
    if files.pickled:
        return pickled_headers(files)
    if files.kind and (files.folder / INDEX).is_file():
        return read_headers(files.folder)
    return merge(map(read_header, files.files))


@torch.no_grad()
def fill_dummy(module: nn.Module) -> None:
    """Draw every parameter of `module`: uniform in +-1e-3 with one seed per parameter, as vLLM's dummy loader; integers become 0."""
    for parameter in module.parameters():
        dummy_(parameter.data)


def dummy_(out: Tensor) -> None:
    """Fill one tensor as `fill_dummy` does: the values depend on its shape only, not on its device."""
    if not out.is_floating_point():
        out.zero_()
        return
    generator = torch.Generator().manual_seed(DUMMY_SEED)
    out.copy_(torch.empty(out.shape, dtype=torch.float32).uniform_(-DUMMY_LIMIT, DUMMY_LIMIT, generator=generator))


def _read(source: WeightSource) -> Iterator[tuple[str, Stored]]:
    files, config = source.files, source.load_config
    if files.pickled:
        yield from read_pickled(files, config.pt_load_map_location)
        return
    if config.safetensors_load_strategy == "prefetch":
        with _prefetch(files, config):
            yield from _safetensors(files)
    elif config.safetensors_load_strategy == "eager":
        for file in files.files:
            yield from _eager(file)
    else:
        yield from _safetensors(files)


def _safetensors(files: WeightFiles) -> Iterator[tuple[str, Stored]]:
    for file in files.files:
        yield from sorted(read_header(file).items())


def _eager(file: Path) -> Iterator[tuple[str, Stored]]:
    infos = read_header(file)
    whole = torch.empty(file.stat().st_size, dtype=torch.uint8)
    view = whole.numpy().data
    with file.open("rb", buffering=0) as opened:
        offset = 0
        while offset < len(view) and (count := opened.readinto(view[offset:])):
            offset += count
    for name, info in sorted(infos.items()):
        piece = whole[info.begin : info.end]
        aligned = info.begin % DTYPES[info.dtype].itemsize == 0
        yield name, (piece if aligned else piece.clone()).view(DTYPES[info.dtype]).view(info.shape)


class _prefetch:
    """Threads that read the files once, block by block, so that their pages lie in memory before they are asked for."""

    def __init__(self, files: WeightFiles, config: LoadConfig) -> None:
        self.files, self.block = files, config.safetensors_prefetch_block_size
        self.pool = ThreadPoolExecutor(config.safetensors_prefetch_num_threads, thread_name_prefix="prefetch")
        self.buffers = threading.local()

    def __enter__(self) -> None:
        for file in self.files.files:
            for offset in range(0, file.stat().st_size, self.block):
                self.pool.submit(self._touch, file, offset)

    def _touch(self, file: Path, offset: int) -> None:
        if not hasattr(self.buffers, "block"):
            self.buffers.block = bytearray(self.block)
        with file.open("rb", buffering=0) as opened:
            os.preadv(opened.fileno(), [self.buffers.block], offset)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def _numpy(source: WeightSource) -> Iterator[tuple[str, Stored]]:
    return numpy_cache(source.files, source.load_config.pt_load_map_location)


def _fastsafetensors(source: WeightSource) -> Iterator[tuple[str, Stored]]:
    package = _package("fastsafetensors", "fastsafetensors", "fastsafetensors")
    device = source.load_config.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    for file in source.files.files:
        with package.fastsafe_open([str(file)], device=device, nogds=True) as opened:  # GPUDirect needs a driver of its own
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def _runai_streamer(source: WeightSource) -> Iterator[tuple[str, Stored]]:
    package = _package("runai_streamer", "runai_model_streamer", "runai-model-streamer")
    with package.SafetensorsStreamer() as streamer:
        for file in source.files.files:
            streamer.stream_file(str(file))
            yield from streamer.get_tensors()  # views of a buffer that is used again: valid until the next one


def _package(load_format: str, module: str, name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"load_format {load_format!r} needs the package {name} ({error}): pip install {name}, or take load_format 'safetensors'"
        ) from error


READERS: dict[str, Callable[[WeightSource], Iterator[tuple[str, Stored]]]] = {
    "npcache": _numpy,
    "fastsafetensors": _fastsafetensors,
    "runai_streamer": _runai_streamer,
}

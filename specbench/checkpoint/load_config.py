"""How the weights of one model are to be found and read: vLLM's `LoadConfig`, checked.

What enters: vLLM's dict (`load_config`, or `draft_load_config` inside `speculative_config`). What leaves: a `LoadConfig`. It does not know
which model it is for, nor how a format is read.

Fields, defaults and the list of formats: vLLM 0.32.0, vllm/config/load.py and vllm/model_executor/model_loader/.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from ..errors import ConfigError

FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "dummy", "fastsafetensors", "runai_streamer")
# Known to vLLM; named in the refusal, so that a config that was written for it is understood.
OTHER_FORMATS = (
    "bitsandbytes", "gguf", "instanttensor", "ipc_cache", "mistral", "modelexpress", "runai_streamer_sharded", "sharded_state",
    "tensorizer",
)  # fmt: skip
STRATEGIES = (None, "lazy", "eager", "prefetch")
EXTRA_KEYS = ("enable_multithread_load", "num_threads")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """One field per key of vLLM's `LoadConfig`, with vLLM's defaults; lists are tuples. Checked when made.

    load_format: "auto" and "hf" take *.safetensors, else *.bin, else *.pt; "safetensors", "fastsafetensors" and "runai_streamer" only
        *.safetensors; "pt" only *.pt; "npcache" only *.bin, through a numpy cache; "dummy" draws small random values and reads no file.
    download_dir: the hub cache folder that a hub id is fetched into and read from; a local folder is read where it lies.
    safetensors_load_strategy: None and "lazy" read each tensor straight into its place; "eager" reads a whole file first; "prefetch" warms
        the page cache with threads meanwhile.
    model_loader_extra_config: `enable_multithread_load`, and `num_threads` for it (8 if unset); see `num_threads`.
    device: where weights go when the call says "auto".
    ignore_patterns: files of a hub id that are not fetched.
    use_tqdm_on_load: a progress bar for loads of over a second.
    pt_load_map_location: `map_location` of `torch.load`, for *.bin and *.pt.
    safetensors_prefetch_num_threads, safetensors_prefetch_block_size (bytes): how "prefetch" reads.

    Raises:
        ConfigError: an unknown or unsupported value, or one of another type.
    """

    load_format: str = "auto"
    download_dir: str | None = None
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    ignore_patterns: tuple[str, ...] = ("original/**/*",)
    use_tqdm_on_load: bool = True
    pt_load_map_location: str | dict[str, str] = "cpu"
    safetensors_prefetch_num_threads: int = 8
    safetensors_prefetch_block_size: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        _check_format(self.load_format)
        object.__setattr__(self, "load_format", self.load_format.lower())
        object.__setattr__(self, "ignore_patterns", _patterns(self.ignore_patterns))
        for name in ("download_dir", "device"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _refusal(name, value, "a non-empty string or null is expected")
        if self.device is not None:
            _check_device(self.device)
        if self.safetensors_load_strategy not in STRATEGIES:
            raise _refusal("safetensors_load_strategy", self.safetensors_load_strategy, "expected null, 'lazy', 'eager' or 'prefetch'")
        if not isinstance(self.use_tqdm_on_load, bool):
            raise _refusal("use_tqdm_on_load", self.use_tqdm_on_load, "true or false is expected")
        for name in ("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"):
            if not _count(getattr(self, name)):
                raise _refusal(name, getattr(self, name), "an integer of at least 1 is expected")
        _check_map_location(self.pt_load_map_location)
        _check_extra(self.model_loader_extra_config, self.safetensors_load_strategy)

    @property
    def num_threads(self) -> int:
        """Threads that read one file: as many as there are cores, at most 4, unless `enable_multithread_load` says otherwise."""
        extra = self.model_loader_extra_config
        return int(extra.get("num_threads", 8)) if extra.get("enable_multithread_load") else min(4, os.cpu_count() or 1)

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults."""
        said = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != (f.default_factory() if f.default_factory is not MISSING else f.default):
                said[f.name] = value
        return said

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changed().items()) or "defaults"


def parse_load_config(value: LoadConfig | Mapping[str, Any] | None, where: str = "load_config") -> LoadConfig:
    """Read vLLM's load config.

    Args:
        value: the dict; a `LoadConfig`, which is returned as it is; None for all defaults.
        where: what the dict is called in a message.

    Raises:
        ConfigError: a key that vLLM does not know (the message has the nearest one), or a value that `LoadConfig` refuses.
    """
    if isinstance(value, LoadConfig):
        return value
    if value is None:
        return LoadConfig()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r} ({type(value).__name__}); a dict, a LoadConfig or None is expected")
    known = [f.name for f in fields(LoadConfig)]
    for key in value:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}; {_nearest(key, known)}")
    try:
        return LoadConfig(**value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_format(value: Any) -> None:
    if not isinstance(value, str):
        raise _refusal("load_format", value, f"expected one of {', '.join(map(repr, FORMATS))}")
    if value.lower() in OTHER_FORMATS:
        raise _refusal("load_format", value, f"vLLM knows it, but it is not supported here; supported: {', '.join(map(repr, FORMATS))}")
    if value.lower() not in FORMATS:
        raise _refusal("load_format", value, f"no load format; {_nearest(value.lower(), list(FORMATS))}")


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise _refusal("ignore_patterns", value, "a pattern such as 'original/**/*', or a list of them, is expected")
    return patterns


def _check_device(value: str) -> None:
    try:
        torch.device(value)
    except RuntimeError:
        raise _refusal("device", value, "a torch device such as 'cpu' or 'cuda:0' is expected") from None


def _check_map_location(value: Any) -> None:
    pairs = value.items() if isinstance(value, dict) else [("", value)]
    if not all(isinstance(key, str) and isinstance(place, str) and place for key, place in pairs):
        raise _refusal("pt_load_map_location", value, "a device such as 'cpu', or a dict from stored to wanted devices, is expected")


def _check_extra(extra: Any, strategy: str | None) -> None:
    if not isinstance(extra, dict):
        raise _refusal("model_loader_extra_config", extra, f"a dict with {' and '.join(EXTRA_KEYS)} is expected")
    for key in extra:
        if key not in EXTRA_KEYS:
            raise ConfigError(f"model_loader_extra_config has no key {key!r} here; {_nearest(key, list(EXTRA_KEYS))}")
    threaded, threads = extra.get("enable_multithread_load", False), extra.get("num_threads", 1)
    if not isinstance(threaded, bool):
        raise _refusal("model_loader_extra_config.enable_multithread_load", threaded, "true or false is expected")
    if not _count(threads):
        raise _refusal("model_loader_extra_config.num_threads", threads, "an integer of at least 1 is expected")
    if threaded and strategy not in (None, "lazy"):
        raise _refusal("safetensors_load_strategy", strategy, "enable_multithread_load reads lazily; remove one of them")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _nearest(word: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(word), known, n=1)
    return f"nearest: {near[0]!r}" if near else f"known: {', '.join(known)}"


def _refusal(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}: {why}")

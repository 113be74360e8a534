"""What loading a verifier and loading a draft share: where weights come from, on which device and in which dtype they land.

What enters: load configs, modules on the meta device. What leaves: allocated modules, then finished ones. It does not know plans, policies,
or which of the two models it serves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .checkpoint.files import TensorInfo
from .checkpoint.hub import materialize
from .checkpoint.load_config import LoadConfig
from .checkpoint.load_formats import WeightSource, weights
from .errors import ConfigError
from .pair import Checkpoint
from .quant.linear import Linear


def open_weights(checkpoint: Checkpoint, load_config: LoadConfig) -> WeightSource:
    """The weights of a checkpoint; those of a hub checkpoint are fetched first."""
    if load_config.load_format != "dummy":
        materialize(checkpoint)
    return weights(checkpoint.path, load_config)


def progress_of(load_config: LoadConfig, tensors: Mapping[str, TensorInfo]) -> int:
    return len(tensors) if load_config.use_tqdm_on_load else 0


def allocate(module: nn.Module, device: torch.device, skip: set[str], zero: bool = False) -> None:
    """Allocate parameters, except those of the modules named in `skip`; those of packed formats hold what an engine's do before a file
    fills them. `zero` clears plain ones too: nothing promises that a file fills them all."""
    for name, parameter in list(module.named_parameters()):
        if name.rpartition(".")[0] not in skip:
            owner = module.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)  # empty_like of a meta tensor would import sympy
            if isinstance(owner, Linear) and owner.scheme is not None:
                value.fill_(owner.initial(leaf))
            elif zero:
                value.zero_()
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def finish(module: nn.Module, packed: bool, strict: bool = True) -> None:
    """Pack every quantized layer for its kernel (see `Linear.finish`)."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.finish(packed, strict)


def pick_device(device: str, load_config: LoadConfig) -> torch.device:
    if device == "auto" and load_config.device is not None:
        return torch.device(load_config.device)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def pick_dtype(requested: str, planned: str | None) -> torch.dtype:
    name = planned if requested == "auto" else requested
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ConfigError(
            f"dtype is {name!r} ({'from config.json' if requested == 'auto' else 'requested'}); a floating dtype such as bfloat16 is "
            f"expected"
        )
    return value


def pick_cache_dtype(name: str) -> torch.dtype | None:
    """What keys and values are rounded to: None for "auto".

    Raises:
        ConfigError: another name than "auto", "fp8" or "fp8_e4m3".
    """
    if name not in ("auto", "fp8", "fp8_e4m3"):
        raise ConfigError(f"kv_cache_dtype is {name!r}; 'auto', 'fp8' or 'fp8_e4m3' is expected")
    return None if name == "auto" else torch.float8_e4m3fn

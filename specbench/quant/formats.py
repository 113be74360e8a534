"""How the bytes of a linear layer lie on disk, per format, and what numbers they stand for. Adding a format is one entry in `FORMATS`.

What enters: a scheme, sizes, stored tensors. What leaves: the tensors that a file must hold (name, shape, dtype), and dequantized weights.
It does not know models, files or kernels. compressed-tensors' formats are expanded by compressed-tensors itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, UnsupportedLayerError
from .scheme import Scheme

F8 = torch.float8_e4m3fn
LOWEST = torch.finfo(torch.float32).min  # what vLLM's fp8 scale parameters hold until a file fills them


@dataclass(frozen=True, slots=True)
class Slot:
    """One stored tensor of a linear layer.

    shape and dtype as on disk for the whole (possibly fused) layer. shard_dim: the dimension along which the shards of a fused layer (q, k,
    v) are concatenated; None where each shard keeps its own, stacked in front. initial: what the parameter holds before a file fills it
    (vLLM 0.11.0); None is uninitialised memory there, zero here. optional: a file may leave it out.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard_dim: int | None = 0
    initial: float | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Levels:
    """4- or 8-bit integers with their scales: a weight is `(level - zero_point) * scale`.

    levels: int8 [out, in]. scales: [out, groups]. zero_points: int8 [out, groups] or None. order: int64 [in] group of each column, or None
    for consecutive groups.
    """

    levels: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    order: Tensor | None = None


Stored = Mapping[str, Tensor]
Layout = Callable[[Scheme, int, int, torch.dtype], dict[str, Slot]]
Expand = Callable[[Scheme, Stored, int, int], Levels | Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """layout: (scheme, in, out, dtype) -> slots by leaf name. expand: (scheme, stored tensors of one shard, in, out) -> levels or weights
    [out, in].
    """

    layout: Layout
    expand: Expand


def layout(scheme: Scheme | None, in_features: int, out_features: int, dtype: torch.dtype, name: str) -> dict[str, Slot]:
    """The stored tensors of linear layer `name`, by leaf name; a plain layer is {"weight": [out, in]}.

    Raises:
        ConfigError: sizes that the scheme cannot divide.
        UnsupportedLayerError: a format that no linear layer can be built from (mxfp4 of gpt-oss, as vLLM 0.11.0).
    """
    if scheme is None:
        return {"weight": Slot((out_features, in_features), dtype)}
    group = scheme.group_size
    if scheme.strategy == "group" and group is not None and in_features % group:
        raise ConfigError(f"{name}: {in_features} input columns do not divide into groups of {group} ({scheme}); check group_size")
    if scheme.bits == 4 and in_features % 8:
        raise ConfigError(f"{name}: {in_features} input columns do not divide into words of eight 4-bit weights ({scheme})")
    slots = FORMATS[scheme.format].layout(scheme, in_features, out_features, dtype)
    if scheme.activations is not None and not scheme.activations.dynamic:
        slots["input_scale"] = Slot((1,), torch.float32, None, LOWEST)
        if not scheme.activations.symmetric:
            slots["input_zero_point"] = Slot((1,), torch.int8, None)
    return slots


def expand(scheme: Scheme, stored: Stored, in_features: int, out_features: int, name: str, strict: bool = True) -> Levels | Tensor:
    """Stored tensors of one shard as integers with scales, or as weights [out, in] in fp32.

    Args:
        strict: refuse scales that are not finite, or zero; an engine's policy multiplies whatever is there.

    Raises:
        CheckpointError: naming the tensor, the place and the value.
    """
    if strict:
        for leaf, value in stored.items():
            if "scale" in leaf and value.is_floating_point() and not leaf.startswith("input"):
                _check_scale(value.float(), f"{name}.{leaf}")
    return FORMATS[scheme.format].expand(scheme, stored, in_features, out_features)


def dequantize(expanded: Levels | Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [out, in] in `dtype`, computed in fp32 and rounded once."""
    if isinstance(expanded, Tensor):
        return expanded.to(dtype)
    out_features, in_features = expanded.levels.shape
    if expanded.order is None:
        groups = expanded.scales.shape[1]
        weights = expanded.levels.view(out_features, groups, -1).float()
        if expanded.zero_points is not None:
            weights = weights - expanded.zero_points[..., None].float()
        return (weights * expanded.scales[..., None].float()).view(out_features, in_features).to(dtype)
    weights = expanded.levels.float()
    if expanded.zero_points is not None:
        weights = weights - expanded.zero_points.float()[:, expanded.order]
    return (weights * expanded.scales.float()[:, expanded.order]).to(dtype)


def _check_scale(scales: Tensor, name: str) -> None:
    usable = torch.isfinite(scales) & (scales > 0)
    if not bool(usable.all()):
        place = (~usable).nonzero()[0].tolist()
        value = scales[tuple(place)].item()
        raise CheckpointError(f"{name}{place} is {value}; a scale is finite and positive: the file is damaged, fetch it again")


def _groups(scheme: Scheme, in_features: int) -> int:
    return 1 if scheme.group_size is None else in_features // scheme.group_size


# compressed-tensors 0.20 ------------------------------------------------------------------------------------------------------------------


def _packed_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    per_word, groups = 32 // scheme.bits, _groups(scheme, k)
    slots = {
        "weight_packed": Slot((n, -(-k // per_word)), torch.int32),
        "weight_scale": Slot((n, groups), torch.float32),
        "weight_shape": Slot((2,), torch.int64, None),
    }
    if not scheme.symmetric:
        slots["weight_zero_point"] = Slot((-(-n // per_word), groups), torch.int32)
    if scheme.actorder:
        slots["weight_g_idx"] = Slot((k,), torch.int32, None)
    return slots


def _packed_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Levels:
    from compressed_tensors.compressors import unpack_from_int32

    shape = stored["weight_shape"].tolist()
    if shape != [n, k]:
        raise CheckpointError(f"weight_shape says {shape}; the layer is {[n, k]}")
    zero_points = None
    if not scheme.symmetric:
        groups = torch.Size((n, stored["weight_scale"].shape[1]))
        zero_points = unpack_from_int32(stored["weight_zero_point"], scheme.bits, groups, packed_dim=0)
    levels = unpack_from_int32(stored["weight_packed"], scheme.bits, torch.Size((n, k)))
    return Levels(levels, stored["weight_scale"], zero_points, _order(stored.get("weight_g_idx"), scheme, k))


def _order(g_idx: Tensor | None, scheme: Scheme, k: int) -> Tensor | None:
    """Group of each column; None where it is the consecutive order that files without an index have."""
    if g_idx is None or scheme.group_size is None:
        return None
    order, groups = g_idx.long(), k // scheme.group_size
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise CheckpointError(f"g_idx runs {int(order.min())}..{int(order.max())}; groups are 0..{groups - 1}")
    consecutive = torch.arange(k, device=order.device) // scheme.group_size
    return None if torch.equal(order, consecutive) else order


def _scale_shape(scheme: Scheme, k: int, n: int) -> tuple[tuple[int, ...], int | None]:
    if scheme.strategy == "tensor":
        return (1,), None
    if scheme.strategy == "block" and scheme.block is not None:
        return (-(-n // scheme.block[0]), -(-k // scheme.block[1])), 0
    return (n, _groups(scheme, k)), 0


def _naive_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    """int-quantized and float-quantized: `weight` keeps its plain name and shape in the narrow dtype."""
    kind, (shape, dim) = torch.int8 if scheme.format == "int-quantized" else F8, _scale_shape(scheme, k, n)
    initial = LOWEST if kind == F8 else None
    slots = {"weight": Slot((n, k), kind), "weight_scale": Slot(shape, torch.float32, dim, initial)}
    if not scheme.symmetric:
        slots["weight_zero_point"] = Slot(shape, torch.int8, dim)
    return slots


def _naive_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Levels | Tensor:
    scale = stored["weight_scale"]
    if scheme.format == "int-quantized" and scheme.strategy != "block":
        scale = scale.reshape(-1, 1).expand(n, 1) if scale.numel() == 1 else scale
        zero = stored.get("weight_zero_point")
        zero = zero.reshape(-1, 1).expand(n, 1) if zero is not None and zero.numel() == 1 else zero
        return Levels(stored["weight"], scale, zero)
    return stored["weight"].float() * _spread(scale, scheme, k, n)


def _spread(scale: Tensor, scheme: Scheme, k: int, n: int) -> Tensor:
    """A stored scale as something that broadcasts over [out, in]."""
    scale = scale.float()
    if scheme.strategy == "block" and scheme.block is not None:
        return scale.repeat_interleave(scheme.block[0], 0)[:n].repeat_interleave(scheme.block[1], 1)[:, :k]
    if scheme.strategy == "group" and scheme.group_size is not None:
        return scale.repeat_interleave(scheme.group_size, 1)
    return scale.reshape(1, 1) if scale.numel() == 1 else scale.reshape(n, 1)


def _fp4_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    if scheme.format == "mxfp4-pack-quantized":
        return {"weight_packed": Slot((n, k // 2), torch.uint8), "weight_scale": Slot((n, k // 32), torch.uint8)}
    slots = {
        "weight_packed": Slot((n, k // 2), torch.uint8),
        "weight_scale": Slot((n, k // 16), F8),
        "weight_global_scale": Slot((1,), torch.float32, None),
    }
    if scheme.activations is not None:
        slots["input_global_scale"] = Slot((1,), torch.float32, None)
    return slots


def _fp4_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Tensor:
    values = fp4_values(stored["weight_packed"])
    if scheme.format == "mxfp4-pack-quantized":
        scale = torch.exp2(stored["weight_scale"].float() - 127)
    else:
        scale = stored["weight_scale"].float() / stored["weight_global_scale"].float()
    return values * scale.repeat_interleave(k // scale.shape[1], 1)


def fp4_values(packed: Tensor) -> Tensor:
    """E2M1 numbers [out, in] fp32 from bytes [out, in / 2]; the low nibble is the even column (compressed-tensors, ModelOpt, OCP MX
    alike).
    """
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    return torch.where(nibbles >= 8, -table[nibbles & 7], table[nibbles & 7])


# AWQ and GPTQ -----------------------------------------------------------------------------------------------------------------------------

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble that holds output column 8 i + j (AutoAWQ packs columns as 0 2 4 6 1 3 5 7)


def _awq_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    groups = _groups(scheme, k)
    return {
        "qweight": Slot((k, n // 8), torch.int32, 1),
        "qzeros": Slot((groups, n // 8), torch.int32, 1),
        "scales": Slot((groups, n), torch.float32, 1),
    }


def _awq_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Levels:
    def unpack(words: Tensor) -> Tensor:
        shifts = torch.tensor(AWQ_ORDER, dtype=torch.int32, device=words.device) * 4
        return ((words[..., None] >> shifts) & 15).flatten(1)  # [rows, out]

    levels, zeros = unpack(stored["qweight"]).t() - 8, unpack(stored["qzeros"]).t() - 8
    return Levels(levels.to(torch.int8).contiguous(), stored["scales"].t().contiguous(), zeros.to(torch.int8).contiguous())


def _gptq_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    per_word, groups = 32 // scheme.bits, _groups(scheme, k)
    return {
        "qweight": Slot((k // per_word, n), torch.int32, 1),
        "qzeros": Slot((groups, n // per_word), torch.int32, 1),
        "scales": Slot((groups, n), torch.float32, 1),
        "g_idx": Slot((k,), torch.int32, None, optional=not scheme.actorder),
    }


def _gptq_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Levels:
    per_word, top = 32 // scheme.bits, (1 << scheme.bits) - 1
    half = 1 << (scheme.bits - 1)
    shifts = torch.arange(per_word, dtype=torch.int32, device=stored["qweight"].device) * scheme.bits
    levels = ((stored["qweight"][:, None] >> shifts[:, None]) & top).flatten(0, 1)  # [in, out]
    zeros = ((stored["qzeros"][..., None] >> shifts) & top).flatten(1)  # [groups, out]
    if scheme.format == "gptq":  # version 1 stores zero - 1, wrapping within the word
        zeros = (zeros + 1) & top
    levels, zeros = (levels - half).t().to(torch.int8), (zeros - half).t().to(torch.int8)
    return Levels(levels.contiguous(), stored["scales"].t().contiguous(), zeros.contiguous(), _order(stored.get("g_idx"), scheme, k))


# fp8 files, ModelOpt ----------------------------------------------------------------------------------------------------------------------


def _fp8_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    shape, dim = _scale_shape(scheme, k, n)
    leaf = "weight_scale_inv" if scheme.format == "fp8-block" else "weight_scale"
    return {"weight": Slot((n, k), F8), leaf: Slot(shape, torch.float32, dim, LOWEST)}


def _fp8_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Tensor:
    leaf = "weight_scale_inv" if scheme.format == "fp8-block" else "weight_scale"
    return stored["weight"].float() * _spread(stored[leaf], scheme, k, n)


def _modelopt_nvfp4_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    return {
        "weight": Slot((n, k // 2), torch.uint8),
        "weight_scale": Slot((n, k // (scheme.group_size or 16)), F8),
        "weight_scale_2": Slot((1,), torch.float32, None),
        "input_scale": Slot((1,), torch.float32, None, LOWEST),
    }


def _modelopt_nvfp4_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Tensor:
    scale = stored["weight_scale"].float() * stored["weight_scale_2"].float()
    return fp4_values(stored["weight"]) * scale.repeat_interleave(k // scale.shape[1], 1)


# Formats that engines quantize into on load; specbench reads such verifiers through transformers, and builds these only under an engine's
# policy ----


def _bnb_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    if scheme.format == "bnb-int8":
        return {"weight": Slot((n, k), torch.int8), "SCB": Slot((n,), torch.float32, 0)}
    return {"weight": Slot((n * k // 2, 1), torch.uint8)}


def _bnb_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Tensor:
    if scheme.format == "bnb-int8":
        return stored["weight"].float() * stored["SCB"][:, None] / 127
    raise ConfigError(f"{scheme.format} weights are read through transformers (models/hf.py), not by the native loader")


def _mxfp4_layout(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> dict[str, Slot]:
    raise UnsupportedLayerError("Mxfp4 linear layer is not implemented")  # what vLLM 0.11.0 says at the same place


def _mxfp4_expand(scheme: Scheme, stored: Stored, k: int, n: int) -> Tensor:
    raise UnsupportedLayerError("Mxfp4 linear layer is not implemented")


FORMATS: dict[str, Format] = {
    "pack-quantized": Format(_packed_layout, _packed_expand),
    "int-quantized": Format(_naive_layout, _naive_expand),
    "float-quantized": Format(_naive_layout, _naive_expand),
    "nvfp4-pack-quantized": Format(_fp4_layout, _fp4_expand),
    "mxfp4-pack-quantized": Format(_fp4_layout, _fp4_expand),
    "awq": Format(_awq_layout, _awq_expand),
    "gptq": Format(_gptq_layout, _gptq_expand),
    "gptq_v2": Format(_gptq_layout, _gptq_expand),
    "fp8": Format(_fp8_layout, _fp8_expand),
    "fp8-block": Format(_fp8_layout, _fp8_expand),
    "fbgemm-fp8": Format(_fp8_layout, _fp8_expand),
    "modelopt-fp8": Format(_fp8_layout, _fp8_expand),
    "modelopt-nvfp4": Format(_modelopt_nvfp4_layout, _modelopt_nvfp4_expand),
    "bnb-int8": Format(_bnb_layout, _bnb_expand),
    "bnb-nf4": Format(_bnb_layout, _bnb_expand),
    "bnb-fp4": Format(_bnb_layout, _bnb_expand),
    "mxfp4": Format(_mxfp4_layout, _mxfp4_expand),
}

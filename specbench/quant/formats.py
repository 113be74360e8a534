"""How the bytes of a linear layer lie on disk, per format, and what numbers they stand for.

What enters: a scheme, sizes, stored tensors. What leaves: the tensors that a file must hold (name, shape, dtype), and
dequantized weights. It does not know models, files or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compressed_tensors.compressors import unpack_from_int32
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from .scheme import Scheme


@dataclass(frozen=True, slots=True)
class Slot:
    """One stored tensor of a linear layer.

    shape and dtype as on disk for the whole (possibly fused) layer. shard_dim: the dimension along which the shards of a
    fused layer (q, k, v) are concatenated; None where each shard keeps its own copy, stacked in front.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard_dim: int | None


def layout(scheme: Scheme | None, in_features: int, out_features: int, dtype: torch.dtype, name: str) -> dict[str, Slot]:
    """The stored tensors of `name`, by leaf name.

    A plain layer is {"weight": [out, in] dtype}. pack-quantized (compressed-tensors 0.20): weight_packed int32
    [out, in / 8], weight_scale [out, in / group], weight_shape int64 [2]; asymmetric also weight_zero_point int32
    [out / 8, in / group].

    Raises:
        ConfigError: sizes that the scheme cannot divide.
    """
    if scheme is None:
        return {"weight": Slot((out_features, in_features), dtype, 0)}
    per_word = 32 // scheme.bits
    if in_features % scheme.group_size or in_features % per_word:
        raise ConfigError(
            f"{name}: {in_features} input columns do not divide into groups of {scheme.group_size} and words of {per_word} "
            f"({scheme}); check config_groups"
        )
    groups = in_features // scheme.group_size
    slots = {
        "weight_packed": Slot((out_features, in_features // per_word), torch.int32, 0),
        "weight_scale": Slot((out_features, groups), dtype, 0),
        "weight_shape": Slot((2,), torch.int64, None),
    }
    if not scheme.symmetric:
        slots["weight_zero_point"] = Slot((out_features // per_word, groups), torch.int32, 0)
    return slots


def unpack_levels(scheme: Scheme, stored: dict[str, Tensor], out_features: int, in_features: int, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stored tensors as integers and scales.

    Returns:
        levels: int8 [out, in] in [-8, 7]; scales: [out, in / group] in the stored dtype; zero points: int8 [out, in / group]
        on the same footing as levels, or None. A weight is `(level - zero_point) * scale`.

    Raises:
        CheckpointError: a stored shape that contradicts the layer, or scales that are zero, negative or not finite.
    """
    for shape in stored["weight_shape"].reshape(-1, 2).tolist():
        if shape[1] != in_features:
            raise CheckpointError(f"{name}.weight_shape says {shape}; the layer has {in_features} input columns")
    scales = stored["weight_scale"]
    usable = torch.isfinite(scales) & (scales > 0)
    if not bool(usable.all()):
        row, group = (~usable).nonzero()[0].tolist()
        raise CheckpointError(
            f"{name}.weight_scale[{row}, {group}] is {scales[row, group].item()}; a scale is finite and positive: the file is damaged"
        )
    levels = unpack_from_int32(stored["weight_packed"], scheme.bits, torch.Size((out_features, in_features)))
    zero_points = None
    if not scheme.symmetric:
        groups = in_features // scheme.group_size
        zero_points = unpack_from_int32(stored["weight_zero_point"], scheme.bits, torch.Size((out_features, groups)), packed_dim=0)
    return levels, scales, zero_points


def dequantize(levels: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights [out, in] in `dtype`, computed in fp32 and rounded once."""
    out_features, groups = scales.shape
    weights = levels.view(out_features, groups, -1).float()
    if zero_points is not None:
        weights = weights - zero_points[..., None].float()
    return (weights * scales[..., None].float()).view(out_features, -1).to(dtype)

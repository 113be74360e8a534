"""Round plain weights to integers in groups and pack them, as compressed-tensors stores them (pack-quantized).

What enters: weights [out, in], and how strongly each input column is used. What leaves: the tensors of a quantized layer, and the config
section that describes them. It does not know files, models or how to read the result back (see `formats`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from compressed_tensors import __version__ as compressed_tensors_version
from compressed_tensors.compressors import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn

# Candidate scales as factors of the min-max one, which comes first and so wins ties. That one is max / 7.5, where a largest weight that is
# positive is clipped to level 7; at 15/14 of it, it is not.
FACTORS = (1.0, *torch.linspace(15 / 14, 0.6, 24).tolist())


def int4(group_size: int) -> QuantizationScheme:
    """W4A16: symmetric 4-bit integers in -8..7, one scale for `group_size` input columns, on every linear layer."""
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


def config_section(scheme: QuantizationScheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose linear layers, but for `ignore`, are stored in `scheme`."""
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=str(scheme.format),
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignore),
    )
    return {**config.model_dump(mode="json"), "version": compressed_tensors_version}


def min_max_scales(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """compressed-tensors' own scales [out, in / group] in the weight's dtype: the largest magnitude of a group is level 7.5."""
    groups = weight.float().unflatten(1, (-1, args.group_size))
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return scales.to(weight.dtype)


def search_scales(weight: Tensor, args: QuantizationArgs, importance: Tensor | None = None) -> Tensor:
    """Per group, the candidate scale with the least squared rounding error: never a larger error than min-max.

    Args:
        weight: [out, in].
        importance: [in], weight of a column's squared error; the column's mean squared input makes it the error of the layer's output, as
            far as columns are uncorrelated. None weighs all alike.

    Returns:
        [out, in / group] in the weight's dtype; candidates are compared after rounding to it.
    """
    base = min_max_scales(weight.float(), args)
    scales = torch.empty_like(base, dtype=weight.dtype)
    columns = weight.float().split(args.group_size, 1)
    weights = (torch.ones(weight.shape[1]) if importance is None else importance.float()).split(args.group_size)
    for group, (values, weigh) in enumerate(zip(columns, weights, strict=True)):  # one group at a time stays in the processor's cache
        least, best = None, base[:, group]
        for factor in FACTORS:
            candidate = (base[:, group] * factor).to(weight.dtype).float()
            error = (_round(values, candidate[:, None], args) - values).square_() @ weigh
            better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
            least = error if least is None else torch.where(better, error, least)
            best = torch.where(better, candidate, best)
        scales[:, group] = best
    return scales


def pack(weight: Tensor, scales: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """The stored tensors of a layer, by leaf name.

    Returns:
        weight_packed int32 [out, in / 8], weight_scale [out, in / group] in the dtype of `scales`, weight_shape int64 [2].
    """
    # In fp32: in bf16 the quotient itself is rounded, and a level in 250 goes to the wrong side.
    levels = quantize(weight.float(), scales.float(), None, args, dtype=torch.int8)
    return {
        "weight_packed": pack_to_int32(levels, args.num_bits),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


@torch.inference_mode()
def mean_squared_inputs(model: nn.Module, batches: Iterable[Sequence[int]]) -> dict[str, Tensor]:
    """Per linear layer, the mean square of each input column: fp32 [in], by module name.

    Args:
        model: called as `model(ids)` with int64 [1, n].
        batches: lists of token ids, run one by one.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, -2).float()
            sums[name] = sums.get(name, 0) + rows.square().sum(0)
            counts[name] = counts.get(name, 0) + len(rows)

        return hook

    handles = [m.register_forward_pre_hook(watch(name)) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    try:
        for ids in batches:
            model(torch.tensor([list(ids)]))
    finally:
        for handle in handles:
            handle.remove()
    return {name: sums[name] / counts[name] for name in sums}


def _round(values: Tensor, scale: Tensor, args: QuantizationArgs) -> Tensor:
    half = 1 << (args.num_bits - 1)
    return (values / scale).round_().clamp_(-half, half - 1).mul_(scale)

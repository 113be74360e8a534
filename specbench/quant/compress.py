"""Round plain weights into compressed-tensors' formats by its own compressors: the schemes in which people serve, by name.

What enters: weights [out, in] and a scheme. What leaves: the tensors of a quantized layer. Scales are min-max, as round-to-nearest tools
choose them; the 4-bit scales of the bundled W4A16 verifier are searched instead (see `quantize`). It does not know files or models.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor


def _scheme(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> QuantizationScheme:
    arguments = None if inputs is None else QuantizationArgs(**inputs)
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=arguments, format=layout)


_INT8, _FP8 = {"num_bits": 8, "type": "int", "symmetric": True}, {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES: dict[str, QuantizationScheme] = {
    "w8a16": _scheme("pack-quantized", {**_INT8, "strategy": "channel"}),
    "w4a16-asym": _scheme("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64}),
    "w8a8": _scheme("int-quantized", {**_INT8, "strategy": "channel"}, {**_INT8, "strategy": "token", "dynamic": True}),
    "fp8": _scheme("float-quantized", {**_FP8, "strategy": "channel"}, {**_FP8, "strategy": "token", "dynamic": True}),
    "nvfp4a16": _scheme(
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    ),
}


def compress(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """The stored tensors of a layer, by leaf name (see `formats`), rounded to nearest under min-max scales.

    Args:
        weight: [out, in], bf16 or wider; scales of integer formats are rounded to its dtype before weights are.
    """
    args, wide = scheme.weights, weight.float()
    grouped = args.group_size is not None and args.strategy != "channel"
    values = wide.unflatten(1, (-1, args.group_size)) if grouped else wide
    low, high = values.amin(-1, keepdim=not grouped), values.amax(-1, keepdim=not grouped)
    state: dict[str, Tensor] = {"weight": wide}
    multiplier = None
    if args.strategy == "tensor_group":
        multiplier = generate_gparam(wide.min(), wide.max())
        state["weight_global_scale"] = multiplier.reshape(1)
    scales, zero_points = calculate_qparams(low, high, args, global_scale=multiplier)
    if args.type == "int":
        scales = scales.to(weight.dtype).float()
    state |= {"weight_scale": scales, "weight_zero_point": zero_points}
    stored = BaseCompressor.get_value_from_registry(str(scheme.format)).compress(state, scheme)
    if args.type == "int":
        stored["weight_scale"] = stored["weight_scale"].to(weight.dtype)
    return {name: torch.as_tensor(tensor).detach().contiguous() for name, tensor in stored.items() if tensor is not None}

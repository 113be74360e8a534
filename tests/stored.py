"""Linear layers written in every quantized format, independently of the library: bytes from a weight, and the fp64 weight that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F8 = torch.float8_e4m3fn
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
Stored = dict[str, Tensor]
Written = tuple[Stored, Tensor]  # tensors by leaf name, and the weight [out, in] in fp64


def pack(values: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned integers into int32 words along `dim`, lowest bits first."""
    per_word = 32 // bits
    values = values.movedim(dim, -1).long()
    short = -values.shape[-1] % per_word
    values = torch.nn.functional.pad(values, (0, short)).unflatten(-1, (-1, per_word))
    words = (values << (torch.arange(per_word) * bits)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def grouped(weight: Tensor, group: int, bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Signed levels [out, in], scales [out, groups] in `dtype`, signed zero points [out, groups]."""
    w = weight.double().unflatten(1, (-1, group))
    top = 2 ** (bits - 1)
    if symmetric:
        scale = (w.abs().amax(-1) / (top - 0.5)).to(dtype)
        zero = torch.zeros_like(scale, dtype=torch.float64)
    else:
        low, high = w.amin(-1).clamp_max(0), w.amax(-1).clamp_min(0)
        scale = ((high - low) / (2 * top - 1)).to(dtype)
        zero = (-top - low / scale.double()).round().clamp(-top, top - 1)
    levels = ((w / scale.double()[..., None]) + zero[..., None]).round().clamp(-top, top - 1)
    return levels.flatten(1), scale, zero


def value(levels: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    spread = lambda t: t.double().repeat_interleave(group, 1)  # noqa: E731
    return (levels - spread(zero)) * spread(scale)


def pack_quantized(weight: Tensor, bits: int, group: int, symmetric: bool = True, order: Tensor | None = None) -> Written:
    columns = torch.arange(weight.shape[1]) if order is None else order.argsort(stable=True)
    levels, scale, zero = grouped(weight[:, columns], group, bits, symmetric, torch.bfloat16)
    back = columns.argsort()
    expected = value(levels, scale, zero, group)[:, back]
    half = 2 ** (bits - 1)
    stored = {
        "weight_packed": pack(levels[:, back] + half, bits, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack(zero + half, bits, 0)
    if order is not None:
        stored["weight_g_idx"] = order.to(torch.int32)
    return stored, expected


def int8(weight: Tensor, static: bool, asymmetric_input: bool = False) -> Written:
    levels, scale, _ = grouped(weight, weight.shape[1], 8, True, torch.float32)
    stored = {"weight": levels.to(torch.int8), "weight_scale": scale}
    if static:
        stored["input_scale"] = torch.tensor([0.03])
    if static and asymmetric_input:
        stored["input_zero_point"] = torch.tensor([5], dtype=torch.int8)
    return stored, value(levels, scale, torch.zeros_like(scale), weight.shape[1])


def fp8(weight: Tensor, strategy: str, scale_name: str = "weight_scale", static: bool = False, scalar: bool = False) -> Written:
    out, width = weight.shape
    if strategy == "block":
        rows, cols = 32, 32
        blocks = (
            torch.nn.functional.pad(weight.double(), (0, -width % cols, 0, -out % rows)).unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
        )
        scale = (blocks.abs().amax((1, 3)) / 448).float()
        spread = scale.double().repeat_interleave(rows, 0)[:out].repeat_interleave(cols, 1)[:, :width]
    else:
        scale = (
            (weight.double().abs().amax(1, keepdim=True) if strategy == "channel" else weight.double().abs().max().reshape(1)) / 448
        ).float()
        spread = scale.double()
    narrow = (weight.double() / spread).float().clamp(-448, 448).to(F8)
    stored = {"weight": narrow, scale_name: scale.reshape(()) if scalar else scale}
    if static:
        stored["input_scale"] = torch.tensor(0.02) if scalar else torch.tensor([0.02])
    return stored, narrow.double() * spread


def fp4_codes(units: Tensor) -> Tensor:
    """Nearest e2m1 codes of fp64 numbers."""
    code = (units.abs()[..., None] - FP4).abs().argmin(-1)
    return torch.where(units < 0, code + 8, code)


def fp4_bytes(codes: Tensor) -> Tensor:
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def fp4_number(codes: Tensor) -> Tensor:
    return torch.where(codes >= 8, -FP4[codes % 8], FP4[codes % 8])


def nvfp4(weight: Tensor, inputs: bool, modelopt: bool = False) -> Written:
    w = weight.double().unflatten(1, (-1, 16))
    multiplier = (448 * 6 / weight.double().abs().max()).float()
    local = (w.abs().amax(-1) / 6 * multiplier.double()).float().to(F8)
    scale = local.double() / multiplier.double()
    codes = fp4_codes(w / scale[..., None].clamp_min(1e-12)).flatten(1)
    expected = fp4_number(codes) * scale.repeat_interleave(16, 1)
    if modelopt:
        second = 1.0 / multiplier
        expected = fp4_number(codes) * (local.float() * second).double().repeat_interleave(16, 1)
        return {"weight": fp4_bytes(codes), "weight_scale": local, "weight_scale_2": second, "input_scale": torch.tensor(0.004)}, expected
    stored = {"weight_packed": fp4_bytes(codes), "weight_scale": local, "weight_global_scale": multiplier.reshape(1)}
    if inputs:
        stored["input_global_scale"] = torch.tensor([600.0])
    return stored, expected


def mxfp4(weight: Tensor) -> Written:
    w = weight.double().unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(w.abs().amax(-1))) - 2
    codes = fp4_codes(w / (2.0**exponent)[..., None]).flatten(1)
    stored = {"weight_packed": fp4_bytes(codes), "weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, fp4_number(codes) * (2.0**exponent).repeat_interleave(32, 1)


def awq(weight: Tensor, group: int) -> Written:
    levels, scale, zero = grouped(weight, group, 4, False, torch.float16)
    interleave = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # AutoAWQ: nibble i of a word holds output column interleave[i]

    def words(values: Tensor) -> Tensor:  # [rows, out] -> [rows, out / 8]
        return pack(values.unflatten(1, (-1, 8))[..., interleave].flatten(1), 4, 1)

    stored = {"qweight": words((levels + 8).t()), "qzeros": words((zero + 8).t()), "scales": scale.t().contiguous()}
    return stored, value(levels, scale, zero, group)


def gptq(weight: Tensor, group: int, version: int = 1, bits: int = 4, order: Tensor | None = None) -> Written:
    columns = torch.arange(weight.shape[1]) if order is None else order.argsort(stable=True)
    levels, scale, zero = grouped(weight[:, columns], group, bits, False, torch.float16)
    back, half, top = columns.argsort(), 2 ** (bits - 1), 2**bits - 1
    zeros = zero + half
    stored_zeros = ((zeros - 1).long() & top) if version == 1 else zeros
    stored = {
        "qweight": pack((levels[:, back] + half).t(), bits, 0),
        "qzeros": pack(stored_zeros.t(), bits, 1),
        "scales": scale.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group if order is None else order).to(torch.int32),
    }
    return stored, value(levels, scale, zero, group)[:, back]


def shuffled_order(width: int, group: int) -> Tensor:
    """A non-monotone group index with equal group sizes."""
    return (torch.arange(width) // group)[torch.randperm(width, generator=torch.Generator().manual_seed(4))]


def ct(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Case:
    """section: what config.json says. write: a weight to stored tensors and the fp64 weight that they stand for. weight_only: inputs stay as they are."""

    name: str
    section: dict[str, Any]
    write: Callable[[Tensor], Written]
    weight_only: bool = True
    file: str = "config.json"


INT4, INT8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
FLOAT8, FLOAT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"strategy": "tensor", "dynamic": False, "symmetric": True}
GROUP32 = {"strategy": "group", "group_size": 32}

CASES: tuple[Case, ...] = (
    Case("W4A16", ct("pack-quantized", INT4 | GROUP32), lambda w: pack_quantized(w, 4, 32)),
    Case("W4A16 asym", ct("pack-quantized", INT4 | GROUP32 | {"symmetric": False}), lambda w: pack_quantized(w, 4, 32, False)),
    Case("W4A16 channel", ct("pack-quantized", INT4 | {"strategy": "channel"}), lambda w: pack_quantized(w, 4, w.shape[1])),
    Case("W8A16 channel", ct("pack-quantized", INT8 | {"strategy": "channel"}), lambda w: pack_quantized(w, 8, w.shape[1])),
    Case("W8A16 group asym", ct("pack-quantized", INT8 | GROUP32 | {"symmetric": False}), lambda w: pack_quantized(w, 8, 32, False)),
    Case("W4A16 actorder", ct("pack-quantized", INT4 | GROUP32 | {"actorder": "group"}), lambda w: pack_quantized(w, 4, 32, True, shuffled_order(w.shape[1], 32))),
    Case("W8A8 dynamic", ct("int-quantized", INT8 | {"strategy": "channel"}, INT8 | TOKEN), lambda w: int8(w, False), False),
    Case("W8A8 static", ct("int-quantized", INT8 | {"strategy": "channel"}, INT8 | STATIC), lambda w: int8(w, True), False),
    Case("W8A8 static asym", ct("int-quantized", INT8 | {"strategy": "channel"}, INT8 | STATIC | {"symmetric": False}), lambda w: int8(w, True, True), False),
    Case("FP8 channel", ct("float-quantized", FLOAT8 | {"strategy": "channel"}, FLOAT8 | TOKEN), lambda w: fp8(w, "channel"), False),
    Case("FP8 tensor static", ct("float-quantized", FLOAT8 | {"strategy": "tensor"}, FLOAT8 | STATIC), lambda w: fp8(w, "tensor", static=True), False),
    Case("FP8 block", ct("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [32, 32]}, FLOAT8 | {"strategy": "group", "group_size": 32, "dynamic": True, "symmetric": True}), lambda w: fp8(w, "block"), False),
    Case("NVFP4A16", ct("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16}), lambda w: nvfp4(w, False)),
    Case("NVFP4", ct("nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16}, FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local", "symmetric": True}), lambda w: nvfp4(w, True), False),
    Case("MXFP4A16", ct("mxfp4-pack-quantized", FLOAT4 | GROUP32), mxfp4),
    Case("AWQ", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, lambda w: awq(w, 32)),
    Case("GPTQ v1", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}, lambda w: gptq(w, 32)),
    Case("GPTQ v2", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 32, 2)),
    Case("GPTQ 8 bit", {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": False}, lambda w: gptq(w, 32, 1, 8)),
    Case("GPTQ desc_act", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}, lambda w: gptq(w, 32, 1, 4, shuffled_order(w.shape[1], 32))),
    Case("fp8 dynamic", {"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda w: fp8(w, "tensor", scalar=True), False),
    Case("fp8 static", {"quant_method": "fp8", "activation_scheme": "static"}, lambda w: fp8(w, "tensor", static=True, scalar=True), False),
    Case("fp8 block", {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}, lambda w: fp8(w, "block", "weight_scale_inv"), False),
    Case("fbgemm_fp8", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, lambda w: fp8(w, "channel"), False),
    Case("ModelOpt FP8", {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}, lambda w: fp8(w, "tensor", static=True, scalar=True), False, "hf_quant_config.json"),
    Case("ModelOpt NVFP4", {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}, lambda w: nvfp4(w, True, modelopt=True), False, "hf_quant_config.json"),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def store(
    tensors: dict[str, Tensor], case: Case, modules: Callable[[str], bool] = lambda name: name.endswith("_proj")
) -> tuple[Stored, dict[str, Tensor]]:
    """Every linear module that `modules` names, in the case's format; the rest as it is. Also the fp64 weights of those modules."""
    out, expected = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or not modules(module) or tensor.dim() != 2:
            out[name] = tensor
            continue
        leaves, expected[module] = case.write(tensor)
        out |= {f"{module}.{leaf}": stored for leaf, stored in leaves.items()}
    return out, expected

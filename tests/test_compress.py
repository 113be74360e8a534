"""Compressed layers read back: our own reader understands what compressed-tensors writes, with an error of half a step at most."""

from __future__ import annotations

import pytest
import torch

from specbench.quant.compress import SCHEMES, compress
from specbench.quant.formats import dequantize, expand, layout
from specbench.quant.quantize import config_section
from specbench.quant.scheme import parse_quantization

WORST = {"w8a16": 0.01, "w4a16-asym": 0.09, "w8a8": 0.01, "fp8": 0.07, "nvfp4a16": 0.25}  # of the largest weight of a row


@pytest.mark.parametrize("name", SCHEMES)
def test_written_layers_read_back(name: str) -> None:
    weight = torch.randn(128, 192, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    scheme = parse_quantization(config_section(SCHEMES[name], ["lm_head"]), "x").for_module("layers.0.mlp.up_proj")
    stored = compress(weight, SCHEMES[name])
    slots = layout(scheme, 192, 128, torch.bfloat16, "x")
    assert {k: tuple(v.shape) for k, v in stored.items()} == {k: slot.shape for k, slot in slots.items()}
    read = dequantize(expand(scheme, stored, 192, 128, "x"), torch.float32)
    error = (read - weight.float()).abs().amax(1) / weight.float().abs().amax(1)
    assert error.max() < WORST[name]
    if name == "w4a16-asym":
        assert "weight_zero_point" in stored

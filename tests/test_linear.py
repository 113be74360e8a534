"""A quantized linear layer from its stored tensors: beside compressed-tensors' expansion, fused beside its parts, damaged ones refused."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from specbench.errors import CheckpointError, ConfigError
from specbench.quant.formats import layout
from specbench.quant.linear import Linear
from specbench.quant.scheme import Scheme

BF16 = torch.bfloat16


def w4(group, symmetric=True, actorder=False):
    return Scheme("pack-quantized", 4, "group", group, symmetric=symmetric, actorder=actorder)


def inputs(rows, width):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(BF16)


def compressed(weight, args, compressor=PackedQuantizationCompressor):
    """Stored tensors of `weight` and its expansion, both by compressed-tensors."""
    groups = args.group_size or weight.shape[1]
    grouped = weight.float().view(weight.shape[0], -1, groups)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale = scale.to(weight.dtype)
    stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}, scheme)
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


def filled(linear, shards):
    """`linear` with its stored tensors, one dictionary a shard."""
    for leaf in linear.slots:
        parameter = torch.nn.Parameter(torch.empty_like(getattr(linear, leaf), device="cpu"), requires_grad=False)
        linear.register_parameter(leaf, parameter)
    for i, stored in enumerate(shards):
        for leaf, value in stored.items():
            linear.shard(leaf, i).data.copy_(value)
    return linear


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_packed_weights_are_what_compressed_tensors_expands(symmetric, bits, group, dtype):
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=group)
    stored, expected = compressed(torch.randn(48, 256).to(dtype), args)
    scheme = Scheme("pack-quantized", bits, "group", group, symmetric=symmetric)
    slots = layout(scheme, 256, 48, dtype, "x")
    assert {name: slot.shape for name, slot in slots.items()} == {name: tuple(value.shape) for name, value in stored.items()}
    linear = filled(Linear("x", 256, (48,), scheme, dtype), [stored])
    linear.finish(packed=False)
    ours = linear.kernel.weight
    assert ours.dtype == dtype
    # compressed-tensors multiplies in the scale's dtype, so bf16 differs by one rounding at most
    assert torch.allclose(ours, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_files_are_what_compressed_tensors_expands(symmetric):
    args = QuantizationArgs(num_bits=8, type="int", symmetric=symmetric, strategy="channel")
    stored, expected = compressed(torch.randn(48, 96), args, NaiveQuantizationCompressor)
    linear = filled(Linear("x", 96, (48,), Scheme("int-quantized", 8, "channel", symmetric=symmetric), torch.float32), [stored])
    linear.finish(packed=False)
    assert torch.allclose(linear.kernel.weight, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_fused_layer_is_its_parts_side_by_side(packed, symmetric):
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=32)
    parts, scheme = [64, 32, 32], w4(32, symmetric)
    shards = [compressed(torch.randn(out, 64).to(BF16), args)[0] for out in parts]
    fused = filled(Linear("qkv", 64, tuple(parts), scheme, BF16, bias=True), shards)
    fused.bias = torch.nn.Parameter(torch.randn(128).to(BF16), requires_grad=False)
    fused.finish(packed)
    assert [name for name, _ in fused.named_parameters()] == ["bias"]
    x, alone = inputs(5, 64), []
    for out, stored in zip(parts, shards, strict=True):
        single = filled(Linear("x", 64, (out,), scheme, BF16), [stored])
        single.finish(packed=False)
        alone.append(single(x))
    expected = torch.cat(alone, 1).double() + fused.bias.double()
    assert torch.allclose(fused(x).double(), expected, rtol=0, atol=6 * torch.finfo(BF16).eps * float(expected.abs().max()))
    assert fused(x.view(1, 5, 64)).shape == (1, 5, 128)


def stored_layer(out=32, width=64, group=32, symmetric=True):
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)
    linear = Linear("layers.0.mlp.down_proj", width, (out,), w4(group, symmetric), BF16)
    return compressed(torch.randn(out, width).to(BF16), args)[0], linear


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
def test_an_unusable_scale_is_named_with_its_place_and_value(value):
    stored, linear = stored_layer()
    stored["weight_scale"][3, 1] = value
    with pytest.raises(CheckpointError, match=rf"layers\.0\.mlp\.down_proj\.weight_scale\[3, 1\] is {value}.*damaged"):
        filled(linear, [stored]).finish()


def test_an_engine_multiplies_unusable_scales():
    stored, linear = stored_layer()
    stored["weight_scale"][3, 1] = float("nan")
    filled(linear, [stored]).finish(strict=False)
    out = linear(inputs(1, 64))
    assert bool(out[0, 3].isnan()) and int(out.isnan().sum()) == 1


@pytest.mark.parametrize("shape", [[32, 128], [64, 32], [16, 64]])
def test_a_stored_shape_that_contradicts_the_layer_is_refused(shape):
    stored, linear = stored_layer()
    stored["weight_shape"] = torch.tensor(shape)
    with pytest.raises(CheckpointError, match=rf"weight_shape says \[{shape[0]}, {shape[1]}\].*\[32, 64\]"):
        filled(linear, [stored]).finish()


@pytest.mark.parametrize(
    ("width", "group", "message"), [(96, 64, "96 input columns do not divide into groups of 64"), (36, 4, "words of eight 4-bit weights")]
)
def test_sizes_that_cannot_be_packed_are_refused(width, group, message):
    with pytest.raises(ConfigError, match=f"mlp.down_proj: .*{message}"):
        Linear("mlp.down_proj", width, (32,), w4(group), BF16)


def test_an_index_of_groups_out_of_range_is_refused():
    stored, _ = stored_layer()
    linear = Linear("layers.0.mlp.down_proj", 64, (32,), w4(32, actorder=True), BF16)
    stored["weight_g_idx"] = torch.arange(64, dtype=torch.int32) // 16
    with pytest.raises(CheckpointError, match=r"g_idx runs 0\.\.3; groups are 0\.\.1"):
        filled(linear, [stored]).finish()

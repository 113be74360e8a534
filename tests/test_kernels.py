"""Every matrix product against dequantized weights in fp64, and stored weights against compressed-tensors' own expansion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import near
from torch.nn import functional as F

from specbench.quant import int4, kernels
from specbench.quant.activations import fake_quantize
from specbench.quant.formats import Levels, dequantize
from specbench.quant.int4 import EXPAND_ROWS, PackedInt4Cpu, PackedInt4Cuda, cpu_int4_layout
from specbench.quant.kernels import Dequantized, Fp8Matmul, Inputs, Int8Matmul, Int8Weights, select_kernel
from specbench.quant.scheme import Activations, Scheme

BF16 = torch.bfloat16
LAYOUT = cpu_int4_layout()
BLOCK = LAYOUT[0] if LAYOUT else 64
needs_int4 = pytest.mark.skipif(LAYOUT is None, reason="torch has no int4 operator with a known layout on this CPU")
ROWS = (1, 2, 7, 24, 64, EXPAND_ROWS - 1, EXPAND_ROWS, 200)


def w4(group, symmetric=True, actorder=False):
    return Scheme("pack-quantized", 4, "group", group, symmetric=symmetric, actorder=actorder)


def random_levels(out, width, group, asymmetric=False, seed=0, bits=4, dtype=BF16, order=None):
    g = torch.Generator().manual_seed(seed)
    half, groups = 1 << (bits - 1), width // group
    zero_points = torch.randint(-half, half, (out, groups), generator=g, dtype=torch.int8) if asymmetric else None
    scales = (0.5 + torch.rand(out, groups, generator=g)).to(dtype) / half
    return Levels(torch.randint(-half, half, (out, width), generator=g, dtype=torch.int8), scales, zero_points, order)


def inputs(rows, width, seed=1, dtype=BF16):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x, levels):
    """x @ W.T in fp64, W straight from the definition `(level - zero_point) * scale`."""
    columns, count = levels.levels.shape[1], levels.scales.shape[1]
    groups = torch.arange(columns) // (columns // count) if levels.order is None else levels.order
    weight = levels.levels.double()
    if levels.zero_points is not None:
        weight = weight - levels.zero_points.double()[:, groups]
    return x.double() @ (weight * levels.scales.double()[:, groups]).T


@pytest.fixture(params=[True, False], ids=["bf16", "no-bf16"])
def processor(request, monkeypatch):
    """With and without bf16 products, whichever processor runs the test."""
    for module in (int4, kernels):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: request.param)


# 4-bit weights ---------------------------------------------------------------------------------------------------------------------------


@needs_int4
@settings(max_examples=40)
@given(blocks=st.integers(1, 3), groups=st.integers(1, 3), group=st.sampled_from([32, 64, 128, 256]), seed=st.integers(0, 2**16))
def test_packed_bytes_read_back_bit_for_bit(blocks, groups, group, seed):
    levels = random_levels(blocks * BLOCK, groups * group, group, seed=seed)
    kernel = PackedInt4Cpu(levels.levels, levels.scales, None, BF16)
    assert torch.equal(kernel.expand(), dequantize(levels, BF16))


@needs_int4
@settings(max_examples=20)
@given(groups=st.integers(1, 3), group=st.sampled_from([32, 64, 128]), seed=st.integers(0, 2**16))
def test_zero_points_read_back_within_the_operators_own_rounding(groups, group, seed):
    """The operator keeps -zero_point * scale in bf16: three roundings of at most 15 scales, where the reference rounds once."""
    levels = random_levels(2 * BLOCK, groups * group, group, asymmetric=True, seed=seed)
    kernel = PackedInt4Cpu(levels.levels, levels.scales, levels.zero_points, BF16)
    error = (kernel.expand().float() - dequantize(levels, torch.float32)).abs().view(2 * BLOCK, groups, group)
    assert bool((error <= 32 * levels.scales.float()[..., None] * 2**-8).all())


@needs_int4
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("asymmetric", [False, True])
def test_packed_product_of_few_and_of_many_rows(processor, rows, asymmetric):
    levels, x = random_levels(2 * BLOCK, 256, 64, asymmetric), inputs(rows, 256)
    kernel = PackedInt4Cpu(levels.levels, levels.scales, levels.zero_points, BF16)
    got = kernel(x)
    assert (got.dtype, got.shape) == (BF16, (rows, 2 * BLOCK))
    assert near(got, exact(x, levels), 2 if not asymmetric else 6)
    if rows >= EXPAND_ROWS:
        assert near(got, F.linear(x.double(), kernel.expand().double()))
    assert kernel.nbytes() == 2 * BLOCK * 256 // 2 + 2 * BLOCK * 4 * 2 * 2


@needs_int4
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("at_once", [1, 2 * BLOCK * 128, 1 << 20])
def test_blocks_are_expanded_a_few_at_a_time(monkeypatch, at_once, asymmetric):
    """Five blocks: one by one, two at a time with one left over, all at once."""
    monkeypatch.setattr(int4, "EXPANDED_AT_ONCE", at_once)
    levels, x = random_levels(5 * BLOCK, 128, 32, asymmetric), inputs(EXPAND_ROWS + 3, 128)
    kernel = PackedInt4Cpu(levels.levels, levels.scales, levels.zero_points, BF16)
    assert near(kernel(x), F.linear(x.double(), kernel.expand().double()))


@needs_int4
def test_processors_that_lay_the_outputs_of_a_block_in_another_order():
    """The same weights with the nibbles of every block shuffled, as a layout with `order` says."""
    levels, x = random_levels(3 * BLOCK, 128, 32, asymmetric=True), inputs(EXPAND_ROWS, 128)
    kernel, shuffled = (PackedInt4Cpu(levels.levels, levels.scales, levels.zero_points, BF16) for _ in range(2))
    order = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(0))
    packed = kernel.packed.view(3, 128, BLOCK // 2)
    nibbles = kernel._outputs(torch.cat((packed & 15, packed >> 4), -1))[..., order.argsort()]
    low, high = nibbles.split(BLOCK // 2, -1)
    shuffled.packed, shuffled.order = (low | (high << 4)).contiguous().view(kernel.packed.shape), order
    assert torch.equal(shuffled.expand(), kernel.expand())
    assert near(shuffled._expanded(x), kernel._expanded(x).double())


@needs_int4
def test_every_row_is_multiplied_alone():
    levels, x = random_levels(BLOCK, 128, 32), inputs(9, 128)
    kernel = PackedInt4Cpu(levels.levels, levels.scales, None, BF16)
    assert torch.equal(torch.cat([kernel(row[None]) for row in x]), kernel(x))


@settings(max_examples=40)
@given(
    outs=st.lists(st.integers(1, 5).map(lambda n: 16 * n), min_size=1, max_size=3),
    groups=st.integers(1, 3),
    group=st.sampled_from([8, 16, 32, 64]),
    asymmetric=st.booleans(),
    dtype=st.sampled_from([BF16, torch.float32, torch.float16]),
    rows=st.sampled_from([1, 5, 70, 130]),
    seed=st.integers(0, 2**16),
)
def test_whatever_kernel_is_chosen_multiplies_the_same_weights(outs, groups, group, asymmetric, dtype, rows, seed):
    parts = [random_levels(out, groups * group, group, asymmetric, seed + i, dtype=dtype) for i, out in enumerate(outs)]
    x = inputs(rows, groups * group, seed, dtype)
    got = select_kernel(parts, w4(group, not asymmetric), None, dtype)(x)
    assert got.dtype == dtype
    assert near(got, torch.cat([exact(x, part) for part in parts], 1), 6)


def test_which_kernel_is_chosen():
    def chosen(out=2 * BLOCK, group=32, dtype=BF16, packed=True):
        return select_kernel([random_levels(out, 2 * group, group, dtype=dtype)], w4(group), None, dtype, packed).name

    usual = "int4-packed-cpu" if LAYOUT else "dequantized"
    assert [chosen(group=g) for g in (32, 64, 128)] == [usual] * 3
    assert chosen(group=16) == chosen(group=512) == "dequantized"
    assert chosen(out=BLOCK + 16) == "dequantized"
    assert chosen(dtype=torch.float32) == chosen(dtype=torch.float16) == "dequantized"
    assert chosen(packed=False) == "dequantized"


@pytest.mark.parametrize("broken", ["missing", "another layout"])
def test_without_a_known_layout_the_reference_runs(monkeypatch, broken):
    if broken == "missing":
        monkeypatch.setattr(kernels.torch.ops, "aten", object())
    elif LAYOUT is None:
        pytest.skip("torch has no int4 operator on this CPU")
    else:
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", lambda w, tiles: pack(w, tiles).sort(-1).values)
    assert cpu_int4_layout.__wrapped__() is None
    monkeypatch.undo()

    levels, x = random_levels(2 * BLOCK, 128, 64), inputs(5, 128)
    for module in (kernels, int4):
        monkeypatch.setattr(module, "cpu_int4_layout", lambda: None)
    kernel = select_kernel([levels], w4(64), None, BF16)
    assert kernel.name == "dequantized"
    assert near(kernel(x), exact(x, levels))
    with pytest.raises(RuntimeError, match="layout is unknown"):
        PackedInt4Cpu(levels.levels, levels.scales, None, BF16)


@pytest.mark.parametrize("packed", [True, False])
def test_columns_of_a_stored_group_order(packed):
    """Groups of actorder (desc_act) files are scattered over the columns."""
    order = torch.arange(128).remainder(4)[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    levels, x = random_levels(2 * BLOCK, 128, 32, order=order), inputs(5, 128)
    kernel = select_kernel([levels], w4(32, actorder=True), None, BF16, packed)
    assert kernel.name == ("int4-packed-cpu reordered" if packed and LAYOUT else "dequantized")
    assert near(kernel(x), exact(x, levels))
    assert near(kernel(x.view(5, 1, 128))[:, 0], exact(x, levels))


@pytest.mark.parametrize("packed", [True, False])
def test_groups_of_unequal_size_are_multiplied_as_stored(packed):
    """An index that gives one group more columns than another has no consecutive form."""
    order = torch.tensor([0] * 40 + [1] * 24 + [2] * 32 + [3] * 32)
    levels, x = random_levels(2 * BLOCK, 128, 32, order=order), inputs(5, 128)
    assert near(select_kernel([levels], w4(32, actorder=True), None, BF16, packed)(x), exact(x, levels))


# 8-bit weights, with and without 8-bit inputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_int8_weights(processor, rows):
    levels, x = random_levels(48, 96, 96, bits=8), inputs(rows, 96)
    kernel = select_kernel([levels], Scheme("pack-quantized", 8, "channel"), None, BF16)
    assert kernel.name == "int8-weights" and isinstance(kernel, Int8Weights)
    assert near(kernel(x), exact(x, levels), 3)
    assert kernel.nbytes() == 48 * 96 + 48 * 2


@pytest.mark.parametrize("rows", [1, 3, 17, 100])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_int8_inputs_times_int8_weights(rows, dynamic, dtype):
    """Against the definition: inputs rounded to their integers, read back, multiplied in fp64."""
    levels, x = random_levels(48, 96, 96, bits=8, dtype=torch.float32), inputs(rows, 96, dtype=dtype)
    how, given_scale = Activations("int8", dynamic), None if dynamic else torch.tensor([0.025])
    scheme = Scheme("int-quantized", 8, "channel", activations=how)
    kernel = select_kernel([levels], scheme, Inputs(how, given_scale), dtype)
    assert isinstance(kernel, Int8Matmul)
    scale = (x.float().abs().amax(1, keepdim=True) / 127).double() if dynamic else given_scale.double()
    rounded = (x.double() / scale).round().clamp(-128, 127)
    assert near(kernel(x), exact(rounded, levels) * scale, 4)
    reference = select_kernel([levels], scheme, Inputs(how, given_scale), dtype, packed=False)
    assert isinstance(reference, Dequantized)
    assert near(reference(x), exact(rounded, levels) * scale, 8)


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_fp8_inputs_times_fp8_weights(rows, dynamic, per_channel):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=g).to(torch.float8_e4m3fn)
    scales = torch.rand(48, 1, generator=g) + 0.5 if per_channel else torch.tensor([0.7])
    x, given_scale = inputs(rows, 96), None if dynamic else torch.tensor([0.01])
    how = Inputs(Activations("fp8", dynamic), given_scale)
    assert kernels.fp8_kernel(weight, [scales], (48,), how, BF16) is None, "slower than the reference on a CPU"
    kernel = Fp8Matmul(weight, scales.reshape(-1).expand(48), how, BF16)
    scale = x.float().abs().amax(1, keepdim=True) / 448 if dynamic else given_scale
    rounded = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
    assert near(kernel(x), rounded @ (weight.double() * scales.double().reshape(-1, 1)).T)


def test_fp8_kernel_leaves_other_shapes_and_dtypes_to_the_reference():
    how = Inputs(Activations("fp8", True))
    weight = torch.zeros(40, 96, dtype=torch.float8_e4m3fn)
    assert kernels.fp8_kernel(weight, [torch.ones(1)], (40,), how, BF16) is None
    assert kernels.fp8_kernel(weight[:32], [torch.ones(1)], (32,), how, torch.float32) is None


def test_the_reference_quantizes_inputs_as_the_scheme_says():
    weight, x, how = torch.randn(16, 32), inputs(4, 32, dtype=torch.float32), Activations("int8", True)
    kernel = Dequantized(weight, Inputs(how))
    assert torch.equal(kernel(x), F.linear(fake_quantize(x, how, None), weight))
    assert not torch.equal(kernel(x), F.linear(x, weight))


# CUDA ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 127, 128, 300])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_packed_product_on_cuda(rows, asymmetric, group):
    levels, x = random_levels(64, 512, group, asymmetric), inputs(rows, 512)
    on_gpu = Levels(levels.levels.cuda(), levels.scales.cuda(), None if levels.zero_points is None else levels.zero_points.cuda())
    kernel = select_kernel([on_gpu], w4(group, not asymmetric), None, BF16)
    assert isinstance(kernel, PackedInt4Cuda)
    assert near(kernel(x.cuda()).cpu(), exact(x, levels), 2 if not asymmetric else 6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 15, 40])
def test_8_bit_products_on_cuda(rows):
    levels, x, how = random_levels(64, 128, 128, bits=8, dtype=torch.float32), inputs(rows, 128), Activations("int8", True)
    scheme = Scheme("int-quantized", 8, "channel", activations=how)
    on_gpu = Levels(levels.levels.cuda(), levels.scales.cuda())
    kernel, reference = (select_kernel([on_gpu], scheme, Inputs(how), BF16, packed) for packed in (True, False))
    assert isinstance(kernel, Int8Matmul)
    assert near(kernel(x.cuda()).cpu(), reference(x.cuda()).cpu().double(), 4)

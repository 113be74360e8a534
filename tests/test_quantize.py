"""Rounding and packing of weights, beside compressed-tensors' own decompression."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from specbench.quant.formats import Levels, expand
from specbench.quant.quantize import config_section, int4, mean_squared_inputs, min_max_scales, pack, search_scales
from specbench.quant.scheme import parse_quantization

SCHEME = int4(32)
ARGS = SCHEME.weights


def weights(rows: int = 24, columns: int = 128, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Heavy-tailed, as trained weights are: a few in a group are far out."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return (0.02 * normal * (1 + normal.square())).to(dtype)


def restored(stored: dict[str, Tensor]) -> Tensor:
    return PackedQuantizationCompressor.decompress(stored, SCHEME)["weight"]


def group_errors(weight: Tensor, scales: Tensor, importance: Tensor | None = None) -> Tensor:
    """Squared error of each group [out, groups] of level x scale, which a reader may still round to bf16."""
    stored = pack(weight, scales, ARGS)
    difference = (restored(stored | {"weight_scale": scales.float()}) - weight.float()).square()
    return (difference if importance is None else difference * importance).unflatten(1, (-1, 32)).sum(-1)


def test_stored_tensors_have_the_names_shapes_and_dtypes_of_the_format() -> None:
    stored = pack(weights(), search_scales(weights(), ARGS), ARGS)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        "weight_packed": ((24, 16), torch.int32),
        "weight_scale": ((24, 4), torch.bfloat16),
        "weight_shape": ((2,), torch.int64),
    }
    assert stored["weight_shape"].tolist() == [24, 128]


@given(
    rows=st.integers(1, 9), groups=st.integers(1, 4), seed=st.integers(0, 2**31), spread=st.sampled_from([1e-4, 1.0, 100.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_our_reader_and_theirs_restore_the_same_numbers(rows: int, groups: int, seed: int, spread: float, dtype: torch.dtype) -> None:
    weight = weights(rows, groups * 32, seed, torch.float32).mul(spread).to(dtype)
    stored = pack(weight, search_scales(weight, ARGS), ARGS)
    quantization = parse_quantization({"quant_method": "compressed-tensors", **config_section(SCHEME, [])}, "config.json")
    assert quantization is not None
    scheme = quantization.for_module("model.layers.0.mlp.up_proj")
    assert scheme is not None
    levels = expand(scheme, stored, groups * 32, rows, "up_proj")
    assert isinstance(levels, Levels)
    ours = (levels.levels.float().unflatten(1, (-1, 32)) * levels.scales.float()[..., None]).flatten(1).to(dtype)
    assert torch.equal(ours, restored(stored))


@given(data=st.data(), rows=st.integers(1, 6), groups=st.integers(1, 3))
def test_levels_on_the_grid_come_back_exactly(data: st.DataObject, rows: int, groups: int) -> None:
    levels = data.draw(st.lists(st.integers(-8, 7), min_size=rows * groups * 32, max_size=rows * groups * 32))
    scales = torch.tensor(data.draw(st.lists(st.sampled_from([2**-9, 0.0625, 1.5]), min_size=rows * groups, max_size=rows * groups)))
    scales = scales.view(rows, groups)
    weight = (torch.tensor(levels).view(rows, groups, 32) * scales[..., None]).flatten(1).bfloat16()
    assert torch.equal(restored(pack(weight, scales.bfloat16(), ARGS)), weight)


@given(seed=st.integers(0, 2**31), weighted=st.booleans())
def test_the_search_is_never_worse_than_min_max_in_any_group(seed: int, weighted: bool) -> None:
    weight = weights(seed=seed)
    importance = torch.rand(128, generator=torch.Generator().manual_seed(seed)).pow(4) if weighted else None
    searched = group_errors(weight, search_scales(weight, ARGS, importance), importance)
    plain = group_errors(weight, min_max_scales(weight, ARGS), importance)
    assert bool((searched <= plain * (1 + 1e-5)).all())  # sums are taken in another order there
    assert float(searched.sum()) < 0.95 * float(plain.sum())


def test_importance_moves_the_error_to_columns_that_count_less() -> None:
    weight = weights(64)
    importance = torch.full((128,), 1e-3)
    importance[::4] = 1.0
    with_it, without = (group_errors(weight, search_scales(weight, ARGS, i), importance).sum() for i in (importance, None))
    assert float(with_it) < 0.8 * float(without)


def test_an_all_zero_group_stays_zero_with_a_scale_that_readers_accept() -> None:
    weight = weights()
    weight[3, 32:64] = 0
    scales = search_scales(weight, ARGS)
    assert bool((scales > 0).all() and scales.isfinite().all())
    assert not restored(pack(weight, scales, ARGS))[3, 32:64].any()


def test_levels_are_nearest_although_weights_are_bf16() -> None:
    weight, scales = weights(256), min_max_scales(weights(256), ARGS)
    exact = (weight.double().unflatten(1, (-1, 32)) / scales.double()[..., None]).clamp(-8, 7)
    levels = restored(pack(weight, scales, ARGS) | {"weight_scale": torch.ones_like(scales)})
    distance = (levels.double().unflatten(1, (-1, 32)) - exact).abs()
    assert float(distance.max()) <= 0.5 + 1e-6


def test_the_config_section_is_what_compressed_tensors_reads() -> None:
    section = config_section(SCHEME, ["lm_head"])
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "pack-quantized")
    assert section["quantization_status"] == "compressed" and section["ignore"] == ["lm_head"] and section["version"]
    (group,) = QuantizationConfig.model_validate(section).config_groups.values()
    assert group.targets == ["Linear"] and group.input_activations is None
    assert (group.weights.num_bits, group.weights.group_size, group.weights.symmetric, group.weights.strategy) == (4, 32, True, "group")


def test_mean_squared_inputs_are_means_over_all_tokens_of_all_batches() -> None:
    embedding, linear = nn.Embedding(10, 4), nn.Linear(4, 3)
    model = nn.Sequential(embedding, linear)
    batches = [[1, 2, 3], [4]]
    found = mean_squared_inputs(model, batches)
    assert list(found) == ["1"]
    torch.testing.assert_close(found["1"], embedding.weight[[1, 2, 3, 4]].square().mean(0))
    assert not linear._forward_pre_hooks


def test_hooks_are_gone_after_a_failed_batch() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    with pytest.raises(IndexError):
        mean_squared_inputs(model, [[99]])
    assert not model[1]._forward_pre_hooks

"""Stored tensors against parameters: four checks before a byte is read, and what happens where nobody checks."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from specbench.checkpoint.files import read_headers
from specbench.checkpoint.fill import check, destination, fill, finite, first_part, place, stored_name
from specbench.errors import CheckpointError, CheckpointKeyError
from specbench.quant.linear import Linear
from specbench.quant.scheme import Scheme

W4 = Scheme("pack-quantized", 4, "group", 32)
SENTINEL = 7


class Block(nn.Module):
    """A fused and a plain projection, an embedding and an index: every kind of destination."""

    def __init__(self, scheme=None, dtype=torch.float32):
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 32, dtype=dtype)
        self.qkv_proj = Linear("qkv_proj", 32, (16, 8, 8), scheme, dtype, bias=True)
        self.down_proj = Linear("down_proj", 32, (16,), scheme, dtype)
        self.d2t = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        for owner in self.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owner._parameters[name] = nn.Parameter(torch.full_like(parameter, SENTINEL, device="cpu"), requires_grad=False)


def tensors():
    return {
        "embed_tokens.weight": torch.randn(10, 32), "down_proj.weight": torch.randn(16, 32), "d2t": torch.arange(4),
        "q_proj.weight": torch.randn(16, 32), "k_proj.weight": torch.randn(8, 32), "v_proj.weight": torch.randn(8, 32),
        "q_proj.bias": torch.randn(16), "k_proj.bias": torch.randn(8), "v_proj.bias": torch.randn(8),
    }  # fmt: skip


def headers(folder, stored):
    save_file(stored, folder / "model.safetensors")
    return read_headers(folder)


def untouched(module):
    return all(bool((parameter == SENTINEL).all()) for parameter in module.parameters())


@pytest.fixture
def no_reading(monkeypatch):
    """Any read of tensor bytes is an error; headers are read before by other means."""

    def refuse(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(os, "preadv", refuse)


def test_place_fuses_whole_names_only():
    assert place("layers.0.self_attn.q_proj.weight") == ("layers.0.self_attn.qkv_proj.weight", 0)
    assert place("layers.0.self_attn.v_proj.weight_scale") == ("layers.0.self_attn.qkv_proj.weight_scale", 2)
    assert place("layers.0.mlp.up_proj.bias") == ("layers.0.mlp.gate_up_proj.bias", 1)
    assert place("layers.0.mlp.my_up_proj.weight") == ("layers.0.mlp.my_up_proj.weight", None)
    assert place("layers.0.mlp.down_proj.weight") == ("layers.0.mlp.down_proj.weight", None)
    assert place("d2t") == ("d2t", None)
    names = ("layers.0.self_attn.k_proj.weight", "up_proj.bias", "layers.0.mlp.down_proj.weight", "norm.weight", "d2t")
    assert [stored_name(*place(name)) for name in names] == list(names)


def test_first_part_names_the_projection_that_speaks_for_a_fused_one():
    assert first_part("self_attn.qkv_proj") == "self_attn.q_proj"
    assert first_part("mlp.gate_up_proj") == "mlp.gate_proj"
    assert first_part("mlp.down_proj") == "mlp.down_proj"


def test_a_complete_file_fills_every_parameter_with_its_values(tmp_path):
    stored = tensors()
    infos, module = headers(tmp_path, stored), Block()
    check(module, infos, "draft x", set())
    fill(module, infos.items(), "draft x", "strict")
    assert torch.equal(module.qkv_proj.weight, torch.cat([stored[f"{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(module.qkv_proj.bias, torch.cat([stored[f"{p}_proj.bias"] for p in "qkv"]))
    assert torch.equal(module.down_proj.weight, stored["down_proj.weight"])
    assert torch.equal(module.embed_tokens.weight, stored["embed_tokens.weight"])
    assert torch.equal(module.d2t, stored["d2t"])


def test_packed_shards_fill_their_rows(tmp_path):
    scheme = Scheme("pack-quantized", 4, "group", 32, symmetric=False)
    stored = {"d2t": torch.arange(4), "embed_tokens.weight": torch.randn(10, 32)}
    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "down_proj": 16}
    for name, out in rows.items():
        stored |= {
            f"{name}.weight_packed": torch.randint(-(2**31), 2**31 - 1, (out, 4), dtype=torch.int32),
            f"{name}.weight_scale": torch.rand(out, 1), f"{name}.weight_shape": torch.tensor([out, 32]),
            f"{name}.weight_zero_point": torch.randint(-(2**31), 2**31 - 1, (out // 8, 1), dtype=torch.int32),
        }  # fmt: skip
    stored |= {f"{p}_proj.bias": torch.zeros(rows[f"{p}_proj"]) for p in "qkv"}
    infos, module = headers(tmp_path, stored), Block(scheme)
    check(module, infos, "draft x", set())
    fill(module, infos.items(), "draft x", "strict")
    for leaf in ("weight_packed", "weight_scale", "weight_zero_point"):
        assert torch.equal(getattr(module.qkv_proj, leaf), torch.cat([stored[f"{p}_proj.{leaf}"] for p in "qkv"])), leaf
    assert module.qkv_proj.weight_shape.tolist() == [[16, 32], [8, 32], [8, 32]]


@pytest.mark.parametrize("name", ["down_proj.weight", "k_proj.weight", "v_proj.bias", "d2t", "embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path, no_reading, name):
    stored = tensors()
    del stored[name]
    module = Block()
    with pytest.raises(CheckpointError, match=r"draft x: .*no weight was read") as refused:
        check(module, headers(tmp_path, stored), "draft x", set())
    assert f"missing (1): {name}" in str(refused.value)
    assert untouched(module)


def test_an_optional_tensor_may_be_missing(tmp_path):
    stored = tensors()
    del stored["embed_tokens.weight"]
    check(Block(), headers(tmp_path, stored), "draft x", {"embed_tokens.weight"})


@pytest.mark.parametrize(
    "name",
    ["down_proj.weight_packed", "other.weight", "down_proj.bias", "qkv_proj.weight", "qkv_proj.weight.weight", "embed_tokens", "d2t.x"],
)
def test_an_unexpected_tensor_is_named_with_what_it_holds(tmp_path, no_reading, name):
    module = Block()
    with pytest.raises(CheckpointError) as refused:
        check(module, headers(tmp_path, tensors() | {name: torch.zeros(3, 5, dtype=torch.int32)}), "draft x", set())
    assert f"unexpected (1): {name} (I32 [3, 5])" in str(refused.value)
    assert untouched(module)


@pytest.mark.parametrize(
    ("name", "shape", "expected"), [("down_proj.weight", (32, 16), [16, 32]), ("k_proj.weight", (16, 32), [8, 32]), ("d2t", (5,), [4])]
)
def test_another_shape_is_named_with_both(tmp_path, no_reading, name, shape, expected):
    stored = tensors()
    stored[name] = torch.zeros(shape, dtype=stored[name].dtype)
    module = Block()
    with pytest.raises(CheckpointError) as refused:
        check(module, headers(tmp_path, stored), "draft x", set())
    assert f"shape (1): {name}: stored {list(shape)}, expected {expected}" in str(refused.value)
    assert untouched(module)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("down_proj.weight", torch.int8),
        ("down_proj.weight", torch.uint8),
        ("down_proj.weight", torch.float8_e4m3fn),
        ("down_proj.weight", torch.int64),
        ("down_proj.weight", torch.bool),
        ("d2t", torch.float32),
        ("d2t", torch.int16),
        ("d2t", torch.bool),
    ],
)
def test_another_kind_of_dtype_is_named_with_both(tmp_path, no_reading, name, dtype):
    stored = tensors()
    stored[name] = stored[name].to(dtype)
    module = Block()
    infos = headers(tmp_path, stored)
    with pytest.raises(CheckpointError) as refused:
        check(module, infos, "draft x", set())
    expected = "int64" if name == "d2t" else "float32"
    assert f"dtype (1): {name}: stored {infos[name].dtype}, expected {expected}" in str(refused.value)
    assert untouched(module)


def test_a_16_bit_tensor_never_lands_in_packed_words(tmp_path, no_reading):
    stored = tensors()
    for name in ("down", "q", "k", "v"):
        weight = stored.pop(f"{name}_proj.weight")
        stored[f"{name}_proj.weight_packed"] = weight[:, :4].bfloat16()
        stored[f"{name}_proj.weight_scale"] = weight[:, :1].abs()
        stored[f"{name}_proj.weight_shape"] = torch.tensor([len(weight), 32])
    with pytest.raises(CheckpointError, match=r"dtype \(4\): .*weight_packed: stored BF16, expected int32"):
        check(Block(W4), headers(tmp_path, stored), "draft x", set())


def test_wide_words_are_not_cut_to_narrow_ones(tmp_path, no_reading):
    stored = tensors()
    for name in ("down", "q", "k", "v"):
        weight = stored.pop(f"{name}_proj.weight")
        stored[f"{name}_proj.weight_packed"] = torch.full((len(weight), 4), 2**40)
        stored[f"{name}_proj.weight_scale"] = weight[:, :1].abs()
        stored[f"{name}_proj.weight_shape"] = torch.tensor([len(weight), 32])
    with pytest.raises(CheckpointError, match=r"dtype \(4\): .*weight_packed: stored I64, expected int32"):
        check(Block(W4), headers(tmp_path, stored), "draft x", set())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_convert_and_short_indices_widen(tmp_path, dtype):
    stored = tensors()
    stored["down_proj.weight"] = stored["down_proj.weight"].to(dtype)
    stored["d2t"] = stored["d2t"].int()
    infos, module = headers(tmp_path, stored), Block()
    check(module, infos, "draft x", set())
    fill(module, infos.items(), "draft x", "strict")
    assert torch.equal(module.down_proj.weight, stored["down_proj.weight"].float())
    assert module.d2t.tolist() == [0, 1, 2, 3]


def test_all_disagreements_come_at_once_five_of_a_kind(tmp_path, no_reading):
    stored = tensors() | {f"extra.{i}": torch.zeros(1) for i in range(7)}
    del stored["d2t"]
    stored["down_proj.weight"] = torch.zeros(16, 16, dtype=torch.int8)
    with pytest.raises(CheckpointError) as refused:
        check(Block(), headers(tmp_path, stored), "draft x", set())
    lines = str(refused.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["unexpected", "shape", "dtype", "missing"]
    assert lines[0].startswith("  unexpected (7)") and lines[0].count("extra.") == 5


def test_an_unchecked_fill_raises_the_name_that_was_looked_up(tmp_path):
    """The order is the file's: what comes before the first unknown name has been copied."""
    stored = tensors()
    infos, module = headers(tmp_path, stored), Block(W4)
    with pytest.raises(KeyError) as caught:
        fill(module, infos.items(), "draft x", "unexpected")
    error = caught.value
    assert isinstance(error, CheckpointKeyError)
    assert error.args[0] == error.name == "down_proj.weight" == str(error)
    assert error.tensor == "down_proj.weight" and error.source == "draft x"
    assert error.module_parameters == ("down_proj.weight_packed", "down_proj.weight_scale", "down_proj.weight_shape")
    assert torch.equal(module.d2t, stored["d2t"])
    assert bool((module.embed_tokens.weight == SENTINEL).all())


def test_a_shard_is_looked_up_under_its_fused_name(tmp_path):
    infos = headers(tmp_path, {"k_proj.weight": torch.zeros(8, 32)})
    with pytest.raises(CheckpointKeyError) as caught:
        fill(Block(W4), infos.items(), "draft x", "unexpected")
    assert (caught.value.args[0], caught.value.tensor) == ("qkv_proj.weight", "k_proj.weight")


def test_an_unchecked_fill_leaves_missing_tensors_as_they_were(tmp_path):
    module = Block()
    fill(module, headers(tmp_path, {"d2t": torch.arange(4)}).items(), "draft x", "unexpected")
    assert bool((module.down_proj.weight == SENTINEL).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_that_are_not_finite_are_refused_only_where_checked(tmp_path, value, dtype):
    stored = tensors()
    stored["k_proj.weight"][3, 5] = value
    stored = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    infos = headers(tmp_path, stored)
    with pytest.raises(CheckpointError, match="k_proj.weight holds values that are not finite"):
        fill(Block(dtype=dtype), infos.items(), "draft x", "strict")
    fill(Block(dtype=dtype), infos.items(), "draft x", "unexpected")


def test_a_value_that_overflows_on_conversion_is_refused(tmp_path):
    stored = tensors()
    stored["down_proj.weight"][0, 0] = 1e6
    infos = headers(tmp_path, stored)
    fill(Block(), infos.items(), "draft x", "strict")
    with pytest.raises(CheckpointError, match="down_proj.weight"):
        fill(Block(dtype=torch.float16), infos.items(), "draft x", "strict")


def test_destinations_are_views_of_the_parameters():
    module = Block()
    destination(module, "qkv_proj.weight", 1).fill_(3)
    assert [int((module.qkv_proj.weight == 3).all(1).sum()), bool((module.qkv_proj.weight[16:24] == 3).all())] == [8, True]
    for name in ("qkv_proj.nothing", "nobody.weight", "embed_tokens.weight.weight", ""):
        with pytest.raises(KeyError) as caught:
            destination(module, name, None)
        assert caught.value.args[0] == name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["file", "tensor", "other dtype"])
def test_large_tensors_arrive_whole_in_pieces(tmp_path, monkeypatch, threads, kind):
    monkeypatch.setattr("specbench.checkpoint.fill.PIECE", 300)
    stored = tensors()
    module = Block(dtype=torch.float64 if kind == "other dtype" else torch.float32)
    source = stored if kind == "tensor" else headers(tmp_path, stored)
    fill(module, source.items(), "draft x", "strict", threads=threads)
    parts = [module.qkv_proj.shard("weight", i) for i in range(3)]
    assert all(torch.equal(part.float(), stored[f"{name}_proj.weight"]) for part, name in zip(parts, "qkv", strict=True))
    assert torch.equal(module.embed_tokens.weight.float(), stored["embed_tokens.weight"])
    assert torch.equal(module.down_proj.weight.float(), stored["down_proj.weight"])


@pytest.mark.parametrize("row", [0, 4, 9])
def test_a_bad_value_in_any_piece_is_found(tmp_path, monkeypatch, row):
    monkeypatch.setattr("specbench.checkpoint.fill.PIECE", 300)
    stored = tensors()
    stored["embed_tokens.weight"][row, 31] = float("nan")
    with pytest.raises(CheckpointError, match="embed_tokens.weight holds values that are not finite"):
        fill(Block(), headers(tmp_path, stored).items(), "draft x", "strict", threads=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_finite_agrees_with_torch_on_every_bit_pattern(dtype):
    if dtype.itemsize <= 2:
        bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64).to({1: torch.uint8, 2: torch.uint16}[dtype.itemsize])
    else:
        bits = torch.cat([torch.randint(-(2**62), 2**62, (4000,)), torch.tensor([0, -1])])
    for value in bits.view(dtype)[:: 1 if dtype.itemsize != 2 else 7]:
        assert finite(value.reshape(1)) == bool(torch.isfinite(value.float() if dtype.itemsize == 1 else value)), value
    extreme = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=torch.float64).to(dtype)
    assert finite(extreme) and finite(torch.empty(0, dtype=dtype)) and finite(torch.ones(3, dtype=torch.int64))
    if dtype.itemsize > 1:
        assert not finite(torch.tensor([1, float("-inf")]).to(dtype)) and not finite(torch.tensor([float("inf")]).to(dtype))

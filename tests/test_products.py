"""Every way of multiplying plain weights against fp64, whichever processor runs the test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import near
from torch.nn import functional as F

from specbench.quant import products
from specbench.quant.products import FEW_ROWS, WIDEN_ROWS, few_rows, product, widened

BF16 = torch.bfloat16
PROCESSORS = {  # (oneDNN takes bf16, F.linear lays weights out anew)
    "avx2": (False, False),
    "avx512": (True, True),
    "avx512-bf16": (True, False),
}


def drawn(rows, outputs, width, seed=0, dtype=BF16):
    g = torch.Generator().manual_seed(seed)
    made = (torch.randn(*size, generator=g).to(dtype) for size in ((rows, width), (outputs, width), (outputs,)))
    return tuple(made)


@pytest.fixture(params=list(PROCESSORS))
def processor(request, monkeypatch):
    bf16, relays = PROCESSORS[request.param]
    monkeypatch.setattr(products, "multiplies_bf16", lambda: bf16)
    monkeypatch.setattr(products, "linear_relays", lambda: relays)
    return request.param


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, WIDEN_ROWS - 1, WIDEN_ROWS, FEW_ROWS, FEW_ROWS + 1, 70])
def test_product_is_the_same_on_every_processor(processor, rows, with_bias, dtype):
    x, weight, bias = drawn(rows, 48, 64, dtype=dtype)
    bias = bias if with_bias else None
    got = product(x, weight, bias)
    assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, (rows, 48), True)
    assert near(got, F.linear(x.double(), weight.double(), None if bias is None else bias.double()), 2 if dtype == BF16 else 32)


def test_each_processor_takes_its_own_way(processor, monkeypatch):
    taken = []
    for name in ("few_rows", "widened"):
        monkeypatch.setattr(products, name, lambda rows, *rest, name=name: taken.append((name, rows.shape[0])))
    for rows in (1, WIDEN_ROWS, FEW_ROWS + 1):
        product(*drawn(rows, 8, 16)[:2])
        product(*drawn(rows, 8, 16, dtype=torch.float32)[:2])
    expected = {
        "avx2": [("widened", WIDEN_ROWS), ("widened", FEW_ROWS + 1)],
        "avx512": [("few_rows", 1), ("few_rows", WIDEN_ROWS)],
        "avx512-bf16": [],
    }
    assert taken == expected[processor]


@settings(max_examples=30)
@given(rows=st.integers(1, 20), outputs=st.integers(1, 40), width=st.integers(1, 40), at_once=st.sampled_from([1, 100, 1 << 20]))
def test_weights_are_widened_a_block_at_a_time(rows, outputs, width, at_once):
    x, weight, bias = drawn(rows, outputs, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WIDENED_AT_ONCE", at_once)
        assert near(widened(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()), 1)
        assert near(widened(x, weight), F.linear(x.double(), weight.double()), 1)


def test_whole_numbers_are_widened_as_they_are():
    x = drawn(30, 1, 64)[0]
    levels = torch.randint(-128, 128, (48, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert near(widened(x, levels), F.linear(x.double(), levels.double()), 1)


@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS])
def test_few_rows_with_the_weight_on_the_left(rows):
    x, weight, _ = drawn(rows, 48, 64)
    assert near(few_rows(x, weight), F.linear(x.double(), weight.double()))


def test_the_processor_is_asked_once_and_answers_a_bool():
    products.multiplies_bf16.cache_clear()
    assert isinstance(products.multiplies_bf16(), bool) and products.multiplies_bf16.cache_info().misses == 1
    assert isinstance(products.linear_relays(), bool)

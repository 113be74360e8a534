"""Products with plain weights, each by the way that is fastest for so many rows on this processor.

What enters: rows and a weight, in bf16 as a rule. What leaves: `rows @ weight.T (+ bias)`. It does not know layers, schemes or files.

Processors differ in what they do with bf16. Without AVX512 oneDNN refuses it, and torch's own loop runs at a seventh of fp32's speed, in
time that grows with every row: from a handful of rows on it is faster to widen the weight. With AVX512 but no bf16 instructions, and with
tiles (AMX), F.linear lays the whole weight out anew for every call. With AVX512's bf16 instructions alone it is as fast as it should be.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 16  # up to here a weight that is laid out anew costs more than its product
WIDEN_ROWS = 5  # from here widening is faster: layers of a 135M model and its head, cold, 2 cores of an EPYC with AVX2
WIDENED_AT_ONCE = 1 << 20  # weights; 4 MB of fp32


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN takes bf16 on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def linear_relays() -> bool:
    """Whether F.linear lays a bf16 weight out anew for every call; where AVX512 alone has bf16 instructions it does not, and takes 0.7 of
    `few_rows`' time (1 to 4 rows, 2 cores of an EPYC 9004)."""
    return torch.cpu._is_amx_tile_supported() or (multiplies_bf16() and not torch.cpu._is_avx512_bf16_supported())


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [n, in] @ weight [out, in].T + bias [out], in the dtype of `rows`."""
    if rows.dtype == torch.bfloat16 and rows.device.type == "cpu":
        if rows.shape[0] >= WIDEN_ROWS and not multiplies_bf16():
            return widened(rows, weight, bias)
        if rows.shape[0] <= FEW_ROWS and bias is None and linear_relays():
            return few_rows(rows, weight)
    return F.linear(rows, weight, bias)


def few_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """The product for a few rows where F.linear lays weights out anew: with the weight as the left factor, or as a matrix times a vector,
    it is read once, which takes half the time where it does not fit the processor's cache."""
    if rows.shape[0] == 1:
        return torch.mv(weight, rows[0])[None]
    return torch.mm(weight, rows.t()).t().contiguous()


def widened(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in fp32, rounded once: weights, bf16 or whole numbers, are widened a block at a time, which stays in the cache. With the
    weight as the left factor 16 to 32 rows take 0.8 of the time, and other numbers the same."""
    columns, step = rows.float().t(), max(1, WIDENED_AT_ONCE // weight.shape[1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        found = torch.mm(weight[part].float(), columns)
        out[:, part] = (found if bias is None else found.add_(bias[part].float()[:, None])).t()
    return out

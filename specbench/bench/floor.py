"""What of a round is arithmetic that nobody can spare: its matrix products alone, and attention alone, as context grows.

What enters: loaded models and shapes. What leaves: median seconds. It does not know prompts, acceptance or the decode loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..decode.greedy import ROWS, screen
from ..models.decoder import Decoder
from ..models.eagle3 import Eagle3
from ..quant.linear import Linear

PASSES = 15  # timed, after three that warm up; the median counts


@torch.inference_mode()
def matmul_seconds(layers: Iterable[Any], rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """Every product of `layers` (`Linear`s) once, in their order, over `rows` rows of random activations."""
    chosen = list(layers)
    inputs = {width: torch.randn(rows, width, dtype=dtype, device=device) for width in {layer.in_features for layer in chosen}}

    def products() -> None:
        for layer in chosen:
            layer(inputs[layer.in_features])

    return median(products, device)


def round_floor(verifier: Decoder, draft: Eagle3 | None, k: int, committed: float = 2.0) -> float:
    """The matrix products of one greedy round at batch 1: the verifier's over k + 1 rows, the head's by its 8-bit copy where decoding uses
    that (`decode.greedy`); the draft's, fusion and layers over the committed pairs, then layers for k - 1 steps, and its head for k.

    Args:
        committed: pairs that a round hands to the draft, the mean acceptance length.
    """
    rough = screen(verifier) if k + 1 in ROWS else None
    own = [m for m in verifier.modules() if isinstance(m, Linear) and (rough is None or m is not verifier.lm_head)]
    total = matmul_seconds(own, k + 1, verifier.dtype, verifier.device)
    if rough is not None:
        rows = torch.randn(k + 1, verifier.config.hidden_size, dtype=verifier.dtype)
        total += median(lambda: rough.rough(rows), verifier.device)
    if draft is None or not k:
        return total
    inner: list[Any] = [m for layer in draft.layers for m in layer.modules() if isinstance(m, Linear)]
    first: list[Any] = inner if draft.fc is None else [draft.fc, *inner]
    dtype, device = draft.dtype, draft.device
    total += matmul_seconds(first, max(1, round(committed)), dtype, device)
    return total + (k - 1) * matmul_seconds(inner, 1, dtype, device) + k * matmul_seconds([draft.lm_head], 1, dtype, device)


@torch.inference_mode()
def context_seconds(verifier: Decoder, k: int, contexts: Sequence[int]) -> list[dict[str, float]]:
    """One verifying pass over k + 1 tokens behind each of `contexts` committed ones, and its attention operators alone.

    Returns:
        context | verify_s | attention_s, per context.
    """
    device, config = verifier.device, verifier.config
    length, rows = max(contexts) + k + 2, k + 1
    cache = verifier.new_cache(length)
    for layer in cache.layers:
        layer.kv.normal_()
    group = config.num_attention_heads // config.num_key_value_heads
    query = torch.randn(1, config.num_key_value_heads, rows * group, config.head_dim, dtype=verifier.dtype, device=device)
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=device)
    found = []
    for context in contexts:
        lengths = torch.tensor([context + 1], device=device)
        positions = lengths[:, None] - 1 + torch.arange(rows, device=device)
        step = verifier.step(positions, context + rows)
        mask = step.mask(None, group)

        def attention(context: int = context, mask: Any = mask) -> None:
            for layer in cache.layers:
                keys, values = layer.kv[:, :, : context + rows].chunk(2, 1)
                F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

        def whole(lengths: torch.Tensor = lengths, positions: torch.Tensor = positions, context: int = context) -> None:
            verifier(tokens, verifier.step(positions, context + rows), cache)

        found.append({"context": context, "verify_s": median(whole, device), "attention_s": median(attention, device)})
    return found


def median(call: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of `call`, synchronised."""
    times = []
    for _ in range(3 + PASSES):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])

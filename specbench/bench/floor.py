"""What of a round is arithmetic that nobody can spare: its matrix products alone, and attention alone, as context grows.

What enters: loaded models and shapes. What leaves: median seconds. It does not know prompts, acceptance or the decode loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ..decode.greedy import ROWS, Screen, screen
from ..models.decoder import Decoder
from ..models.eagle3 import Eagle3
from ..quant.linear import Linear

PASSES = 15  # timed, after three that warm up; the median counts


@torch.inference_mode()
def round_floor(verifier: Decoder, draft: Eagle3 | None, k: int, committed: float = 2.0) -> float:
    """Seconds of the matrix products of one greedy round at batch 1 (`round_products`), over random activations.

    They run in a round's order: a verifier that is larger than the processor's cache pushes the draft out of it, and the draft's first
    products read from memory again.
    """
    calls = []
    for layer, rows in round_products(verifier, draft, k, committed):
        width, dtype = (verifier.config.hidden_size, verifier.dtype) if isinstance(layer, Screen) else (layer.in_features, layer.dtype)
        x = torch.randn(rows, width, dtype=dtype, device=verifier.device)
        calls.append(partial(layer.rough if isinstance(layer, Screen) else layer, x))

    def products() -> None:
        for call in calls:
            call()

    return median(products, verifier.device)


def round_products(verifier: Decoder, draft: Eagle3 | None, k: int, committed: float = 2.0) -> list[tuple[Any, int]]:
    """(layer, rows) of every matrix product of a round, in order.

    The draft's: fusion and layers over the committed pairs, its head, then layers and head over one row for each further step. The
    verifier's over k + 1 rows, and its head, or the 8-bit copy where decoding uses that (`decode.greedy`).

    Args:
        committed: pairs that a round hands to the draft, the mean acceptance length.
    """
    found: list[tuple[Any, int]] = []
    if draft is not None and k:
        inner = [m for layer in draft.layers for m in layer.modules() if isinstance(m, Linear)]
        pairs = max(1, round(committed))
        found += [(layer, pairs) for layer in (inner if draft.fc is None else [draft.fc, *inner])]
        found += [(draft.lm_head, 1)] + (k - 1) * [(layer, 1) for layer in (*inner, draft.lm_head)]
    found += [(m, k + 1) for m in verifier.modules() if isinstance(m, Linear) and m is not verifier.lm_head]
    rough = screen(verifier) if k + 1 in ROWS else None
    return [*found, (verifier.lm_head if rough is None else rough, k + 1)]


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

"""Static key/value caches: one tensor per layer, written at positions, never grown or copied.

What enters: new keys and values with the positions they belong to. What leaves: views over everything that a query
may look at. It does not know tokens, models or acceptance: a rejected token is forgotten by moving the committed
length back, because every query masks keys beyond its own position and the slot is overwritten next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Step:
    """What one forward pass over n new tokens needs to know about place, computed once for all layers.

    positions: int64 [B, n], the slot of each new token. rows: int64 [B, 1] cache rows, or None for all rows in order.
    limit: keys in slots [0, limit) are visible at most; a host integer, so that shapes never depend on device data.
    masked: False promises that every slot below `limit` is visible to every query.
    rotary: [2, B, n, 1, head_dim].
    """

    positions: Tensor
    rows: Tensor | None
    limit: int
    masked: bool
    rotary: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """bool [B, 1, n, limit]: which slots each query sees, all earlier ones or the last `window`; None for everything."""
        if window is not None and window >= self.limit:
            window = None
        if window is None and not self.masked:
            return None
        if window not in self.masks:
            self.masks[window] = visible(self.positions, self.limit, window)
        return self.masks[window]


class LayerCache:
    """Keys and values of one layer. kv: [2, B, S, kv_heads, head_dim]. rounded_to: a narrower dtype that they pass through, or None."""

    __slots__ = ("kv", "rounded_to")

    def __init__(
        self,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        rounded_to: torch.dtype | None,
    ) -> None:
        self.rounded_to = rounded_to
        self.kv = torch.zeros(2, batch, length, kv_heads, head_dim, dtype=dtype, device=device)

    def update(self, keys: Tensor, values: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Write [B, n, kv_heads, d] at `step.positions`; return keys and values [B, kv_heads, limit, d]."""
        if self.rounded_to is not None:
            keys, values = (t.to(self.rounded_to).to(t.dtype) for t in (keys, values))
        if step.rows is None and keys.shape[0] == 1:
            self.kv[0, 0].index_copy_(0, step.positions[0], keys[0])
            self.kv[1, 0].index_copy_(0, step.positions[0], values[0])
            seen = self.kv[:, :, : step.limit]
        else:
            rows = step.rows if step.rows is not None else torch.arange(keys.shape[0], device=keys.device)[:, None]
            self.kv[0].index_put_((rows, step.positions), keys)
            self.kv[1].index_put_((rows, step.positions), values)
            seen = self.kv[:, :, : step.limit]
            if step.rows is not None:
                seen = seen[:, rows[:, 0]]
        return seen[0].transpose(1, 2), seen[1].transpose(1, 2)


class Cache:
    """The caches of all layers of one model. Slots beyond the committed length hold leftovers that no query sees."""

    def __init__(
        self,
        layers: int,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        self.layers = [LayerCache(batch, length, kv_heads, head_dim, dtype, device, rounded_to) for _ in range(layers)]
        self.length = length
        self.batch = batch

    def nbytes(self) -> int:
        return sum(layer.kv.nbytes for layer in self.layers)


def visible(positions: Tensor, limit: int, window: int | None = None) -> Tensor:
    """Causal visibility over slots: bool [B, 1, n, limit], True where slot <= the query's position (and > position - window)."""
    slots = torch.arange(limit, device=positions.device)
    seen = slots <= positions[..., None]
    if window is not None:
        seen &= slots > positions[..., None] - window
    return seen[:, None]

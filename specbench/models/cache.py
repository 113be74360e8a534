"""Static key/value caches: one tensor per layer, written at slots, never grown or copied.

What enters: new keys and values with the slots they go to. What leaves: views over everything that a query may look at. It does not know
tokens, models or acceptance: a rejected token is forgotten by moving the committed length back, because every query masks keys beyond its
own position and the slot is overwritten next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Step:
    """What one forward pass over n new tokens of b sequences needs to know about place, computed once for all layers.

    positions: int64 [b, n], for the rotary embedding. slots: int64 [b, n], where keys and values go; positions, but in trees.
    row: first cache row; sequence i lies in row + i. limit: keys in slots [0, limit) are visible at most; a host integer, so that shapes
    never depend on device data. rotary: cosines and signed sines, each
    [b, n, heads + 2 * kv_heads, head_dim]. masked: False promises that every slot below `limit` is
    visible to every query. causal: a prompt pass from slot 0, where query i sees slots 0 .. i and limit is n. seen: bool [b, n, limit]
    where visibility is neither, with the position of every slot in key_positions, int64 [b, limit].
    """

    positions: Tensor
    slots: Tensor
    row: int
    limit: int
    rotary: tuple[Tensor, Tensor]
    masked: bool = True
    causal: bool = False
    seen: Tensor | None = None
    key_positions: Tensor | None = None
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def size(self) -> tuple[int, int]:
        """(b, n)."""
        batch, n = self.positions.shape
        return batch, n

    def mask(self, window: int | None, repeat: int = 1) -> Tensor | None:
        """Additive mask [b, 1, n * repeat, limit] in the rotary table's dtype: 0 where a query sees a slot, all earlier ones or the last
        `window`, else -inf; each query's row `repeat` times. None for everything."""
        if window is not None and window >= self.limit:
            window = None
        if window is None and not self.masked:
            return None
        key = window, repeat
        if key not in self.masks:
            seen = visible(self.positions, self.limit, window, self.seen, self.key_positions)
            if repeat > 1:
                seen = seen.repeat_interleave(repeat, 1)
            zero = torch.zeros((), dtype=self.rotary[0].dtype, device=seen.device)
            self.masks[key] = torch.where(seen, zero, float("-inf"))[:, None]
        return self.masks[key]


class LayerCache:
    """Keys and values of one layer. kv: [B, 2 * kv_heads, S, head_dim], keys first: what one head reads lies together. rounded_to: a
    narrower dtype that they pass through."""

    __slots__ = ("kv", "kv_heads", "rounded_to")

    def __init__(self, kv: Tensor, rounded_to: torch.dtype | None) -> None:
        self.kv, self.rounded_to = kv, rounded_to
        self.kv_heads = kv.shape[1] // 2

    def update(self, new: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Write keys and values [b, n, 2 * kv_heads, d] at `step.slots`; return keys and values [b, kv_heads, limit, d]."""
        keys, values = write_slots(self.kv, new, step.slots, step.row, step.limit, self.rounded_to).split(self.kv_heads, 1)
        return keys, values


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
        shape = (batch, 2 * kv_heads, length, head_dim)
        self.layers = [LayerCache(torch.zeros(shape, dtype=dtype, device=device), rounded_to) for _ in range(layers)]
        self.length = length
        self.batch = batch

    @classmethod
    def of(cls, layers: list[LayerCache], batch: int) -> Cache:
        """The cache made of these layers."""
        cache = cls.__new__(cls)
        cache.layers, cache.batch, cache.length = layers, batch, layers[0].kv.shape[2]
        return cache

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` over row `target`."""
        for layer in self.layers:
            move_row(layer.kv, source, target, length)

    def gather(self, sources: Tensor, targets: Tensor) -> None:
        """In every row b of the first ones, copy slots sources[b] [b, n] to slots targets[b]; read before written."""
        for layer in self.layers:
            gather_slots(layer.kv, sources, targets)

    def nbytes(self) -> int:
        return sum(layer.kv.nbytes for layer in self.layers)


def write_slots(held: Tensor, new: Tensor, slots: Tensor, row: int, limit: int, rounded_to: torch.dtype | None) -> Tensor:
    """Write `new` [b, n, heads, d] at slots [b, n] of rows row .. row + b - 1 of `held` [B, heads, S, d]; return those rows' first `limit`
    slots, [b, heads, limit, d]. rounded_to: a narrower dtype that values pass through, or None."""
    if rounded_to is not None:
        new = new.to(rounded_to).to(new.dtype)
    batch = new.shape[0]
    held = held if batch == held.shape[0] else held.narrow(0, row, batch)
    if batch == 1:
        held.index_copy_(2, slots.view(-1), new.transpose(1, 2))
    else:
        rows = torch.arange(batch, device=new.device)[:, None]
        held.transpose(1, 2).index_put_((rows, slots), new)
    return held.narrow(2, 0, limit)


def move_row(held: Tensor, source: int, target: int, length: int) -> None:
    """Copy the first `length` slots of row `source` of `held` [B, heads, S, d] over row `target`."""
    held[target, :, :length] = held[source, :, :length]


def gather_slots(held: Tensor, sources: Tensor, targets: Tensor) -> None:
    """In the first rows b of `held` [B, heads, S, d], copy slots sources[b] [b, n] to slots targets[b]; read before written."""
    rows = torch.arange(sources.shape[0], device=sources.device)[:, None]
    by_slot = held.transpose(1, 2)
    by_slot[rows, targets] = by_slot[rows, sources]


def visible(
    positions: Tensor, limit: int, window: int | None = None, seen: Tensor | None = None, key_positions: Tensor | None = None
) -> Tensor:
    """Which slots each query sees, bool [b, n, limit].

    Args:
        positions: int64 [b, n], of the queries.
        window: only slots whose position is above the query's minus `window`.
        seen: bool [b, n, limit] in place of "slot <= the query's position".
        key_positions: int64 [b, limit], position of every slot; the slot's own number without it.
    """
    slots = torch.arange(limit, device=positions.device) if key_positions is None else key_positions[:, None]
    found = slots <= positions[..., None] if seen is None else seen
    return found if window is None else found & (slots > positions[..., None] - window)

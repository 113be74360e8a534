"""Write the draft's training text with the verifier itself, and keep the states that it passes through.

What enters: prompts and a loaded verifier. What leaves: numbered safetensors shards, each with the token ids of finished
conversations and the verifier's states at every position. It does not know the draft. Interrupt it at any time: conversations
in finished shards are not repeated, and at most a shard's worth is lost.

Shard tensors: tokens int32 [T]; states bf16 [T, (K + 1) * hidden], the auxiliary states (low to high) and then the normed
last state; lengths, prompt_lengths and prompt_ids int32 [conversations]. T is the sum of lengths; a conversation's last
position has no state (zeros), because nothing was predicted from it.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from specbench.decode.sampling import best

SHARD_TOKENS = 60_000
ADMIT = 16  # free slots worth a prefill


@dataclass(slots=True)
class Slot:
    """One conversation in flight."""

    prompt_id: int
    prompt_length: int
    temperature: float
    tokens: list[int] = field(default_factory=list)


def finished_prompts(folder: Path) -> set[int]:
    """Prompt ids in the shards of `folder`."""
    done: set[int] = set()
    for path in sorted(folder.glob("text-*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            done.update(shard.get_tensor("prompt_ids").tolist())
    return done


def _on_its_device(write: Callable[..., int]) -> Callable[..., int]:
    """Make tensors where the verifier, the first argument, has its own."""

    @functools.wraps(write)
    def wrapped(verifier: Any, *args: Any, **kwargs: Any) -> int:
        with torch.device(verifier.device):
            return write(verifier, *args, **kwargs)

    return wrapped


@_on_its_device
@torch.inference_mode()
def write_text(
    verifier: Any,
    encoded: list[list[int]],
    folder: Path,
    *,
    aux_layers: tuple[int, ...],
    eos_ids: frozenset[int],
    max_new_tokens: int = 220,
    batch: int = 192,
    sampled_share: float = 0.3,
    temperature: float = 0.8,
    seed: int = 0,
    until: Callable[[], bool] = lambda: False,
) -> int:
    """Answer `encoded` prompts (token ids, chat template applied) until they or `until()` end the run.

    `batch` conversations run side by side in one static cache; a finished one makes room for the next prompt. Returns the
    number of tokens written to shards by this call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = finished_prompts(folder)
    queue = _by_length([i for i in range(len(encoded)) if i not in done], encoded)
    length = max(len(p) for p in encoded) + max_new_tokens
    width = verifier.config.hidden_size * (len(aux_layers) + 1)
    cache = verifier.new_cache(length, batch)
    states = torch.zeros(batch, length, width, dtype=torch.bfloat16)
    slots: list[Slot | None] = [None] * batch
    generator = torch.Generator(verifier.device).manual_seed(seed + len(done))
    shards = _ShardWriter(folder)
    bar = tqdm(total=len(encoded), initial=len(done), desc="conversations", smoothing=0.02)

    def choose(hidden: Tensor, temperatures: Tensor) -> Tensor:
        logits = verifier.lm_head(hidden)
        chosen = best(logits)
        sampled = temperatures.nonzero()[:, 0]
        if len(sampled):
            total = (logits[sampled].float() / temperatures[sampled, None]).softmax(-1).cumsum(-1)
            point = torch.rand(len(sampled), 1, generator=generator) * total[:, -1:]
            chosen[sampled] = torch.searchsorted(total, point, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
        return chosen

    def admit(free: list[int]) -> None:
        rows = free[: len(queue)]
        for row in rows:
            prompt_id = queue.pop(0)
            sampled = random.Random(f"{seed}-{prompt_id}").random() < sampled_share
            slots[row] = Slot(prompt_id, len(encoded[prompt_id]), temperature if sampled else 0.0, list(encoded[prompt_id]))
        fresh = [slots[row] for row in rows]
        longest = max(slot.prompt_length for slot in fresh if slot)
        tokens = torch.tensor([slot.tokens + [0] * (longest - slot.prompt_length) for slot in fresh if slot])
        prompts = verifier.new_cache(longest, len(rows))
        step = verifier.step(torch.arange(longest).expand(len(rows), -1), longest, causal=True)
        hidden, aux = verifier(tokens, step, prompts, aux_layers)
        for layer, prompt_layer in zip(cache.layers, prompts.layers, strict=True):
            layer.kv[rows, :, :longest] = prompt_layer.kv
        states[rows, :longest] = hidden if aux is None else torch.cat((aux, hidden), -1)
        last = torch.tensor([slot.prompt_length - 1 for slot in fresh if slot])
        temperatures = torch.tensor([slot.temperature for slot in fresh if slot])
        for slot, token in zip(fresh, choose(hidden[torch.arange(len(rows)), last], temperatures).tolist(), strict=True):
            if slot:
                slot.tokens.append(token)

    while not until():
        for row, slot in enumerate(slots):
            if slot and (slot.tokens[-1] in eos_ids or len(slot.tokens) - slot.prompt_length >= max_new_tokens):
                shards.add(slot, states[row])
                slots[row] = None
                bar.update()
                bar.set_postfix(tokens=shards.written, refresh=False)
        free = [row for row, slot in enumerate(slots) if slot is None]
        if queue and len(free) >= min(ADMIT, batch):
            admit(free)
            continue
        active = [(row, slot) for row, slot in enumerate(slots) if slot]
        if not active:
            break
        rows = torch.tensor([row for row, _ in active])
        tokens = torch.tensor([[slot.tokens[-1]] for _, slot in active])
        positions = torch.tensor([[len(slot.tokens) - 1] for _, slot in active])
        limit = int(positions.max()) + 1
        # empty slots ride along at position 0: cheaper than to gather the cache of the others
        all_tokens, all_positions = torch.zeros(2, batch, 1, dtype=torch.int64)
        all_tokens[rows], all_positions[rows] = tokens, positions
        hidden, aux = verifier(all_tokens, verifier.step(all_positions, limit), cache, aux_layers)
        hidden, aux = hidden[rows], None if aux is None else aux[rows]
        states[rows, positions[:, 0]] = (hidden if aux is None else torch.cat((aux, hidden), -1))[:, 0]
        temperatures = torch.tensor([slot.temperature for _, slot in active])
        for (_, slot), token in zip(active, choose(hidden[:, 0], temperatures).tolist(), strict=True):
            slot.tokens.append(token)
    shards.flush()
    bar.close()
    return shards.written


def _by_length(queue: list[int], encoded: list[list[int]], window: int = 1024) -> list[int]:
    """Sort by prompt length inside windows, so that prompts admitted together need little padding."""
    windows = (queue[i : i + window] for i in range(0, len(queue), window))
    return [i for group in windows for i in sorted(group, key=lambda i: len(encoded[i]))]


class _ShardWriter:
    """Collects finished conversations and writes them out in shards, each atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, 0
        self.pending: list[tuple[Slot, Tensor]] = []

    def add(self, slot: Slot, states: Tensor) -> None:
        kept = states[: len(slot.tokens)].to("cpu", copy=True)
        kept[-1] = 0
        self.pending.append((slot, kept))
        if sum(len(s.tokens) for s, _ in self.pending) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        integers = functools.partial(torch.tensor, dtype=torch.int32, device="cpu")
        number = len(list(self.folder.glob("text-*.safetensors")))
        tensors = {
            "tokens": integers([t for slot, _ in self.pending for t in slot.tokens]),
            "states": torch.cat([states for _, states in self.pending]),
            "lengths": integers([len(slot.tokens) for slot, _ in self.pending]),
            "prompt_lengths": integers([slot.prompt_length for slot, _ in self.pending]),
            "prompt_ids": integers([slot.prompt_id for slot, _ in self.pending]),
        }
        path = self.folder / f"text-{number:04d}.safetensors"
        save_file(tensors, f"{path}.partial", metadata={"written": str(int(time.time()))})
        Path(f"{path}.partial").rename(path)
        self.written += int(tensors["lengths"].sum())
        self.pending = []


def read_text(folder: Path, pattern: str = "text-*.safetensors") -> Iterator[dict[str, Tensor]]:
    """The shards of `folder` that match `pattern`, one dictionary of tensors each, states memory-mapped."""
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, framework="pt") as shard:
            yield {name: shard.get_tensor(name) for name in shard.keys()}

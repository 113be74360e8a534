"""Read finished text again with another verifier, usually a quantized one, and keep its states.

What enters: shards of `generate.write_text` and a loaded verifier. What leaves: shards with the same conversations and the other
verifier's states. It does not know the draft. Interrupt it at any time: finished shards are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from corpus import Conversation, collate, load
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm


@torch.inference_mode()
def reread(
    verifier: Any, text: Path, folder: Path, *, aux_layers: tuple[int, ...], batch: int = 16, until: Callable[[], bool] = lambda: False
) -> int:
    """Write the states of `verifier` over the shards of `text` to `folder`; returns the number of tokens read.

    Each shard is read whole or not at all; `until()` is asked before each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read = 0
    for path in tqdm(sorted(text.glob("text-*.safetensors")), desc="shards"):
        if (folder / path.name).exists():
            continue
        if until():
            break
        conversations = load(text, path.name)
        by_length = sorted(range(len(conversations)), key=lambda i: len(conversations[i].tokens))
        states: dict[int, Tensor] = {}
        for i in range(0, len(by_length), batch):
            rows = by_length[i : i + batch]
            for row, found in zip(rows, states_of(verifier, [conversations[j] for j in rows], aux_layers), strict=True):
                states[row] = found
        ordered = [states[i] for i in range(len(conversations))]
        _save(conversations, ordered, folder / path.name)
        read += sum(len(c.tokens) for c in conversations)
    return read


@torch.inference_mode()
def states_of(verifier: Any, group: list[Conversation], aux_layers: tuple[int, ...]) -> list[Tensor]:
    """[T, (K + 1) * hidden] for each conversation; the last row is zero, because nothing was predicted from it."""
    tokens = collate(group).tokens.to(verifier.device)
    rows, length = tokens.shape
    step = verifier.step(torch.arange(length, device=tokens.device).expand(rows, -1), length)
    hidden, aux = verifier(tokens, step, verifier.new_cache(length, rows), aux_layers)
    both = torch.cat((aux, hidden), -1).to("cpu", torch.bfloat16)
    found = [both[i, : len(c.tokens)].clone() for i, c in enumerate(group)]
    for state in found:
        state[-1] = 0
    return found


def _save(conversations: list[Conversation], states: list[Tensor], path: Path) -> None:
    tensors = {
        "tokens": torch.cat([c.tokens for c in conversations]),
        "states": torch.cat(states),
        "lengths": torch.tensor([len(c.tokens) for c in conversations], dtype=torch.int32),
        "prompt_lengths": torch.tensor([c.prompt_length for c in conversations], dtype=torch.int32),
        "prompt_ids": torch.tensor([c.prompt_id for c in conversations], dtype=torch.int32),
    }
    save_file(tensors, f"{path}.partial")
    Path(f"{path}.partial").rename(path)

"""What decoding keeps in memory besides weights, counted before anything is allocated.

What enters: models and the size of a batch. What leaves: bytes by purpose, or a refusal with figures. It does not know requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .rows import RING

SHARE = 0.9  # of what is free


def cache_bytes(config: Any, dtype: torch.dtype, length: int) -> int:
    """Keys and values of one sequence of `length` tokens."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on `device`; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def check_fits(
    verifier: Any,
    draft: Any | None,
    width: int,
    batch: int,
    length: int,
    penalised: bool,
    free: int | None = None,
    ring: int = RING,
    draft_slots: int = 0,
) -> int:
    """Bytes that `batch` sequences of `length` tokens take.

    Args:
        draft: the EAGLE-3 draft's model, or None. width: of the auxiliary states that wait for it. free: bytes; None asks the system.
        ring: states that may wait. draft_slots: what the draft's cache has beyond `length`.

    Raises:
        ConfigError: it is more than `SHARE` of what is free; with the largest batch that would fit.
    """
    parts = {"verifier cache": cache_bytes(verifier.config, verifier.dtype, length)}
    if draft is not None:
        parts["draft cache"] = cache_bytes(draft.config, draft.dtype, length + draft_slots)
    parts["states and tokens"] = ring * width * verifier.dtype.itemsize + 8 * length + (3 * verifier.config.vocab_size if penalised else 0)
    needed = batch * sum(parts.values())
    free = free_bytes(verifier.device) if free is None else free
    if free is not None and needed > SHARE * free:
        largest = int(SHARE * free / sum(parts.values()))
        figures = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.items())
        raise ConfigError(
            f"batch_size {batch} with {length} tokens a sequence needs {needed / 2**20:.0f} MiB ({figures} MiB a sequence); "
            f"{free / 2**20:.0f} MiB are free on {verifier.device}. "
            + (f"batch_size {largest} fits" if largest else "shorten prompts or max_new_tokens: not even one sequence fits")
        )
    return needed

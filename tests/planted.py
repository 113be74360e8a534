"""A tiny pair whose draft is often, not always, right: both models lean to the same two tokens by a planted direction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    draft_config,
    draft_tensors,
    pack_w4a16,
    verifier_config,
    verifier_tensors,
    w4a16_section,
    write,
)
from tiny_tokenizer import write_tokenizer

LEANING = [64, 80]  # verifier ids, both in the draft's vocabulary


def planted_pair(folder: Path, quantized: bool = False, **changes: Any) -> tuple[Path, Path]:
    """Verifier (with tokenizer) and draft folders below `folder`; `changes` go into the verifier's config."""
    g = torch.Generator().manual_seed(0)
    common = torch.randn(HIDDEN, generator=g)
    config = verifier_config(**({"quantization_config": w4a16_section()} if quantized else {}), **changes)
    tensors = verifier_tensors(config)
    tensors["model.embed_tokens.weight"] += common
    tensors["lm_head.weight"][LEANING] = 0.7 * common + 0.6 * torch.randn(len(LEANING), HIDDEN, generator=g)
    draft = draft_tensors()
    rows = [i * DRAFT_VOCAB // VOCAB for i in LEANING]
    draft["lm_head.weight"][rows] = draft["fc.weight"] @ common.repeat(3) + 0.6 * torch.randn(len(LEANING), HIDDEN, generator=g)
    verifier = write(folder / "verifier", config, pack_w4a16(tensors) if quantized else tensors)
    return write_tokenizer(verifier), write(folder / "draft", draft_config(), draft)

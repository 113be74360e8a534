"""How far a product may be from its fp64 reference."""

from __future__ import annotations

import torch
from torch import Tensor


def near(ours: Tensor, expected: Tensor, rounds: int = 2) -> bool:
    """Within `rounds` roundings of the largest output in the output's dtype."""
    step = torch.finfo(ours.dtype).eps * float(expected.abs().max())
    return float((ours.double() - expected).abs().max()) <= rounds * step

"""The verifier's best token, exactly, without multiplying its whole head.

What enters: a plain bf16 head, and normed hidden states. What leaves: the ids that the full scores' maximum would give. It does not know
drafts, acceptance or sampling.

An 8-bit copy of the head gives every score up to an error with a known bound: what rounding a row of weights to 8 bits changes in a score
is at most the length of that change times the length of the hidden state (Cauchy and Schwarz). Tokens whose bound reaches the best token's
are a handful; only their scores are computed from the head itself. Where they are many (a flat distribution, values that are not finite),
all are. The copy takes half of the head's memory again.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..quant.kernels import Int8Weights
from ..quant.linear import Linear
from ..quant.products import multiplies_bf16, product
from .memory import SHARE, free_bytes
from .sampling import best

ROWS = range(2, 9)  # with one row, or more, the head's own product is as fast (49152 x 576, 2 cores of an EPYC with AVX2)
MOST_CANDIDATES = 1024  # gathering more rows than that costs as much
FEWEST_TOKENS = 8192  # of a vocabulary whose copy is worth making
AT_ONCE = 1 << 24  # weights that are rounded together
ROUNDING = 2.0**-7  # bf16, of the rough score and of the exact one

_made: WeakKeyDictionary[nn.Module, Screen] = WeakKeyDictionary()


class Screen:
    """Finds best tokens by an 8-bit copy of `head`'s weights first.

    Attributes:
        copy: the head in 8 bits. slack: float32 [vocab], the error of a rough score per length of the state.
    """

    def __init__(self, head: Linear) -> None:
        self.weight = head.weight
        vocab, hidden = self.weight.shape
        self.copy = Int8Weights(torch.empty(vocab, hidden, dtype=torch.int8), torch.empty(vocab), torch.bfloat16)
        self.slack = torch.empty(vocab)
        step = max(1, AT_ONCE // hidden)
        for start in range(0, vocab, step):
            part = slice(start, start + step)
            rows = self.weight.data[part].float()
            scales = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
            rows.div_(scales.float()[:, None])  # lengths in units of the scale neither vanish nor overflow
            levels = rows.round().clamp_(-127, 127)
            self.copy.levels[part], self.copy.scales[part] = levels.to(torch.int8), scales
            lost, length = torch.linalg.vector_norm(levels.sub_(rows), dim=1), torch.linalg.vector_norm(rows, dim=1)
            # the second term: what sums of `hidden` products in fp32 can be off, in either product
            self.slack[part] = scales * (lost + hidden * 2.0**-22 * length)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The best token after each state, int64 [...], ties to the lowest id. hidden: bf16 [..., width], normed."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        found = self._screened(rows) if rows.shape[0] in ROWS else None
        if found is None:
            found = best(product(rows, self.weight))
        return found.view(hidden.shape[:-1])

    def rough(self, rows: Tensor) -> Tensor:
        """Scores by the 8-bit copy, bf16 [n, vocab]."""
        return self.copy(rows.contiguous())

    def _screened(self, rows: Tensor) -> Tensor | None:
        """Best tokens int64 [n], or None where too many may be the best."""
        rough = self.rough(rows).float()
        length = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, keepdim=True)
        top, at = rough.max(1, keepdim=True)
        sure = top - top.abs() * ROUNDING - self.slack[at] * length  # the best score is no less
        reach = torch.add(rough, rough.abs(), alpha=ROUNDING).addcmul_(length, self.slack)  # no score is more
        candidates = (reach >= sure).any(0).nonzero()[:, 0]
        if len(candidates) > MOST_CANDIDATES or not bool(sure.isfinite().all()):
            return None
        return candidates[best(product(rows, self.weight.data[candidates]))]

    def nbytes(self) -> int:
        return self.copy.nbytes() + self.slack.nbytes


def screen(verifier: Any, reserved: int = 0) -> Screen | None:
    """The screen of `verifier`'s head, made once; None where the head's own product is as fast, its weights are not plain bf16, or memory
    is short.

    It is for processors where bf16 is slow (without AVX512). With bf16 instructions a head's product takes the time of reading it, whatever
    the rows: a screen takes 2.9, 3.1, 3.6 and 4.4 ms for 1 to 4 rows where the head takes 4.9 to 5.0 (49152 x 576, 2 cores, EPYC 9004).
    Plain decoding of the bundled pair would gain 18 percent, decoding with a draft 0 to 6, for half of the head in memory again. Four bits
    are too few for a screen: the bound leaves most tokens as candidates.

    Args:
        reserved: bytes that decoding needs besides.
    """
    head = getattr(verifier, "lm_head", None)
    if not isinstance(head, Linear) or head.kernel is not None or head.scheme is not None or head.bias is not None:
        return None
    weight = head.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.shape[0] < FEWEST_TOKENS or multiplies_bf16():
        return None
    found = _made.get(head)
    if found is None or found.weight is not weight:
        free = free_bytes(weight.device)
        if free is not None and reserved + weight.shape[0] * (weight.shape[1] + 6) > SHARE * free:
            return None
        found = _made[head] = Screen(head)
    return found

"""Is a speculative output the verifier's own greedy output? Compared token by token, and re-scored where it differs.

What enters: a verifier and two outputs for one prompt. What leaves: a `Comparison`. It does not know how the outputs were made.

Greedy speculative decoding promises the verifier's own output. In exact arithmetic that means equal ids. In bf16 a pass over several tokens
rounds otherwise than a pass over one, so two tokens with nearly equal logits may change places; from there on the outputs are different
texts, both greedy. Such a place counts as numeric only if the verifier alone, reading that very text in one pass, puts the emitted token
within a stated bound of its best. Every token after it is held to the same bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# In logits. bf16 keeps 8 bits: at the usual size of a winning logit, 16..32, neighbours lie 0.125 apart. Between a pass over the whole text
# and passes over 1 or 4 tokens, the margin of the two best moved by 0.375 at 1 % of 1,936 places of the bundled pairs, by 0.5 at most.
NEAR_TIE_BOUND = {torch.float32: 1e-3, torch.float16: 0.0625, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two outputs for one prompt.

    identical: the ids are equal. first_difference: index in the output where they part, None if nowhere. near_ties: places of the
    speculative output where the emitted token is not the verifier's best but within `bound` of it. largest_deficit: the most that any
    emitted token lacks to the verifier's best, in logits. Both are 0 for identical outputs. exact_ties: places of the speculative output
    whose best logit several tokens share, so that the rule (lowest id) decided. cut: one output is merely the beginning of the other, which
    no rounding explains. label: "identical"; "numeric": they part, and no emitted token lacks more than `bound`; "logic": anything else.
    """

    identical: bool
    first_difference: int | None
    near_ties: int
    largest_deficit: float
    exact_ties: int
    bound: float
    cut: bool = False

    @property
    def label(self) -> Literal["identical", "numeric", "logic"]:
        if self.identical:
            return "identical"
        return "numeric" if self.largest_deficit <= self.bound and not self.cut else "logic"

    @property
    def lossless(self) -> bool:
        return self.label != "logic"


def compare(
    verifier: Any,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    *,
    bound: float | None = None,
) -> Comparison:
    """Compare the ids of a plain (k=0) and a speculative output.

    Args:
        verifier: any that `decode.engine.Run` takes.
        bound: logits that a token may lack to the verifier's best; None is `NEAR_TIE_BOUND` of the verifier's dtype.
    """
    limit = NEAR_TIE_BOUND[verifier.dtype] if bound is None else bound
    if not speculative:
        return Comparison(not plain, None if not plain else 0, 0, 0.0, 0, limit, cut=bool(plain))
    deficits, ties = rescore(verifier, prompt_ids, speculative)
    if list(plain) == list(speculative):
        return Comparison(True, None, 0, 0.0, ties, limit)
    shorter = min(len(plain), len(speculative))
    first = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    near = int(((deficits > 0) & (deficits <= limit)).sum())
    return Comparison(False, first, near, float(deficits.max()), ties, limit, cut=first == shorter)


@torch.inference_mode()
def rescore(verifier: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[Tensor, int]:
    """How much each of `token_ids` lacks to the best logit at its place, float32 [n], where the verifier reads the text in one pass; and at
    how many of these places several tokens have that best logit."""
    tokens = torch.tensor([[*prompt_ids, *token_ids]], device=verifier.device)[:, :-1]
    length = tokens.shape[1]
    positions = torch.arange(length, device=verifier.device)[None]
    hidden, _ = verifier(tokens, verifier.step(positions, length), verifier.new_cache(length))
    logits = verifier.lm_head(hidden[0, len(prompt_ids) - 1 :]).float()  # [n, vocab]
    emitted = logits.gather(1, torch.tensor(list(token_ids), device=verifier.device)[:, None])[:, 0]
    best = logits.amax(1, keepdim=True)
    return (best[:, 0] - emitted).cpu(), int(((logits == best).sum(1) > 1).sum())

"""What the parts of a round take, each timed alone: a plain pass, a verifying pass, the draft's steps.

What enters: loaded models and k. What leaves: median seconds. It does not know prompts or acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..decode.draft import EagleDraft
from ..decode.greedy import screen
from ..decode.sampling import best
from ..decode.verify import verify
from ..models.decoder import Decoder
from ..models.eagle3 import Eagle3
from .cost_model import RoundCost
from .floor import median

CONTEXT = 128  # committed tokens before the timed pass


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Seconds of one pass over one new token (plain_s), over k + 1 (verify_s), and of the draft's part of a round (draft_s)."""

    k: int
    plain_s: float
    verify_s: float
    draft_s: float

    @property
    def cost(self) -> RoundCost:
        """The same in units of a plain pass."""
        return RoundCost(self.verify_s / self.plain_s, self.draft_s / self.plain_s)


@torch.inference_mode()
def round_seconds(verifier: Decoder, draft: Eagle3, k: int) -> RoundSeconds:
    """Time the parts of a round of a chain of k, behind `CONTEXT` tokens."""
    length = CONTEXT + 2 * (k + 2)
    device = verifier.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, verifier.config.vocab_size, (1, length), generator=generator).to(device)
    slots = torch.arange(length, device=device)[None]
    cache, aux_layers = verifier.new_cache(length), draft.aux_layers
    context, lengths = slots[:, :CONTEXT], torch.tensor([CONTEXT + 1], device=device)
    _, aux = verifier(ids[:, :CONTEXT], verifier.step(context, CONTEXT, causal=True), cache, aux_layers)
    chain = EagleDraft(draft)
    chain.begin(1, length)
    chain.extend(ids[:, 1 : CONTEXT + 1], aux, context, lengths - 2, 0, CONTEXT, True)
    pending, proposal = ids[:, CONTEXT : CONTEXT + 1], chain.propose(k, lengths, CONTEXT + 1)
    scored = verify(verifier, cache, pending, proposal, lengths, CONTEXT + 1, aux_layers)
    best_of = screen(verifier) or (lambda hidden: best(verifier.lm_head(hidden)))

    def draft_round() -> None:
        chain.propose(k, lengths, CONTEXT + 1)
        end = CONTEXT + k + 1
        chain.extend(ids[:, CONTEXT + 1 : end + 1], scored.aux, slots[:, CONTEXT:end], lengths * 0 + k, 0, end, False)

    plain = median(lambda: verify(verifier, cache, pending, None, lengths, CONTEXT + 1, (), best_of), device)
    whole = median(lambda: verify(verifier, cache, pending, proposal, lengths, CONTEXT + 1, aux_layers, best_of), device)
    return RoundSeconds(k, plain, whole, median(draft_round, device))

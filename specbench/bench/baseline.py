"""transformers' own greedy `generate`, timed like the decode loop: the speed that everybody has without this package.

What enters: a checkpoint; token ids. What leaves: the measured fields of a row. It does not know drafts, prompts or tables.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..checkpoint.hub import materialize
from ..pair import Checkpoint


class TransformersLoop:
    """A causal language model of transformers with its default cache and attention.

    Args:
        checkpoint: of a causal language model; hub files that are missing are fetched, the tokenizer's too.
        device: "auto" is CUDA where there is one, else the CPU.
        dtype: "auto" is the checkpoint's, else a torch dtype name.

    Nothing but greedy decoding is taken from the checkpoint's generation config: its EOS ids stay, penalties and sampling do not.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto") -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        materialize(checkpoint, tokenizer=True)
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype, trust_remote_code=False)
        self.model: Any = loaded.to(place).eval()
        eos = self.model.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        stop: Any = {"eos_token_id": sorted(self.eos_ids) or None, "pad_token_id": min(self.eos_ids, default=0)}
        self.model.generation_config = GenerationConfig(do_sample=False, num_beams=1, **stop)

    def decode(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Fields of a row, except draft, verify and other seconds. Tokens are counted as in the decode loop: an EOS is one of them."""
        context = self.model.config.max_position_embeddings
        room = min(max_new_tokens, context - len(ids))
        if room < 1:
            raise RuntimeError(f"the prompt has {len(ids)} tokens and the context {context}; nothing can follow")
        prompt = torch.tensor([ids], device=self.model.device)
        laps: list[float] = []

        def first_token(*_: Any, **__: Any) -> torch.Tensor:
            if not laps:
                laps.append(self._now())
            return torch.zeros(1, dtype=torch.bool, device=self.model.device)

        start = self._now()
        out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=room, stopping_criteria=[first_token])
        end = self._now()
        tokens = out[0, len(ids) :].tolist()
        finish = "eos" if tokens[-1] in self.eos_ids else "length" if room == max_new_tokens else "context"
        return {
            "accepted_per_round": [], "proposed_per_round": [], "token_ids": tokens, "finish_reason": finish,
            "prefill_s": laps[0] - start, "decode_s": end - laps[0], "total_s": end - start,
        }  # fmt: skip

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

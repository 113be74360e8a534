"""transformers' own greedy `generate`, timed like the decode loop: the speed that everybody has without this package.

Plain, or with its own assisted decoding: prompt lookup proposes what followed the last tokens earlier in the text.

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
        model: an already loaded one, in place of the checkpoint's (`TransformersLoop.model`).
        prompt_lookup: `prompt_lookup_num_tokens`, the most that a round proposes; 0 decodes plainly.

    Nothing but greedy decoding is taken from the checkpoint's generation config: its EOS ids stay, penalties and sampling do not.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto", *, model: Any = None, prompt_lookup: int = 0
    ) -> None:
        self.prompt_lookup = prompt_lookup
        self.model: Any = self._load(checkpoint, device, dtype) if model is None else model
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self.context = int(self.model.config.max_position_embeddings)

    @staticmethod
    def _load(checkpoint: Checkpoint, device: str, dtype: str) -> Any:
        from transformers import AutoModelForCausalLM, GenerationConfig

        materialize(checkpoint, tokenizer=True)
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype, trust_remote_code=False)
        model = loaded.to(place).eval()
        eos = model.generation_config.eos_token_id
        eos = model.config.eos_token_id if eos is None else eos
        ids = [eos] if isinstance(eos, int) else sorted(eos or ())
        stop: Any = {"eos_token_id": ids or None, "pad_token_id": min(ids, default=0)}
        model.generation_config = GenerationConfig(do_sample=False, num_beams=1, **stop)
        return model

    def decode(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Fields of a row, except draft, verify and other seconds. Tokens are counted as in the decode loop: an EOS is one of them.

        `ids` must leave room in the context. With prompt lookup the prompt pass proposes as well, and may bring several tokens: they count
        as output, not as a round, so decode speed is at most a few tokens too high.
        """
        room = min(max_new_tokens, self.context - len(ids))
        prompt = torch.tensor([ids], device=self.model.device)
        laps: list[float] = []
        lengths: list[int] = []  # of the whole sequence after each pass
        blocks: list[torch.Tensor] = []  # what each pass read; converted when the clock has stopped

        def after_a_pass(sequence: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if not laps:
                laps.append(self._now())
            lengths.append(sequence.shape[1])
            return torch.zeros(1, dtype=torch.bool, device=self.model.device)

        def before_a_pass(_: Any, args: Any, kwargs: Any) -> None:
            blocks.append(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

        options = {"prompt_lookup_num_tokens": self.prompt_lookup} if self.prompt_lookup else {}
        hook = self.model.register_forward_pre_hook(before_a_pass, with_kwargs=True) if self.prompt_lookup else None
        try:
            start = self._now()
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=room, stopping_criteria=[after_a_pass], **options
            )
            end = self._now()
        finally:
            if hook is not None:
                hook.remove()
        tokens = out[0, len(ids) :].tolist()
        finish = "eos" if tokens[-1] in self.eos_ids else "length" if room == max_new_tokens else "context"
        accepted, proposed = rounds([block[0].tolist() for block in blocks], lengths, out[0].tolist())
        return {
            "accepted_per_round": accepted, "proposed_per_round": proposed, "nodes_per_round": proposed, "token_ids": tokens,
            "finish_reason": finish, "prefill_s": laps[0] - start, "decode_s": end - laps[0], "total_s": end - start,
        }  # fmt: skip

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def rounds(blocks: list[list[int]], lengths: list[int], sequence: list[int]) -> tuple[list[int], list[int]]:
    """Accepted and proposed draft tokens of each round after the prompt pass; both empty where nothing was recorded.

    Args:
        blocks: the ids that each pass read: the last committed one and the proposals.
        lengths: of the sequence after each pass.
        sequence: the whole of it at the end.

    A round that the end cut counts the proposals up to the cut, as in the decode loop.
    """
    accepted, proposed = [], []
    for block, before, after in zip(blocks[1:], lengths, lengths[1:], strict=False):
        draft, emitted = block[1:], sequence[before:after]
        hits = next((i for i, (a, b) in enumerate(zip(draft, emitted, strict=False)) if a != b), min(len(draft), len(emitted)))
        accepted.append(hits)
        proposed.append(hits if hits == len(emitted) else len(draft))
    return accepted, proposed

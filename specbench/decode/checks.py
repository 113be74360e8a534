"""Refuse what cannot be decoded, before anything is allocated.

What enters: a verifier, a draft and requests. What leaves: nothing, or an error that says what was found and what expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .draft import EagleDraft

if TYPE_CHECKING:
    from .draft import Proposer
    from .request import Options, Request


def check(verifier: Any, proposer: Proposer | None, requests: Sequence[Request], options: Options, aux_layers: tuple[int, ...]) -> None:
    """Refuse what cannot be decoded.

    Raises:
        ConfigError: says what, and what was expected.
    """
    vocab, context, k = verifier.config.vocab_size, verifier.config.max_position_embeddings, options.num_speculative_tokens
    if not requests:
        raise ConfigError("there is no prompt; at least one is needed")
    for request in requests:
        ids = request.prompt_ids
        if len(ids) == 0:
            raise ConfigError("the prompt holds no token; at least one is needed")
        if min(ids) < 0 or max(ids) >= vocab:
            raise ConfigError(f"prompt ids run {min(ids)}..{max(ids)}; the verifier's vocabulary is 0..{vocab - 1}: wrong tokenizer?")
        if len(ids) >= context:
            raise ConfigError(f"the prompt has {len(ids)} tokens and the verifier's context {context}; nothing can follow")
        if k < 0 or request.max_new_tokens < 1:
            raise ConfigError(f"num_speculative_tokens is {k} and max_new_tokens {request.max_new_tokens}; at least 0 and 1 are expected")
        if request.logprobs is not None and not 0 <= request.logprobs <= vocab:
            raise ConfigError(f"logprobs is {request.logprobs}; expected None, or 0 to the verifier's vocabulary of {vocab}")
    if options.batch_size < 1:
        raise ConfigError(f"batch_size is {options.batch_size}; at least 1 is expected")
    if k and proposer is None:
        raise ConfigError(f"num_speculative_tokens is {k} but there is no draft; load one, or pass 0")
    if k and proposer is not None and proposer.width and not aux_layers:
        raise ConfigError("an EAGLE-3 draft reads auxiliary states of the verifier; pass aux_layers=draft.aux_layers")
    if options.draft_sampling not in ("greedy", "probabilistic"):
        raise ConfigError(f"draft_sampling is {options.draft_sampling!r}; expected 'greedy' or 'probabilistic'")
    if getattr(proposer, "p_min", 0) and (options.draft_sampling != "greedy" or options.graphs):
        raise ConfigError(
            f"draft_p_min is {getattr(proposer, 'p_min', 0)}: it ends chains of the draft's best tokens, by what the host reads; "
            f"draft_sampling must be 'greedy' (is {options.draft_sampling!r}) and graphs not True"
        )
    if k and isinstance(proposer, EagleDraft):
        _warn_of_devices(verifier, proposer)
    if getattr(proposer, "tree", None) is not None and (options.draft_sampling != "greedy" or options.adaptive):
        raise ConfigError("a tree proposes the draft's best tokens in one shape; draft_sampling must be 'greedy' and adaptive False")


def _warn_of_devices(verifier: Any, proposer: EagleDraft) -> None:
    """Output does not depend on it, but the gain does."""
    devices = {str(p.device) for name, p in proposer.draft.named_parameters() if not name.startswith("embed_tokens.")}
    if devices != {str(verifier.device)}:
        size = proposer.width * verifier.dtype.itemsize
        warnings.warn(
            f"the draft lies on {', '.join(sorted(devices))} and the verifier on {verifier.device}: every committed token takes {size} "
            "bytes of states from one to the other, and every proposal waits for it; load both on one device",
            stacklevel=4,
        )

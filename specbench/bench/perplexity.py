"""How well a verifier predicts a text: one number to set a quantized model beside its plain original.

What enters: a loaded decoder and lists of token ids. What leaves: their perplexity. It does not know text, files or quantization.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..errors import ConfigError
from ..models.decoder import Decoder

ROWS = 256  # positions whose logits are held at once, in fp32


@torch.inference_mode()
def perplexity(decoder: Decoder, token_ids: Iterable[Sequence[int]]) -> float:
    """exp of the mean negative log-likelihood of every token that has one before it in its own sequence.

    Each sequence is run alone, in one pass; the mean is over tokens, not sequences. Log-softmax is computed in fp32.

    Raises:
        ConfigError: no sequence of two tokens or more.
    """
    total, count = 0.0, 0
    for ids in token_ids:
        tokens = torch.tensor(list(ids), device=decoder.device)
        n = len(tokens)
        if n < 2:
            continue
        hidden, _ = decoder(tokens[None], decoder.step(torch.arange(n, device=decoder.device)[None], n), decoder.new_cache(n))
        for states, following in zip(hidden[0, :-1].split(ROWS), tokens[1:].split(ROWS), strict=True):
            log_probabilities = decoder.lm_head(states).float().log_softmax(-1)
            total -= log_probabilities.gather(1, following[:, None]).double().sum().item()
        count += n - 1
    if not count:
        raise ConfigError("perplexity needs a sequence of at least two tokens")
    return math.exp(total / count)

"""The bundled verifiers as the recipe uses them.

What enters: a name. What leaves: a loaded decoder. It does not know what it writes or reads.
"""

from __future__ import annotations

from specbench.bundled import bundled_verifier
from specbench.models.decoder import Decoder
from specbench.pair import Pair, open_checkpoint
from specbench.verifier import load_verifier


def load_bundled(name: str, device: str = "cpu") -> Decoder:
    """A bundled verifier that multiplies bf16 weights, dequantized where they are quantized."""
    checkpoint = open_checkpoint(bundled_verifier(name))
    return load_verifier(Pair(checkpoint, checkpoint), device=device, dtype="bfloat16", packed=False)

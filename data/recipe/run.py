"""The whole recipe: prompts, the verifier's answers, a second reading by the quantized verifier, training.

What enters: the bundled verifiers, and a folder for everything that is written on the way. What leaves: a trained draft in that folder.
Every part goes on where an interrupted run stopped; `data/draft` is not touched.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from export import AUX_LAYERS
from generate import write_text
from prompts import training_prompts
from states import reread
from train import Settings, Verifier, train

from specbench.bundled import bundled_verifier
from specbench.models.decoder import Decoder
from specbench.pair import Pair, open_checkpoint
from specbench.text import encode, load_tokenizer
from specbench.verifier import load_verifier

STAGES = (  # what the committed draft went through: see README.md
    Settings(epochs=1, matrix_lr=2e-3, first_step_only=0.4, hold=0.4, save_minutes=5),
    Settings(epochs=1, matrix_lr=2e-3, first_step_only=1.0, hold=0.99, warmup=10, save_minutes=5),
    Settings(epochs=1, matrix_lr=2e-3, first_step_only=0.4, hold=0.3, warmup=5, save_minutes=5),
)


def load(name: str) -> Decoder:
    """A bundled verifier that multiplies bf16 weights, dequantized where they are quantized."""
    checkpoint = open_checkpoint(bundled_verifier(name))
    return load_verifier(Pair(checkpoint, checkpoint), dtype="bfloat16", packed=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for text and training states; some GB")
    parser.add_argument("--conversations", type=int, default=3400, help="how many prompts are answered")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)

    verifier = load("bf16")
    tokenizer = load_tokenizer(verifier)
    encoded = [encode(tokenizer, p["prompt"]) for p in training_prompts()[: given.conversations]]
    text, quantized = given.work / "text", given.work / "text-w4a16"
    write_text(verifier, encoded, text, aux_layers=AUX_LAYERS, eos_ids=verifier.eos_ids)
    reread(load("w4a16"), text, quantized, aux_layers=AUX_LAYERS)

    weights, begin_from = Verifier(bundled_verifier("bf16")), None
    for number, settings in enumerate(STAGES, 1):
        out = given.work / f"stage-{number}"
        if not (out / "training.json").exists():
            train(weights, [text, quantized] if number == len(STAGES) else [text], out, settings, begin_from)
        begin_from = out


if __name__ == "__main__":
    main()

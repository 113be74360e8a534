"""Acceptance of a draft on the evaluation prompts by category, without decoding: rounds are followed along the verifier's own text.

What enters: a draft folder and a work folder, where the verifiers' greedy answers are kept between calls. What leaves: one JSON line for
each verifier. It does not know how the draft was trained; `sb.generate` gives the same rounds up to rounding of the verifier.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from corpus import Conversation, answer_counts, batches, load
from draft import Draft
from evaluate import conditional, foresight, walk
from export import AUX_LAYERS, load_weights, read_vocabulary
from generate import write_text
from invent import EVALUATION, evaluation_prompts
from torch import Tensor
from train import Settings, Verifier, new_draft
from verifiers import load_bundled

from specbench.bundled import bundled_verifier
from specbench.text import encode, load_tokenizer


def read_draft(folder: Path, verifier: Verifier, sample: list[Conversation]) -> tuple[Draft, Tensor]:
    """A finished draft and its vocabulary."""
    vocabulary = read_vocabulary(folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["transformer_layer_config"]["num_hidden_layers"]
    settings = Settings(warm=False, norm_before_residual=config["norm_before_residual"], num_hidden_layers=layers)
    draft = new_draft(verifier, settings, vocabulary, sample)
    load_weights(draft, folder)
    return draft, vocabulary


def by_category(
    draft: Draft, verifier: Verifier, vocabulary: Tensor, conversations: list[Conversation], categories: list[str], steps: int = 3
) -> dict[str, Any]:
    """Mean acceptance length over all rounds and over those of each category, conditional accuracies, share of tokens in reach."""
    found, ordered = [], []
    for group in batches(conversations, 16, "measure"):
        ordered += group
        found += foresight(draft, verifier.embedding, verifier.head, vocabulary, group, steps)
    rounds: dict[str, list[int]] = {name: [] for name in dict.fromkeys(categories)}
    for (hits, _), c in zip(found, ordered, strict=True):
        rounds[categories[c.prompt_id]] += walk(hits, c)
    counts = answer_counts(conversations, verifier.config["vocab_size"])
    every = [a for part in rounds.values() for a in part]
    return {
        "tau": round(1 + sum(every) / len(every), 3),
        **{name: round(1 + sum(part) / max(len(part), 1), 2) for name, part in rounds.items()},
        "conditional": [round(right / max(tried, 1), 3) for right, tried in conditional(found, ordered)],
        "covered": round(float(counts[vocabulary].sum() / counts.sum()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens at most")
    given = parser.parse_args()
    categories = [json.loads(line)["category"] for line in EVALUATION.read_text().splitlines()]
    for name in ("bf16", "w4a16"):
        folder = given.work / f"evaluation-{name}-{given.tokens}"
        if not folder.exists():
            writer = load_bundled(name)
            tokenizer = load_tokenizer(writer)
            encoded = [encode(tokenizer, prompt) for prompt in evaluation_prompts()]
            write_text(
                writer,
                encoded,
                folder,
                aux_layers=AUX_LAYERS,
                eos_ids=writer.eos_ids,
                max_new_tokens=given.tokens,
                batch=64,
                sampled_share=0.0,
            )
        conversations, verifier = load(folder), Verifier(bundled_verifier(name))
        draft, vocabulary = read_draft(given.draft, verifier, conversations)
        print(json.dumps({"verifier": name, **by_category(draft, verifier, vocabulary, conversations, categories)}), flush=True)


if __name__ == "__main__":
    main()

"""Our acceptance along the texts that another engine wrote: near ties make two engines write different texts, so this alone compares.

What enters: a file of `vllm_decode.py` or `llama_cpp_decode.py`, and the name of the bundled verifier it was made with. What leaves: one
JSON line. It does not run the engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from corpus import Conversation
from evaluate import foresight, walk
from export import AUX_LAYERS
from invent import EVALUATION
from measure import read_draft
from states import states_of
from train import Verifier
from verifiers import load_bundled

from specbench.bundled import bundled_verifier
from specbench.text import encode, load_tokenizer

ROWS = 8  # conversations read at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["bf16", "w4a16"])
    parser.add_argument("draft", type=Path)
    parser.add_argument("found", type=Path)
    given = parser.parse_args()
    theirs, decoder = json.loads(given.found.read_text()), load_bundled(given.name)
    tokenizer = load_tokenizer(decoder)
    turns = {row["question_id"]: row["turns"][0] for row in map(json.loads, EVALUATION.read_text().splitlines())}
    read: list[Conversation] = []
    for i in range(0, len(theirs["prompts"]), ROWS):
        group = []
        for number, answer in zip(theirs["prompts"][i : i + ROWS], theirs["token_ids"][i : i + ROWS], strict=True):
            prompt = encode(tokenizer, turns[number])
            group.append(Conversation(number, len(prompt), torch.tensor(prompt + answer, dtype=torch.int32), torch.zeros(1, 1)))
        states = states_of(decoder, group, AUX_LAYERS)
        read += [Conversation(c.prompt_id, c.prompt_length, c.tokens, s) for c, s in zip(group, states, strict=True)]
    verifier = Verifier(bundled_verifier(given.name))
    draft, vocabulary = read_draft(given.draft, verifier, read)
    rounds: list[int] = []
    for i in range(0, len(read), ROWS):
        group = read[i : i + ROWS]
        found = foresight(draft, verifier.embedding, verifier.head, vocabulary, group, 3)
        rounds += [a for (hits, _), c in zip(found, group, strict=True) for a in walk(hits, c)]
    ours, engine = 1 + sum(rounds) / len(rounds), 1 + theirs["accepted_tokens"] / theirs["drafts"]
    figures = {"engine": round(engine, 3), "ours": round(ours, 3), "ours_over_engine": round(ours / engine, 3)}
    print(json.dumps({"verifier": given.name, "prompts": len(read), **figures}))


if __name__ == "__main__":
    main()

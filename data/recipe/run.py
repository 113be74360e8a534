"""The whole recipe: prompts, the verifiers' answers, training. One script for a laptop's night or for a short lease of a GPU.

What enters: the bundled verifiers, and a folder for everything that is written on the way. What leaves: a trained draft and a manifest in
that folder. Every part goes on where an interrupted run stopped; `data/draft` is not touched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from average import average
from export import AUX_LAYERS, versions
from generate import write_text
from invent import invent
from prompts import training_prompts
from states import reread
from train import Settings, Verifier, train
from varied import varied_prompts
from verifiers import load_bundled

from specbench.bundled import bundled_verifier
from specbench.text import encode, load_tokenizer

FURTHER = Settings(
    epochs=4, minutes=33, matrix_lr=1e-3, head_lr=6e-4, hold=0.4, warmup=10, first_step_only=0.65, full_every=3, target_temperature=0.7,
    reachable_only=True, save_minutes=5,
)  # fmt: skip
STAGES = (  # what the committed draft went through, and on which text: see README.md
    (("templates",), Settings(epochs=1, matrix_lr=2e-3, first_step_only=0.4, hold=0.4, save_minutes=5)),
    (("templates",), Settings(epochs=1, matrix_lr=2e-3, first_step_only=1.0, hold=0.99, warmup=10, save_minutes=5)),
    (("templates", "templates-w4a16"), Settings(epochs=1, matrix_lr=2e-3, first_step_only=0.4, hold=0.3, warmup=5, save_minutes=5)),
    (
        ("own-bf16", "own-w4a16", "templates"),
        Settings(
            epochs=6, matrix_lr=1e-3, head_lr=6e-4, hold=0.4, warmup=10, first_step_only=0.65, full_every=3, target_temperature=0.7,
            reachable_only=True, save_minutes=6,
        ),
    ),
    (("further-bf16", "further-w4a16"), FURTHER),
    (("third-bf16", "third-w4a16"), replace(FURTHER, minutes=42)),
)  # fmt: skip
LAST = ("fourth-bf16", "fourth-w4a16"), replace(FURTHER, minutes=27, hold=0.5, average=0.25)  # once for each of `SEEDS`, a thread each
SEEDS = 1, 2
HARDEST = ("stem", "humanities", "extraction")  # what the draft foresees worst: twice as many of the further prompts


def within(minutes: float) -> Callable[[], bool]:
    """A clock that says when `minutes` from now are over."""
    end = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() > end


def digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def further_prompts(invented: Path, count: int, seed: int = 2) -> list[dict[str, str]]:
    """Invented prompts and `count` filled ones, those of `HARDEST` twice as often as the others, shuffled."""
    rng = random.Random(seed + 1)
    filled = varied_prompts(4 * count, seed=seed)
    categories = list(dict.fromkeys(row["category"] for row in filled))
    share = count // (len(categories) + len(HARDEST))
    rows = [json.loads(line) for line in invented.read_text().splitlines()]
    for category in categories:
        there = [row for row in filled if row["category"] == category]
        rows += rng.sample(there, min(share * (2 if category in HARDEST else 1), len(there)))
    rng.shuffle(rows)
    return rows


def write_answers(work: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All text of the recipe; returns prompt counts and hashes."""
    writers = {name: load_bundled(name, given.device) for name in ("bf16", "w4a16")}
    tokenizer = load_tokenizer(writers["bf16"])
    invented = invent(writers["bf16"], tokenizer, work / "invented", given.invented, batch=given.batch)
    templates = training_prompts()[: given.templates]
    rows = [json.loads(line) for line in invented.read_text().splitlines()] + varied_prompts(given.varied)
    random.Random(1).shuffle(rows)
    again = invent(writers["bf16"], tokenizer, work / "invented-2", given.invented, batch=given.batch, seed=7)
    further = further_prompts(again, given.further)
    once_more = invent(writers["bf16"], tokenizer, work / "invented-3", given.invented * 5 // 9, batch=given.batch, seed=11)
    third = further_prompts(once_more, given.third, seed=5)
    told = {}
    pieces = [
        ("templates", "bf16", templates, 220, 0.3, 0),
        ("own-bf16", "bf16", rows[::2], 150, 0.1, 0),
        ("own-w4a16", "w4a16", rows[1::2], 150, 0.1, 0),
        ("further-bf16", "bf16", further[::2], 150, 0.1, 0),
        ("further-w4a16", "w4a16", further[1::2], 150, 0.1, 0),
        ("third-bf16", "bf16", third[::2], 150, 0.1, 20),
        ("third-w4a16", "w4a16", third[1::2], 150, 0.1, 21),
    ]
    for name, seed in (("bf16", 31), ("w4a16", 32)):  # from here on invented prompts alone, each verifier its own
        fourth = invent(writers[name], tokenizer, work / f"invented-4-{name}", given.fourth, batch=given.batch, seed=seed)
        pieces.append((f"fourth-{name}", name, [json.loads(line) for line in fourth.read_text().splitlines()], 150, 0.1, seed))
    for folder, writer, chosen, tokens, sampled, seed in pieces:
        listed = work / f"{folder}.jsonl"
        listed.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        write_text(
            writers[writer],
            [encode(tokenizer, row["prompt"]) for row in chosen],
            work / folder,
            aux_layers=AUX_LAYERS,
            eos_ids=writers[writer].eos_ids,
            max_new_tokens=tokens,
            batch=given.batch,
            sampled_share=sampled,
            seed=seed,
            until=within(given.minutes),
        )
        told[folder] = {"prompts": len(chosen), "sha256": digest(listed), "writer": writer}
    reread(writers["w4a16"], work / "templates", work / "templates-w4a16", aux_layers=AUX_LAYERS, until=within(given.minutes))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for text and training states; some GB")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="conversations written side by side; 192 on a CPU, 768 on a GPU")
    parser.add_argument("--templates", type=int, default=3400, help="prompts of prompts.py that are answered")
    parser.add_argument("--varied", type=int, default=6400, help="prompts of varied.py that are made")
    parser.add_argument("--invented", type=int, default=3600, help="prompts that the verifier invents, twice, and fewer once more")
    parser.add_argument("--further", type=int, default=5225, help="prompts of varied.py for the fifth stage")
    parser.add_argument("--third", type=int, default=10_000, help="prompts of varied.py for the sixth, at most")
    parser.add_argument("--fourth", type=int, default=5500, help="prompts that each verifier invents for the seventh")
    parser.add_argument("--minutes", type=float, default=1e6, help="at most, for each piece of text and each stage of training")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    given.batch = given.batch or (768 if given.device.startswith("cuda") else 192)
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)

    started = time.time()
    told = write_answers(given.work, given)
    weights = Verifier(bundled_verifier("bf16"), given.device)

    def stage(name: str, folders: tuple[str, ...], settings: Settings, begin_from: Path | None) -> Path:
        out = given.work / name
        settings = replace(settings, minutes=min(settings.minutes, given.minutes))
        if not (out / "training.json").exists():
            train(weights, [given.work / folder for folder in folders], out, settings, begin_from)
        return out

    done: list[Path] = []
    for number, (folders, settings) in enumerate(STAGES, 1):
        done.append(stage(f"stage-{number}", folders, settings, done[-1] if done else None))
    average(done[-2:], given.work / "mean")
    last = [stage(f"stage-{len(STAGES) + 1}-{seed}", LAST[0], replace(LAST[1], seed=seed), given.work / "mean") for seed in SEEDS]
    average(last, given.work / "draft")
    manifest = {"text": told, "versions": versions(), "device": given.device, "seconds_of_this_call": round(time.time() - started)}
    (given.work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()

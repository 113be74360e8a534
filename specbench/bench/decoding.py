"""How fast decoding is, and where a round's time goes: `python -m specbench.bench.decoding`.

What enters: a pair, prompts, a plain verifier for transformers' own loop. What leaves: a table of figures and one JSON line; with `--out`,
a file with provenance. All arms go over the same prompts side by side, a fraction of a second each in turn (`turns`), and that is repeated;
ratios are taken within one repeat. EOS is ignored: every arm writes the same number of tokens. It knows no table of rows: for published
acceptance there is `runner`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..decode.draft import EagleDraft, Proposal
from ..decode.engine import Run
from ..decode.request import Options, Request
from ..models.decoder import Decoder
from ..models.eagle3 import Eagle3
from ..pair import Checkpoint, Pair
from ..text import Generations
from .atomic import write_json
from .floor import context_seconds, round_floor
from .prompts import Prompt, limit_per_category, load_prompts
from .provenance import provenance
from .turns import Work, take_turns

CONTEXTS = (128, 512, 1024, 2048, 4096)
VLLM_OVER_TRANSFORMERS = 42 / 24.5  # vLLM 0.32's CPU wheel in bf16 beside transformers, measured once on a machine of this kind
ASKED_TAU = 2.2
P_MIN = 0.5  # of the arms whose chains end in doubt; 0.3 to 0.6 are equally fast with the bundled pair
FLOORS = 8  # times that a floor is measured in a turn
DOUBTS = "_p_min"  # ends the names of arms whose chains do

Kind = Callable[[Eagle3], EagleDraft]
SURE: Kind = partial(EagleDraft, p_min=P_MIN)


class Adversary(EagleDraft):
    """A real draft at its real cost whose proposals are never right: each is one off."""

    def propose(self, count: int, lengths: Any, longest: int, settings: Any = None) -> Proposal:
        found = super().propose(count, lengths, longest, settings)
        return Proposal((found.tokens + 1) % self.draft.config.vocab_size, found.longest)


def measure(
    pair: Pair, prompts: Sequence[Prompt], *, baseline: Checkpoint | None, ks: Sequence[int], batches: Sequence[int], max_new_tokens: int,
    repeats: int, device: str = "auto", graphs: bool | None = None, contexts: Sequence[int] = CONTEXTS, small: Pair | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Every figure; see `figures` for their names."""
    from tqdm.auto import tqdm

    from ..load import load_draft
    from ..text import encode, load_tokenizer
    from ..verifier import load_verifier

    verifier = load_verifier(pair, device=device)
    drafts = {"": load_draft(pair, device=device, verifier=verifier)}
    if small is not None:
        drafts["_w8a16_draft"] = load_draft(small, device=device, verifier=verifier)
    fastest = list(drafts)[-1]
    tokenizer = load_tokenizer(verifier)
    ids = [encode(tokenizer, prompt.turns[0]) for prompt in prompts]
    arms: dict[str, Callable[[], Work]] = {}

    def arm(name: str, k: int, batch: int, adaptive: bool = False, proposer: Kind = EagleDraft, which: str = "") -> None:
        options = Options(k, batch, adaptive=adaptive, graphs=graphs)
        arms[name] = lambda: timed(verifier, drafts[which], proposer, ids, options, max_new_tokens)

    most = max(ks)
    free = EagleDraft if verifier.device.type == "cuda" and graphs is not False else SURE  # chains that end in doubt record no CUDA graphs
    arm("k0", 0, 1)
    arms["floor_k0"] = lambda: floor(verifier, None, 0)
    chains = {f"k{k}{which}": (k, which) for k in sorted({*ks} - {0}) for which in drafts}
    for name, (k, which) in chains.items():
        arm(name, k, 1, which=which)
        arms[f"floor_{name}"] = partial(floor, verifier, drafts[which], k)
    for which in drafts:
        arm(f"k{most}{which}{DOUBTS}", most, 1, proposer=SURE, which=which)
        arm(f"adaptive{which}", most, 1, adaptive=True, proposer=free, which=which)
    arm("adversary", most, 1, proposer=Adversary)
    arm("adaptive_adversary", most, 1, adaptive=True, proposer=Adversary)
    for batch in batches:
        arm(f"b{batch}_k0", 0, batch)
        arm(f"b{batch}_k{most}{fastest}", most, batch, which=fastest)
        arm(f"b{batch}_adaptive{fastest}", most, batch, adaptive=True, proposer=free, which=fastest)
    if baseline is not None:
        arms["transformers"] = _transformers(baseline, device, ids, max_new_tokens)
    rounds: list[dict[str, dict[str, float]]] = []
    with tqdm(total=(repeats + 1) * len(arms), desc="decoding", bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}") as bar:
        for _ in range(repeats + 1):
            rounds.append(take_turns({name: start() for name, start in arms.items()}, told=bar.update))
    result: dict[str, Any] = figures(rounds[1:], ks, batches)  # the first turn warms up
    k = chains[result["best_chain"]][0]
    result["context"] = context_seconds(verifier, k, [c for c in contexts if c + k + 2 <= verifier.config.max_position_embeddings])
    return result


def floor(verifier: Decoder, draft: Eagle3 | None, k: int) -> Work:
    """The matrix products of a round (`round_floor`, which is timed a few times): floor_ms, the median."""
    found = []
    for turn in range(FLOORS):
        found.append(1e3 * round_floor(verifier, draft, k))
        yield (turn + 1) / FLOORS
    return {"floor_ms": statistics.median(found)}


def timed(
    verifier: Decoder, draft: Eagle3, kind: Kind, ids: Sequence[list[int]], options: Options, max_new_tokens: int
) -> Work:
    """Decode all prompts once.

    Returns:
        tokens_per_s: all output over the seconds that it took, prompts included. decode_tokens_per_s: tokens after the first over decode
        time, a figure of batch 1. mean_acceptance_length. round_ms, draft_ms, verify_ms, other_ms: means over rounds. other_share: of
        decode time outside draft and verify. seconds.
    """
    requests = [Request(prompt, max_new_tokens, stop_ids=()) for prompt in ids]
    proposer = kind(draft) if options.num_speculative_tokens else None
    seconds, written, asked = -time.perf_counter(), 0, max_new_tokens * len(ids)
    run = Run(verifier, proposer, requests, options, draft.aux_layers)
    for update in run:
        seconds += time.perf_counter()
        written += len(update.token_ids)
        yield written / asked
        seconds -= time.perf_counter()
    seconds += time.perf_counter()
    made = Generations(tuple(run.generations()), [])
    timing, steps = made.timing, sum(map(len, made.accepted_per_round))
    tokens = sum(map(len, made.token_ids))
    return {
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": (tokens - len(made)) / timing.decode_s,
        "mean_acceptance_length": made.mean_acceptance_length if options.num_speculative_tokens else 1.0,
        "round_ms": 1e3 * (timing.draft_s + timing.verify_s + timing.other_s) / steps,
        "draft_ms": 1e3 * timing.draft_s / steps,
        "verify_ms": 1e3 * timing.verify_s / steps,
        "other_ms": 1e3 * timing.other_s / steps,
        "other_share": timing.other_s / timing.decode_s,
        "seconds": seconds,
    }


def _transformers(baseline: Checkpoint, device: str, ids: Sequence[list[int]], max_new_tokens: int) -> Callable[[], Work]:
    from .baseline import TransformersLoop

    loop = TransformersLoop(baseline, device)

    def decode() -> Work:
        rows = []
        for prompt in ids:
            rows.append(loop.decode(prompt, max_new_tokens))
            yield len(rows) / len(ids)
        return {"decode_tokens_per_s": sum(len(r["token_ids"]) - 1 for r in rows) / sum(r["decode_s"] for r in rows)}

    return decode


def figures(rounds: Sequence[dict[str, dict[str, float]]], ks: Sequence[int], batches: Sequence[int]) -> dict[str, Any]:
    """Medians over turns of every arm's figures, and ratios taken within a turn.

    Returns:
        the arms by name (those that end in `DOUBTS` end chains at `P_MIN`, and so do the adaptive ones unless they record CUDA graphs; the
        adversaries do not); the best one with best_over_k0, and best_chain, the best of those that propose k in every round;
        ratio_at_asked_tau, what the measured rounds of k = 3 would give at a mean acceptance length of 2.2; k0_over_transformers and
        k0_over_vllm (see `VLLM_OVER_TRANSFORMERS`); adaptive_over_k0 per draft, adversary_over_k0 and adaptive_adversary_over_k0;
        matmul_floor_ms and round_over_floor of k = 0 and the chains; per batch k0_over_batch_1 (all tokens over the seconds), and the
        others over k = 0.
    """
    result: dict[str, Any] = {
        arm: {name: statistics.median(turn[arm][name] for turn in rounds) for name in rounds[0][arm]}
        for arm in rounds[0]
        if not arm.startswith("floor_")
    }

    def ratio(above: str, below: str, name: str = "decode_tokens_per_s") -> float:
        return statistics.median(turn[above][name] / turn[below][name] for turn in rounds)

    def named(start: str) -> list[str]:
        return [name for name in rounds[0] if name.startswith(start)]

    over = {name: ratio(name, "k0") for name in named("k") if name != "k0"}
    best = max(over, key=lambda name: over[name])
    chains = [name for name in over if not name.endswith(DOUBTS)]
    best_chain = max(chains, key=lambda name: over[name])
    result |= {"best": best, "best_over_k0": over[best], "best_chain": best_chain, "over_k0": over}
    at = [name for name in chains if name.startswith("k3")] or [best_chain]  # k = 1 could never reach it
    result["ratio_at_asked_tau"] = {
        name: statistics.median(ASKED_TAU * turn["k0"]["round_ms"] / turn[name]["round_ms"] for turn in rounds) for name in at
    }
    result["adaptive_over_k0"] = {name: ratio(name, "k0") for name in named("adaptive") if name != "adaptive_adversary"}
    result["adversary_over_k0"] = ratio("adversary", "k0")
    result["adaptive_adversary_over_k0"] = ratio("adaptive_adversary", "k0")
    if "transformers" in result:
        result["k0_over_transformers"] = ratio("k0", "transformers")
        result["k0_over_vllm"] = result["k0_over_transformers"] / VLLM_OVER_TRANSFORMERS
    floors = {name: f"floor_{name}" for name in ("k0", *chains) if f"floor_{name}" in rounds[0]}
    result["matmul_floor_ms"] = {name: statistics.median(turn[below]["floor_ms"] for turn in rounds) for name, below in floors.items()}
    result["round_over_floor"] = {
        name: statistics.median(turn[name]["round_ms"] / turn[below]["floor_ms"] for turn in rounds) for name, below in floors.items()
    }
    result["batches"] = {}
    for batch in batches:
        plain = f"b{batch}_k0"
        others = {name: ratio(name, plain, "tokens_per_s") for name in named(f"b{batch}_") if name != plain}
        result["batches"][str(batch)] = {"k0_over_batch_1": ratio(plain, "k0", "tokens_per_s"), "over_k0": others}
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run from a shell; prints figures and one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m specbench.bench.decoding", description="How fast decoding is, and where time goes.")
    parser.add_argument("--pair", default="w4a16", help="bundled pair")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--batches", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--per-category", type=int, default=1, help="prompts of each of the eight categories")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--eager", action="store_true", help="record no CUDA graphs")
    parser.add_argument("--plain-draft", action="store_true", help="leave out the arms with an 8-bit copy of the draft")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file to write, with provenance")
    options = parser.parse_args(arguments)
    from ..bundled import bundled_pair
    from ..quantized_draft import quantized_copy

    pair = bundled_pair(options.pair)
    prompts = limit_per_category(load_prompts(), options.per_category)
    baseline = None if options.no_transformers else bundled_pair("bf16").verifier
    known = provenance(
        {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        {"verifier": pair.verifier, "draft": pair.draft}, prompts,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        small = None if options.plain_draft else quantized_copy(pair, Path(folder) / "draft-w8a16", "w8a16", edges=True)
        found = measure(
            pair, prompts, small=small, baseline=baseline, ks=options.k, batches=options.batches, max_new_tokens=options.max_new_tokens,
            repeats=options.repeats, device=options.device, graphs=False if options.eager else None,
        )  # fmt: skip
    for name, value in found.items():
        sys.stdout.write(f"{name:28} {_short(value)}\n")
    sys.stdout.write(json.dumps(found) + "\n")
    if options.out:
        write_json(options.out, {"provenance": known, "figures": found})
    return 0


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{k} {_short(v)}" for k, v in value.items())
    if isinstance(value, list):
        return " | ".join(_short(v) for v in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

"""Commands that load models: generate, bench, sweep.

What enters: words of a command line. What leaves: text, tables, run folders. The figures are those of the library.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_pair import Draft, DraftLoadConfig, DraftRevision, Json, LoadConfig, Revision, SpeculativeConfig, Verifier, opened, write_table
from .errors import ConfigError

Policy = Annotated[str, typer.Option(help="Whose rules the draft is loaded by.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda ...")]
Dtype = Annotated[str, typer.Option(help="auto is the verifier's own.")]
MinP = Annotated[float, typer.Option(help="0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divides scores of tokens seen; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Off scores of tokens written; 0 is off.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Off scores of tokens written, each time; 0 is off.")]
Shape = Annotated[tuple[int, int, int] | None, typer.Option(metavar="DEPTH TOP_K NODES", help="A draft tree instead of a chain.")]
SHOWN = ("engine", "k", "draft_shape", "batch_size", "temperature", "num_prompts", "num_failed", "mean_acceptance_length",
    "draft_acceptance_rate", "decode_tokens_per_second", "speedup", "speedup_low", "speedup_high")  # fmt: skip


def generate(
    verifier: Verifier,
    draft: Draft = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeat it for more. Without one, a line of input each.")
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", help="Draft tokens a round; 0 is the verifier alone.")
    ] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End with the token that completes this text; may be repeated.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Choose k for each round, up to the number given.")] = False,
    draft_p_min: Annotated[float, typer.Option(help="End a chain whose probability, to the draft, is below; 0 is off.")] = 0.0,
    tree: Shape = None,
    policy: Policy = "draft",
    device: Device = "auto",
    dtype: Dtype = "auto",
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    speculative_config: SpeculativeConfig = None,
    load_config: LoadConfig = None,
    draft_load_config: DraftLoadConfig = None,
    as_json: Json = False,
) -> None:
    """Answer prompts with speculative decoding; the text is the verifier's own, figures go to stderr."""
    from .load import load_draft
    from .text import generate as decode
    from .verifier import load_verifier

    prompts = prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ConfigError("no prompt was given; use --prompt, or write one a line to standard input")
    pair = opened(verifier, draft, revision, draft_revision, speculative_config, load_config, draft_load_config)
    target = load_verifier(pair, device=device, dtype=dtype)
    drafting = num_speculative_tokens > 0
    loaded = load_draft(pair, policy, device=device, dtype=dtype, verifier=target) if drafting else None
    out = decode(
        target, loaded, prompts, num_speculative_tokens=num_speculative_tokens, max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, seed=seed, stop=stop or (), batch_size=batch_size, adaptive=adaptive, draft_p_min=draft_p_min,
        tree=tree,
    )  # fmt: skip
    figures: dict[str, Any] = {
        "mean_acceptance_length": out.mean_acceptance_length if drafting else None, "acceptance_per_position": out.acceptance_per_position,
        "timing": asdict(out.timing),
    }  # fmt: skip
    if as_json:
        names = ("token_ids", "accepted_per_round", "proposed_per_round", "finish_reason")
        answers = [
            {"prompt": asked, "text": text, **{name: getattr(one, name) for name in names}}
            for asked, text, one in zip(prompts, out.text, out, strict=True)
        ]
        typer.echo(json.dumps({"answers": answers, **figures}, indent=2))
        return
    for text in out.text:
        typer.echo(text)
    tokens = sum(map(len, out.token_ids))
    said = f", mean acceptance length {out.mean_acceptance_length:.2f}" if drafting else ""
    typer.echo(f"{tokens} tokens, {tokens / max(out.timing.decode_s, 1e-9):.1f} a second in decoding{said}", err=True)


def bench(
    verifier: Verifier,
    draft: Draft = None,
    prompts: Annotated[str | None, typer.Option(help="Shipped prompt set, or a jsonl file; default: the shipped one.")] = None,
    prompts_per_category: Annotated[int | None, typer.Option(help="At most so many of each category.")] = None,
    num_speculative_tokens: Annotated[
        list[int] | None, typer.Option("--num-speculative-tokens", "-k", help="k; repeat it. Default: 0, 1, 3, 5.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Sequences at a time; repeat it.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy; repeat it.")] = None,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    draft_p_min: Annotated[list[float] | None, typer.Option(help="End chains whose probability is below; 0 is off; repeat it.")] = None,
    adaptive: Annotated[list[int] | None, typer.Option(metavar="K", help="Choose k for each round, up to this; repeat it.")] = None,
    tree: Shape = None,
    repeats: Annotated[int, typer.Option(help="Of everything, for the spread of times.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per turn.")] = 128,
    policy: Policy = "draft",
    device: Device = "auto",
    dtype: Dtype = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Folder for the rows; a new one below data/runs by default.")] = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    speculative_config: SpeculativeConfig = None,
    load_config: LoadConfig = None,
    draft_load_config: DraftLoadConfig = None,
    as_json: Json = False,
) -> None:
    """Measure acceptance and speed against k = 0 of the same run; every row is kept in the run folder."""
    from .bench.prompts import limit_per_category, load_prompts
    from .bench.records import new_run
    from .bench.runner import benchmark
    from .bench.session import runs_root
    from .bench.summary import summarize

    pair = opened(verifier, draft, revision, draft_revision, speculative_config, load_config, draft_load_config)
    asked: Any = prompts
    if prompts_per_category is not None:
        asked = limit_per_category(load_prompts(prompts or "specbench"), prompts_per_category)
    folder = run_dir or new_run(runs_root(), "benchmark")
    table = benchmark(
        pair, asked, num_speculative_tokens or (0, 1, 3, 5), adaptive=adaptive or (), draft_p_min=draft_p_min or 0.0,
        trees=[tree] if tree else (), batch_size=batch_size or 1, temperature=temperature or 0.0, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed,
        repeats=repeats, max_new_tokens=max_new_tokens, policy=policy, device=device, dtype=dtype, run_dir=folder,
    )  # fmt: skip
    figures = summarize(table)
    write_table(figures if as_json else figures[[name for name in SHOWN if name in figures]], as_json)
    typer.echo(f"rows: {folder}", err=True)
    if len(table) and bool((table.status == "failed").any()):
        raise typer.Exit(1)


def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file: a notebook and the grid of its parameters (YAML).")],
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; default: the file's, else one per GPU.")] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Run on this Ray cluster.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for the runs; default: the file's.")] = None,
    as_json: Json = False,
) -> None:
    """Run a notebook over a grid of parameters; what lies there complete is not run again."""
    from .bench.sweep import sweep_file

    table = sweep_file(file, jobs=jobs, ray=ray, run_dir=run_dir, progress=not as_json)
    write_table(table, as_json)
    if len(table) and bool((table.status != "complete").any()):
        raise typer.Exit(1)

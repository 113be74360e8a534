"""`specbench` in a shell: the library's calls under their own names.

What enters: a command line. What leaves: text or JSON, and an exit code. No command decides anything that the library does not; heavy
packages are imported by the command that needs them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from . import __version__
from .cli_group import Group
from .cli_pair import (
    Draft,
    DraftLoadConfig,
    DraftRevision,
    Json,
    LoadConfig,
    Override,
    Revision,
    SpeculativeConfig,
    Verifier,
    named,
    opened,
    overrides_of,
    write_table,
)
from .cli_runs import bench, generate, sweep
from .errors import ConfigError

app = typer.Typer(
    name="specbench", cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="A workbench for EAGLE-3 speculative decoding beside quantized verifiers.",
)  # fmt: skip
PAIR_EXAMPLE = "RedHatAI/Qwen3-8B-quantized.w4a16 RedHatAI/Qwen3-8B-speculator.eagle3"


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def main_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from. May stand anywhere.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")] = False,
) -> None:
    """A workbench for EAGLE-3 speculative decoding beside quantized verifiers."""


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"`{line}`" for line in lines)


@app.command(
    epilog=_examples(
        f"specbench doctor {PAIR_EXAMPLE}",
        "specbench doctor bundled:w4a16 --engine vllm==0.11.0",
        "specbench doctor ./verifier ./draft --json --fail-on warning",
        "specbench doctor --explain quantization-from-verifier",
    )
)
def doctor(
    verifier: Annotated[str | None, typer.Argument(help="Folder, hub id, or bundled:NAME.")] = None,
    draft: Draft = None,
    engine: Annotated[str | None, typer.Option(help="Ask about one engine: vllm==0.11.0, sglang, eagle, or a policy's name.")] = None,
    values: Annotated[bool, typer.Option("--values", help="Also read d2t, t2d and some embedding rows.")] = False,
    fail_on: Annotated[str, typer.Option(help="Lowest severity that ends with 1: info, warning or error.")] = "error",
    explain: Annotated[str | None, typer.Option(metavar="CODE", help="Print what is known about a code.")] = None,
    short: Annotated[bool, typer.Option("--short", help="The table alone.")] = False,
    override: Override = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    speculative_config: SpeculativeConfig = None,
    load_config: LoadConfig = None,
    draft_load_config: DraftLoadConfig = None,
    as_json: Json = False,
) -> None:
    """Say who will fail with a pair, how, and what to do: from configs and tensor headers, before any GPU time is spent.

    Ends with 0 if nothing was found, 1 if something at or above --fail-on was, 2 if the pair could not be read.
    """
    from .doctor.pages import explain as explained

    if explain is not None:
        page = explained(explain)
        typer.echo(json.dumps(asdict(page), indent=2) if as_json else str(page))
        return
    if verifier is None:
        raise ConfigError("no verifier was named; `specbench doctor VERIFIER DRAFT`, or --explain CODE")
    from .doctor.diagnosis import diagnose
    from .doctor.findings import SEVERITIES
    from .doctor.show import report_text

    if fail_on not in SEVERITIES:
        raise ConfigError(f"--fail-on is {fail_on!r}; {', '.join(SEVERITIES)} are expected")
    source, other, options = named(verifier, draft, revision, draft_revision, speculative_config, load_config, draft_load_config)
    report = diagnose(source, other, engine=engine, values=values, overrides=overrides_of(override), **options)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        typer.echo(report_text(report, shutil.get_terminal_size((100, 24)).columns, details=not short))
    raise typer.Exit(report.exit_code(fail_on))


@app.command(epilog=_examples(f"specbench plan {PAIR_EXAMPLE}", "specbench plan bundled:w4a16 --diff draft vllm-0.11.0"))
def plan(
    verifier: Verifier,
    draft: Draft = None,
    policy: Annotated[str, typer.Option(help="Whose rules: draft, vllm-0.11.0, vllm-0.32.0-mrv2, sglang, eagle ...")] = "draft",
    diff: Annotated[tuple[str, str] | None, typer.Option(metavar="A B", help="What differs between two policies.")] = None,
    override: Override = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    speculative_config: SpeculativeConfig = None,
    load_config: LoadConfig = None,
    draft_load_config: DraftLoadConfig = None,
    as_json: Json = False,
) -> None:
    """Every draft setting: its value, where it comes from, what the verifier says, and what may cost acceptance."""
    from .plan import resolve

    pair = opened(verifier, draft, revision, draft_revision, speculative_config, load_config, draft_load_config)
    decided = overrides_of(override)
    if diff is not None:
        first, second = (resolve(pair, name, decided) for name in diff)
        frame = first.diff(second)
        write_table(frame, as_json)
        if not len(frame) and not as_json:
            typer.echo(f"no setting differs between {diff[0]} and {diff[1]}")
        return
    resolved = resolve(pair, policy, decided)
    write_table(resolved.to_frame(), as_json)
    for warning in resolved.warnings if not as_json else ():
        typer.echo(f"warning: {warning}", err=True)


@app.command(epilog=_examples("specbench reproduce bundled:w4a16", f"specbench reproduce {PAIR_EXAMPLE} --policy vllm-0.30.0-mrv2"))
def reproduce(
    verifier: Verifier,
    draft: Draft = None,
    policy: Annotated[str, typer.Option(help="The engine whose rules are followed.")] = "vllm-0.11.0",
    device: Annotated[str, typer.Option(help="cpu, cuda ...")] = "cpu",
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    speculative_config: SpeculativeConfig = None,
    load_config: LoadConfig = None,
    draft_load_config: DraftLoadConfig = None,
    as_json: Json = False,
) -> None:
    """Load the draft by an engine's rules, and show how that ends."""
    from .reproduce import attempt_load

    pair = opened(verifier, draft, revision, draft_revision, speculative_config, load_config, draft_load_config)
    outcome = attempt_load(pair, policy, device=device)
    if as_json:
        typer.echo(json.dumps(asdict(outcome), indent=2))
    elif outcome.loaded:
        typer.echo(f"loads under {outcome.policy}: draft {outcome.draft} beside a verifier stored as {outcome.verifier_quantization}")
    else:
        write_table(outcome.to_frame(), as_json, widest=None)


@app.command(epilog=_examples(f"specbench command {PAIR_EXAMPLE}", "specbench command bundled:w4a16 --engine sglang -k 5"))
def command(
    verifier: Verifier,
    draft: Draft = None,
    engine: Annotated[str, typer.Option(help="vllm, vllm-0.11.0, sglang or trtllm.")] = "vllm",
    num_speculative_tokens: Annotated[int | None, typer.Option("--num-speculative-tokens", "-k", help="Draft tokens a round.")] = None,
    override: Override = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
    speculative_config: SpeculativeConfig = None,
    load_config: LoadConfig = None,
    draft_load_config: DraftLoadConfig = None,
) -> None:
    """The command that starts a serving engine on the pair, with what it cannot express as comments."""
    from .plan import resolve

    pair = opened(verifier, draft, revision, draft_revision, speculative_config, load_config, draft_load_config)
    typer.echo(resolve(pair, overrides=overrides_of(override)).command(engine, num_speculative_tokens))


@app.command(epilog=_examples("specbench bundled", "specbench bundled w4a16"))
def bundled(
    name: Annotated[str | None, typer.Argument(help="Build this verifier, and print its folder and the draft's.")] = None,
) -> None:
    """List the pairs that work without a GPU or a model hub, or build one."""
    from .build_once import cache_folder
    from .bundled import VERIFIERS, bundled_pair

    if name is None:
        for known, verifier in VERIFIERS.items():
            there = (cache_folder() / verifier.folder).is_dir()
            typer.echo(f"bundled:{known:<12}{cache_folder() / verifier.folder if there else 'not built yet'}")
        return
    pair = bundled_pair(name)
    typer.echo(f"{pair.verifier.path}\n{pair.draft.path}")


RUNS: dict[Callable[..., None], tuple[str, ...]] = {
    generate: (
        "specbench generate bundled:w4a16 --prompt 'Why is the sky blue?'",
        "specbench generate bundled:bf16 -k 5 --json < prompts.txt",
    ),
    bench: ("specbench bench bundled:w4a16 -k 0 -k 3 --max-new-tokens 64", f"specbench bench {PAIR_EXAMPLE} -k 0 -k 1 -k 3 --repeats 3"),
    sweep: ("specbench sweep sweep.yaml --jobs 2",),
}
for run, lines in RUNS.items():
    app.command(epilog=_examples(*lines))(run)


def main() -> None:
    """The entry point `specbench`."""
    app()


if __name__ == "__main__":
    main()

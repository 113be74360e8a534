"""What the commands share: how a pair is named in a shell, and how tables are written.

What enters: words of a command line. What leaves: pairs, parsed JSON, text. It knows no command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from .pair import Pair

BUNDLED = "bundled:"
Verifier = Annotated[str, typer.Argument(help="Folder, hub id, or bundled:NAME (see `specbench bundled`).")]
Draft = Annotated[str | None, typer.Argument(help="EAGLE-3 draft: folder or hub id. bundled:NAME brings its own.")]
Revision = Annotated[str | None, typer.Option(help="Commit, tag or branch of the verifier.")]
DraftRevision = Annotated[str | None, typer.Option(help="The same of the draft.")]
SpeculativeConfig = Annotated[str | None, typer.Option(help="vLLM's speculative_config as JSON; its model stands in for DRAFT.")]
LoadConfig = Annotated[str | None, typer.Option(help="How the verifier's weights are read, as JSON (vLLM's LoadConfig).")]
DraftLoadConfig = Annotated[str | None, typer.Option(help="The same for the draft.")]
Override = Annotated[list[str] | None, typer.Option("--override", help="NAME=VALUE decided instead of the files, e.g. rope_theta=1e6.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def named(
    verifier: str, draft: str | None, revision: str | None, draft_revision: str | None, speculative: str | None, load: str | None,
    draft_load: str | None,
) -> tuple[Any, str | None, dict[str, Any]]:  # fmt: skip
    """The verifier (a folder for a bundled one), the draft, and the options of `open_pair` that were given."""
    if draft is None and speculative is None and verifier.startswith(BUNDLED):
        from .bundled import bundled_pair

        pair = bundled_pair(verifier.removeprefix(BUNDLED))
        verifier, draft = str(pair.verifier.path), str(pair.draft.path)
    elif verifier.startswith(BUNDLED):
        from .bundled import bundled_verifier

        verifier = str(bundled_verifier(verifier.removeprefix(BUNDLED)))
    options = {
        "revision": revision, "draft_revision": draft_revision, "speculative_config": speculative,
        "load_config": parsed(load, "load-config"), "draft_load_config": parsed(draft_load, "draft-load-config"),
    }  # fmt: skip
    return verifier, draft, {name: value for name, value in options.items() if value is not None}


def opened(*words: Any) -> Pair:
    """The pair that `named` names."""
    from .pair import open_pair

    verifier, draft, options = named(*words)
    return open_pair(verifier, draft, **options)


def parsed(text: str | None, option: str) -> Any:
    """JSON of an option.

    Raises:
        ConfigError: it is none.
    """
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--{option} is {text!r}, which is no JSON ({error})") from None


def overrides_of(pairs: Sequence[str] | None) -> dict[str, Any]:
    """{"rope_theta": 1e6} from ["rope_theta=1e6"]; a value that is no JSON is a text.

    Raises:
        ConfigError: no "=".
    """
    found = {}
    for text in pairs or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--override {text!r} has no '='; NAME=VALUE is expected")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def write_table(frame: pd.DataFrame, as_json: bool, widest: int | None = 80) -> None:
    """A table for people, its columns at most `widest` characters, or its rows as JSON."""
    if as_json:
        typer.echo(frame.to_json(orient="records", indent=2, default_handler=str))
    elif len(frame):
        typer.echo(frame.to_string(index=False, max_colwidth=widest, float_format="{:.3f}".format, na_rep=""))

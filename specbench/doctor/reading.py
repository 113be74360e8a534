"""Open both sides of a pair, and turn what cannot be read into findings.

What enters: folders or hub ids. What leaves: a pair, or the reasons why there is none. It does not judge what was read, beyond keys that
stand twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.hub import HubTensors
from ..checkpoint.load_config import parse_load_config
from ..errors import SpecbenchError
from ..pair import Checkpoint, Pair, open_checkpoint, open_pair
from ..speculative import parse_speculative_config
from .findings import Finding
from .rules import refusal
from .subject import SIDES, finding

CONFLICT = "options-conflict"  # both sides can be read, but not with these options


def read_pair(verifier: str | Path, draft: str | Path | None, options: Mapping[str, Any]) -> tuple[Pair | None, list[Finding]]:
    """The pair, or None and a finding for each side that cannot be read. `options`: further arguments of `open_pair`.

    Raises:
        ConfigError: an option that says something impossible; that is no matter of files.
    """
    config = parse_speculative_config(options.get("speculative_config"))
    for name in ("load_config", "draft_load_config"):
        parse_load_config(options.get(name), name)
    try:
        return open_pair(verifier, draft, **options), []
    except SpecbenchError as error:
        first = error
    found = []
    revisions = options.get("revision"), options.get("draft_revision", config.revision)
    for side, source, revision in zip(SIDES, (verifier, draft or config.model), revisions, strict=True):
        if source is None or first.code == "no-draft":
            continue
        try:
            open_checkpoint(source, revision)
        except SpecbenchError as error:
            found.append(refusal(error, lambda place, side=side: f"{side} {place}", "damaged-file"))  # type: ignore[misc]
    return None, found or [refusal(first, fallback=CONFLICT)]


def duplicate_keys(pair: Pair) -> Iterator[Finding]:
    """Keys that stand twice in one object of a config: readers take the last, people the first."""
    for side in SIDES:
        checkpoint: Checkpoint = getattr(pair, side)
        twice: list[str] = []

        def once(pairs: list[tuple[str, Any]], twice: list[str] = twice) -> dict[str, Any]:
            seen = dict(pairs)
            if len(seen) != len(pairs):
                names = [name for name, _ in pairs]
                twice.extend(name for name in seen if names.count(name) > 1)
            return seen

        json.loads((checkpoint.path / "config.json").read_bytes(), object_pairs_hook=once)
        if twice:
            sentence = f"{side} config.json has {twice[0]!r} twice in one object; the last one counts"
            yield finding("duplicate-keys", sentence, {f"{side} config.json: {name}": "twice" for name in twice[:5]})


def headers_at_hand(checkpoint: Checkpoint) -> bool:
    """Whether looking at every header costs no request."""
    return not isinstance(checkpoint.tensors, HubTensors) or checkpoint.tensors.read_whole

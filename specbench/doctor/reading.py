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
from ..errors import SpecbenchError
from ..pair import Checkpoint, Pair, open_checkpoint, open_pair
from .findings import Finding
from .rules import refusal
from .subject import SIDES, finding


def read_pair(verifier: str | Path, draft: str | Path | None, options: Mapping[str, Any]) -> tuple[Pair | None, list[Finding]]:
    """The pair, or None and a finding for each side that cannot be read. `options`: further arguments of `open_pair`."""
    try:
        return open_pair(verifier, draft, **options), []
    except SpecbenchError as error:
        first = error
    found = []
    for side, source, revision in (("verifier", verifier, options.get("revision")), ("draft", draft, options.get("draft_revision"))):
        if source is None or first.code == "no-draft":
            continue
        try:
            open_checkpoint(source, revision)
        except SpecbenchError as error:
            found.append(refusal(error, lambda place, side=side: f"{side} {place}", "damaged-file"))  # type: ignore[misc]
    return None, found or [refusal(first, fallback="config-value")]


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

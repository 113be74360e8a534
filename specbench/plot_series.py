"""The lines of a figure: which verifiers under which conditions a summary holds, how each is called and coloured.

What enters: a summary. What leaves: `Series`, in a fixed order. It does not know what is drawn of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .bench.summary import CONDITIONS
from .plot_style import FORMAT_COLOURS, MARKERS, SERIES_COLOURS, SPARE_COLOURS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Series:
    """One verifier in one format under one set of conditions: its rows of a summary and how it is drawn."""

    label: str
    rows: pd.DataFrame
    colour: str
    marker: str
    offset: float  # -0.5 .. 0.5, keeps intervals at the same place apart


def series_of(summary: pd.DataFrame, spread: float) -> list[Series]:
    """Verifiers of a summary, under each set of conditions, in a fixed order, their offsets `spread` wide together."""
    varied = [name for name in CONDITIONS if name in summary.columns and summary[name].nunique(dropna=False) > 1]
    columns = ["verifier", "verifier_format", *varied]
    keys = sorted(
        {tuple(row) for row in summary[columns].itertuples(index=False, name=None)}, key=lambda key: (key[1], key[0], str(key[2:]))
    )
    verifiers = sorted({key[:2] for key in keys})
    formats = sorted({name for _, name in verifiers})
    by_format = len(formats) == len(verifiers) and common_model(verifier for verifier, _ in verifiers) is not None
    taken = {FORMAT_COLOURS.get(name) for name in formats}
    spare = itertools.cycle([colour for colour in SPARE_COLOURS if colour not in taken])
    colours = {name: FORMAT_COLOURS.get(name) or next(spare) for name in formats}
    drawn = []
    for i, key in enumerate(keys):
        verifier, name, *conditions = key
        label = name if by_format else f"{PurePath(verifier).name}, {name}"
        words = [condition(*pair) for pair in zip(varied, conditions, strict=True)]
        offset = spread * (i / (len(keys) - 1) - 0.5) if len(keys) > 1 else 0.0
        # Conditions of one format are told apart by colours of their own, in the order of the palette.
        colour = colours[name] if len(keys) == len(verifiers) else SERIES_COLOURS[i % len(SERIES_COLOURS)]
        rows = summary[[_same(row, key) for row in summary[columns].itertuples(index=False, name=None)]]
        drawn.append(Series(", ".join([label, *filter(None, words)]), rows, colour, MARKERS[i % len(MARKERS)], offset))
    return drawn


def condition(name: str, value: Any) -> str:
    """A condition in a legend or sentence: "batch 4", "T = 0.7", "chain", ...; "" where it has no value."""
    if value is None or value != value or value == "":
        return ""
    forms = {"batch_size": "batch {}", "temperature": "T = {:g}", "policy": "policy {}", "draft_p_min": "p_min {:g}"}
    forms |= dict.fromkeys(("draft_shape", "proposer"), "{}")
    return forms.get(name, name.replace("_", " ") + " {}").format(value)


def _same(row: tuple[Any, ...], key: tuple[Any, ...]) -> bool:
    """Equal, missing values counted as equal."""
    return all(a == b or (a != a and b != b) for a, b in zip(row, key, strict=True))


def common_model(verifiers: Iterable[str]) -> str | None:
    """The name that variants of one model share: "Qwen3-8B" of "Qwen3-8B" and "Qwen3-8B-quantized.w4a16"; None of unrelated ones."""
    names = sorted({PurePath(verifier).name for verifier in verifiers}, key=len)
    return names[0] if names and all(name.lower().startswith(names[0].lower()) for name in names) else None

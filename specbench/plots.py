"""Figures of benchmark tables: a table in, matplotlib Axes out.

What enters: a table with the columns of `bench.records.Row` (from `benchmark` or `load_runs`), and optionally the Axes to draw on. What leaves: those
Axes, labelled, with units, the baseline, intervals and a caption that says what was averaged over how many prompts. It measures nothing,
shows nothing and keeps no state; every figure redraws from a stored table alone.
"""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from .bench import DataError
from .bench.atomic import write_bytes
from .bench.summary import BY, per_position_rates, summarize

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

# Okabe and Ito's palette: told apart with every common kind of colour vision.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, DARK = "#8C8C8C", "#4D4D4D"
FORMAT_COLOURS = {
    "bf16": BLUE, "w4a16": VERMILION, "w8a16": ORANGE, "w8a8": PURPLE, "fp8": GREEN, "fp16": SKY, "fp32": BLACK,
}  # fmt: skip
PART_COLOURS = {"draft": ORANGE, "verify": SKY, "other": "#BBBBBB"}
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
STYLE: dict[str, Any] = {
    "figure.figsize": (6.6, 4.4),
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.8,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6.5,
    "errorbar.capsize": 3,
    "svg.hashsalt": "specbench",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One verifier in one format: its rows of a summary and how it is drawn."""

    label: str
    rows: pd.DataFrame
    colour: str
    marker: str
    offset: float  # -0.5 .. 0.5, keeps intervals at the same place apart


def _styled(draw: Callable[Concatenate[pd.DataFrame, Axes, P], None]) -> Callable[Concatenate[pd.DataFrame, P], Axes]:
    """Give a drawing function its optional `ax`, the style, and the Axes as result."""

    @functools.wraps(draw)
    def styled(table: pd.DataFrame, *args: P.args, **kwargs: P.kwargs) -> Axes:
        from matplotlib import pyplot

        ax: Any = kwargs.pop("ax", None)
        with pyplot.rc_context(STYLE):
            if ax is None:
                _, ax = pyplot.subplots()
            draw(table, ax, *args, **kwargs)
        result: Axes = ax
        return result

    return styled

"""How every figure looks: palette, fonts, where legend and caption stand, and how it is written to files.

What enters: Axes and texts. What leaves: the Axes in the style, or image files. It does not know tables or what is drawn.
"""

from __future__ import annotations

import contextlib
import functools
import io
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench.atomic import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every common kind of colour vision.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
DARK = "#4D4D4D"
FORMAT_COLOURS = {
    "bf16": BLUE, "w4a16": VERMILION, "w4a16-asym": ORANGE, "w8a16": SKY, "w8a8": PURPLE, "fp8": GREEN, "nvfp4a16": BLACK,
}  # fmt: skip
SPARE_COLOURS = [BLACK, PURPLE, GREEN, ORANGE, SKY, BLUE, VERMILION, YELLOW]  # for other formats, those not in the figure first
SERIES_COLOURS = [BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, BLACK]  # for conditions of one format
PART_COLOURS = {"draft": ORANGE, "verify": SKY, "other": "#BBBBBB"}
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
STYLE: Any = {
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


def save(figure: Figure | Axes, path_stem: str | Path) -> tuple[Path, Path]:
    """Write `<path_stem>.png` (150 dpi) and `<path_stem>.svg`, each whole or not at all, and return their paths."""
    whole: Any = figure.figure if hasattr(figure, "get_xlim") else figure
    paths = Path(f"{path_stem}.png"), Path(f"{path_stem}.svg")
    with in_style():
        for path in paths:
            data = io.BytesIO()
            metadata = {"Date": None} if path.suffix == ".svg" else None
            whole.savefig(data, format=path.suffix[1:], dpi=150, metadata=metadata)
            write_bytes(path, data.getvalue())
    return paths


@contextlib.contextmanager
def canvas(ax: Axes | None) -> Iterator[Axes]:
    """The given Axes, or those of a new figure, to draw on in the style."""
    from matplotlib import pyplot

    with in_style():
        axes: Any = pyplot.subplots()[1] if ax is None else ax
        try:
            yield axes
        except BaseException:
            if ax is None:
                pyplot.close(axes.figure)  # half a figure would be shown by a notebook all the same
            raise


@contextlib.contextmanager
def in_style(**changes: Any) -> Iterator[None]:
    """Everything drawn or written inside has the style, and nothing outside."""
    from matplotlib import pyplot

    _choose_backend()
    settings: Any = {**STYLE, **changes}
    with pyplot.rc_context(settings):
        yield


@functools.cache
def _choose_backend() -> None:
    """Let the backend come up before settings are put aside: a notebook's switches interactive mode on as it does, and where that is then
    undone with the rest, only the first figure of the notebook is shown."""
    import matplotlib
    from matplotlib import pyplot

    pyplot.switch_backend(matplotlib.get_backend())


def finish(ax: Axes, title: str, xlabel: str, ylabel: str, caption: str) -> None:
    """Title, legend above the data, labels, and the caption below (its artist has the gid "caption")."""
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    handles, labels = ax.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    columns = 1 if longest > 36 else 2 if sum(map(len, labels)) > 60 or len(labels) > 3 else max(len(labels), 1)
    lines = -(-len(labels) // columns)
    _heighten(ax, lines - 3)
    ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.4)
    ax.set_title(title, pad=12 + 17 * lines)
    where: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
    ax.annotate(textwrap.fill(caption, 84), (0, 0), (0, -46), **where, fontsize=9, color=DARK, gid="caption")


def widen(ax: Axes, inches: float) -> None:
    """Give a figure that holds these Axes alone at least that width."""
    figure: Any = ax.figure
    if len(figure.axes) == 1 and figure.get_figwidth() < inches:
        figure.set_figwidth(inches)


def _heighten(ax: Axes, lines: int) -> None:
    """Room for legend lines beyond those that the usual height has, in a figure that holds these Axes alone."""
    figure: Any = ax.figure
    if lines > 0 and len(figure.axes) == 1:
        figure.set_figheight(figure.get_figheight() + 0.24 * lines)

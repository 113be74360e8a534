"""The failure atlas as one figure: what each load did, and the acceptance that was left.

What enters: a table of `failure_atlas.atlas`. What leaves: Axes with a row per verifier format and a column per draft format and policy. It
loads and measures nothing; the figure redraws from a stored table alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .failure_atlas import OUTCOMES
from .plot_style import DARK, canvas, in_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Told apart in grey as well: right is light, what nobody is told of is the darkest.
COLOURS = {"loads right": "#D7ECDD", "silent corruption": "#B2182B", "KeyError": "#F4A582", "shape error": "#FDDBC7", "refused": "#DDDDDD"}
WORDS = {"loads right": "right", "silent corruption": "silent", "KeyError": "KeyError", "shape error": "shape", "refused": "refused"}


def failure_atlas(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """One cell per load: its outcome in colour and word, and, where a draft was loaded and measured, its mean acceptance length."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch, Rectangle

    rows = list(dict.fromkeys(table.verifier_format))
    columns = list(dict.fromkeys(zip(table.draft_format, table.policy, strict=True)))
    if ax is None:
        with in_style():
            ax = pyplot.subplots(figsize=(2.2 + 1.25 * len(columns), 2.2 + 0.33 * len(rows)))[1]
    with canvas(ax) as axes:
        row: Any
        for row in table.itertuples():
            x, y = columns.index((row.draft_format, row.policy)), rows.index(row.verifier_format)
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=COLOURS[row.outcome], edgecolor="none"))
            ink = "white" if row.outcome == "silent corruption" else "black"
            axes.text(x, y, _cell(row), ha="center", va="center", fontsize=9, color=ink)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xticks(range(len(columns)), [f"{policy}\n{draft} draft" for draft, policy in columns])
        axes.tick_params(length=0)
        axes.xaxis.tick_top()
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_ylabel("verifier format")
        handles = [Patch(facecolor=COLOURS[name], label=name) for name in OUTCOMES if name in set(table.outcome)]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=3, columnspacing=1.2)
        axes.set_title("What loading the draft does", pad=12)
        axes.annotate(
            _caption(table),
            (0.5, 0),
            (0, -52),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
            color=DARK,
            gid="caption",
        )
    return axes


def _cell(row: Any) -> str:
    tau = row.mean_acceptance_length
    return WORDS[row.outcome] if tau is None or tau != tau else f"{WORDS[row.outcome]}  {tau:.2f}"


def _caption(table: pd.DataFrame) -> str:
    if table.mean_acceptance_length.isna().all():
        return "Each cell is a real load under that policy."
    return (
        "Each cell is a real load under that policy. Numbers: mean acceptance length that\nis left (tokens per round, bonus counted); "
        "1 is what no draft at all would give."
    )

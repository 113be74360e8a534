"""The figure of the load-config cases: which weights each policy loaded, and what they are worth.

What enters: a table of `draft_load_cases`. What leaves: Axes. It loads and measures nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .plot_style import BLUE, DARK, GREEN, VERMILION, canvas, finish

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

COLOURS = (VERMILION, BLUE, GREEN)


def load_cases(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """A bar per case and policy: mean acceptance length of what was loaded; a cross where nothing was."""
    cases, policies = list(dict.fromkeys(table.case)), list(dict.fromkeys(table.policy))
    width = 0.8 / len(policies)
    row: Any
    with canvas(ax) as axes:
        for i, policy in enumerate(policies):
            rows = table[table.policy == policy]
            places = [cases.index(case) + (i - (len(policies) - 1) / 2) * width for case in rows.case]
            colour = COLOURS[i % len(COLOURS)]
            axes.bar(places, rows.mean_acceptance_length.astype(float), width * 0.94, color=colour, label=policy)
            for place, row in zip(places, rows.itertuples(), strict=True):
                loaded = row.outcome in ("the draft", "other weights")
                height = float(row.mean_acceptance_length) if loaded and row.mean_acceptance_length is not None else 0.0
                words, ink = (row.outcome, DARK) if loaded else ("nothing found", colour)
                style: Any = {"ha": "center", "va": "bottom", "fontsize": 8, "rotation": 90}
                axes.annotate(words, (place, height), (0, 4), textcoords="offset points", color=ink, **style)
        axes.axhline(1, color=DARK, linestyle="--", linewidth=1.2, label="no speculation (k = 0)")
        axes.set_xticks(range(len(cases)), cases)
        axes.set_xlim(-0.5, len(cases) - 0.5)
        axes.set_ylim(0, 1.45 * max(1.2, float(table.mean_acceptance_length.astype(float).max())))
        caption = (
            "Mean over rounds, bonus counted, beside the same verifier. Labels: whose weights the policy loaded; "
            "every bar is a real load of real files."
        )
        finish(axes, "A draft's own load settings", "case", "mean acceptance length\n(tokens / round)", caption)
    return axes

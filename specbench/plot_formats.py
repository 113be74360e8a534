"""Figures of one draft beside the same verifier in many formats.

What enters: a table of `bench.across_formats`. What leaves: Axes. It measures nothing; figures redraw from a stored table alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .plot_style import BLUE, DARK, ORANGE, canvas, finish

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def acceptance_by_format(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Mean acceptance length per format with its interval, and the verifier's perplexity beside each name."""
    rows = table.sort_values("perplexity").reset_index(drop=True)
    with canvas(ax) as axes:
        bars = [
            rows.mean_acceptance_length - rows.mean_acceptance_length_low,
            rows.mean_acceptance_length_high - rows.mean_acceptance_length,
        ]
        axes.errorbar(rows.index, rows.mean_acceptance_length, yerr=bars, fmt="o", color=BLUE, label="one draft, every format")
        axes.axhline(1, color=DARK, linestyle="--", linewidth=1.2, label="no speculation (k = 0)")
        axes.set_xticks(rows.index, [f"{r.verifier_format}\nppl {r.perplexity:.1f}" for r in rows.itertuples()])
        axes.set_xlim(-0.5, len(rows) - 0.5)
        axes.set_ylim(bottom=0.9)
        caption = (
            "Mean over rounds, bonus counted; bars: 95\u00a0% bootstrap over prompts. Sorted by the verifier's perplexity on the "
            "bundled passages."
        )
        finish(axes, "Acceptance against quantization", "verifier format", "mean acceptance length\n(tokens / round)", caption)
    return axes


def predicted_speedup(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Measured speedup over the one that acceptance and round costs predict; on the diagonal the model of a round explains everything."""
    with canvas(ax) as axes:
        measured = [table.speedup - table.speedup_low, table.speedup_high - table.speedup]
        axes.errorbar(table.predicted_speedup, table.speedup, yerr=measured, fmt="o", color=ORANGE, label="verifier formats")
        low = 0.95 * float(min(table.predicted_speedup.min(), table.speedup_low.min(), 1))
        high = 1.05 * float(max(table.predicted_speedup.max(), table.speedup_high.max(), 1))
        axes.plot([low, high], [low, high], color=DARK, linestyle=":", linewidth=1.2, label="as predicted")
        axes.axhline(1, color=DARK, linestyle="--", linewidth=1.2, label="no speculation (k = 0)")
        for i, row in enumerate(table.sort_values("predicted_speedup").itertuples()):
            _label(axes, row, above=i % 2 == 0)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        caption = (
            "Predicted: mean acceptance length / (T(k + 1) / T(1) + draft / T(1)), from passes timed alone. Bars: 95\u00a0% "
            "bootstrap over prompts."
        )
        finish(axes, "Speedup, predicted and measured", "predicted decode speedup", "measured decode speedup", caption)
    return axes


def _label(axes: Axes, row: Any, above: bool) -> None:
    axes.annotate(
        row.verifier_format,
        (row.predicted_speedup, row.speedup),
        (7, 5 if above else -13),
        textcoords="offset points",
        fontsize=9,
        color=DARK,
    )

"""Figures of benchmark tables: a table in, matplotlib Axes out.

What enters: a table with the columns of `bench.records.Row` (from `benchmark` or `load_runs`), and optionally the Axes to draw on. What
leaves: those Axes, labelled, with units, the baseline, intervals and a caption that says what was averaged over how many prompts. It
measures nothing, shows nothing and keeps no state; every figure redraws from a stored table alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bench.summary import grouping, per_position_rates, summarize
from .errors import DataError
from .plot_series import Series, common_model, condition, series_of
from .plot_style import DARK, PART_COLOURS, canvas, finish, save, widen

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["acceptance", "acceptance_by_category", "per_position", "condition", "save", "speedup", "throughput", "time_share"]


def acceptance(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Mean acceptance length (bonus counted, over rounds) by k, a line per verifier; the baseline is plain decoding, 1 token a round."""
    with canvas(ax) as axes:
        summary = _speculating(summarize(_own(table)))
        axes.axhline(1, color=DARK, linestyle="--", linewidth=1.2, label="no speculation (k = 0)")
        ks = sorted(set(summary.k))
        for series in series_of(summary, spread=0.12):
            _errorbar(axes, series, series.rows.k + series.offset, "mean_acceptance_length")
        axes.set_xticks(ks)
        axes.set_xlim(min(ks) - 0.5, max(ks) + 0.5)
        axes.set_ylim(bottom=0.9)
        finish(
            axes,
            "Mean acceptance length",
            "draft tokens proposed per round, k",
            "mean acceptance length\n(tokens / round, bonus counted)",
            f"Mean over rounds. {_n(summary)}. {_setting(table)}",
        )
    return axes


def acceptance_by_category(table: pd.DataFrame, k: int | None = None, ax: Axes | None = None) -> Axes:
    """Mean acceptance length (bonus counted, over rounds) of each prompt category at one k: 3 where measured, else the largest."""
    with canvas(ax) as axes:
        own = _own(table)
        k = _choose_k(own, k, preferred=3)
        summary = _speculating(summarize(own[own.k == k], (*grouping(own[own.k == k]), "category")))
        order = list(summary.groupby("category").mean_acceptance_length.mean().sort_values().index)
        axes.axvline(1, color=DARK, linestyle="--", linewidth=1.2, label="no speculation (k = 0)")
        for series in series_of(summary, spread=0.5):
            rows = series.rows
            y = rows.category.map(order.index) - series.offset
            bars = _bars(rows, "mean_acceptance_length")
            axes.errorbar(rows.mean_acceptance_length, y, xerr=bars, fmt=series.marker, color=series.colour, label=series.label)
        axes.set_yticks(range(len(order)), order)
        axes.set_ylim(-0.6, len(order) - 0.4)
        axes.set_xlim(left=0.9)
        finish(
            axes,
            f"Mean acceptance length by category (k = {k})",
            "mean acceptance length (tokens / round, bonus counted)",
            "",
            f"Mean over rounds. {_n(summary, ' per category')}. {_setting(table)}",
        )
    return axes


def per_position(table: pd.DataFrame, k: int | None = None, ax: Axes | None = None) -> Axes:
    """Acceptance rate of each draft position at one k (default: the largest), unconditional and given that all earlier were accepted."""
    with canvas(ax) as axes:
        own = _own(table)
        k = _choose_k(own, k, preferred=None)
        rates = per_position_rates(own[own.k == k])
        for series in series_of(rates, spread=0.12):
            x = series.rows.position + series.offset
            _errorbar(axes, series, x, "conditional", suffix=", conditional", linestyle=":", markerfacecolor="white")
            _errorbar(axes, series, x, "unconditional", suffix=", unconditional")
        axes.axhline(1, color=DARK, linestyle="--", linewidth=1.2, label="perfect draft")
        axes.set_xticks(range(1, k + 1))
        axes.set_xlim(0.5, k + 0.5)
        axes.set_ylim(0, 1.05)
        finish(
            axes,
            f"Acceptance by draft position (k = {k})",
            "draft position",
            "acceptance rate\n(accepted / proposed)",
            f"Over rounds that proposed the position (conditional: and accepted all earlier ones); bonus not counted. {_n(rates)}. "
            f"{_setting(table)}",
        )
    return axes


def throughput(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Decode speed by k, each point with its speedup over k=0 of the same run, whose level is drawn; transformers' loop where measured."""
    with canvas(ax) as axes:
        summary = summarize(table)
        own = _measured(summary[summary.engine == "specbench"], "decode_tokens_per_second")
        ks = sorted(set(own.k))
        drawn = series_of(own, spread=0.12)
        fastest = max(drawn, key=lambda series: series.rows.decode_tokens_per_second.mean())
        for series in drawn:
            x = series.rows.k + series.offset
            plain = series.rows[series.rows.k == 0].decode_tokens_per_second
            for level in plain:
                axes.axhline(level, color=series.colour, linestyle="--", linewidth=1.0, alpha=0.7)
            _errorbar(axes, series, x, "decode_tokens_per_second")
            if series is fastest or len(drawn) < 3:  # more labels would cover one another
                _label_speedups(axes, series, x, above=series is fastest)
        for series in series_of(summary[summary.engine == "transformers"], spread=0):
            for k, level in zip(series.rows.k, series.rows.decode_tokens_per_second, strict=True):
                dots, name = ((3, 1, 1, 1), f"transformers prompt lookup (\u2264{k})") if k else ((1, 2), "transformers generate")
                axes.axhline(level, color=series.colour, linestyle=(0, dots), linewidth=1.6, label=f"{name}, {series.label}")
        axes.set_xticks(ks)
        axes.set_xlim(min(ks) - 0.5, max(ks) + 0.5)
        axes.set_ylim(0, 1.14 * axes.get_ylim()[1])  # room for the labels of the highest points
        finish(
            axes,
            "Decode speed, and speedup over k = 0",
            "draft tokens proposed per round, k (0: no speculation)",
            "decode speed (tokens / s)",
            f"Tokens after the first / decode seconds, over all tokens; dashed: k = 0 of the same run. {_n(own)}. {_setting(table)}",
        )
    return axes


def speedup(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Decode speedup over k=0 of the same run, prompts and repeats, by k; the baseline is 1."""
    with canvas(ax) as axes:
        summary = _speculating(summarize(_own(table)), "speedup")
        ks = sorted(set(summary.k))
        axes.axhline(1, color=DARK, linestyle="--", linewidth=1.2, label="no speculation (k = 0)")
        for series in series_of(summary, spread=0.12):
            _errorbar(axes, series, series.rows.k + series.offset, "speedup")
        axes.set_xticks(ks)
        axes.set_xlim(min(ks) - 0.5, max(ks) + 0.5)
        finish(
            axes,
            "Speedup over plain decoding",
            "draft tokens proposed per round, k",
            "decode speedup (\u00d7, k = 0 is 1)",
            f"Ratio of decode tokens / s, same prompts and run. {_n(summary)}. {_setting(table)}",
        )
    return axes


def time_share(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Where decode seconds go, stacked to 100 %: draft, verify, other; above each bar the time per output token after the first."""
    with canvas(ax) as axes:
        summary = _measured(summarize(_own(table)), "verify_share")
        place = 0.0
        ticks: list[tuple[float, str]] = []
        for series in series_of(summary, spread=0):
            first = place
            for row in series.rows.to_dict("records"):
                _stack(axes, place, row, labelled=not ticks)
                ticks.append((place, f"k = {row['k']}"))
                place += 1
            middle: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center", "va": "top"}
            axes.annotate(series.label, ((first + place - 1) / 2, 0), (0, -22), **middle, fontweight="bold")
            place += 0.6
        axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
        axes.grid(visible=False, axis="x")
        widen(axes, 0.62 * len(ticks))
        axes.set_ylim(0, 109)
        axes.set_yticks(range(0, 101, 20))
        finish(
            axes,
            "Where decode time goes",
            " ",
            "share of decode time (%)",
            f"Summed over prompts; above: ms per token after the first. {_n(summary, bars=False)}. {_setting(table)}",
        )
    return axes


def _own(table: pd.DataFrame) -> pd.DataFrame:
    return table[table.engine == "specbench"]


def _speculating(summary: pd.DataFrame, figure: str = "mean_acceptance_length") -> pd.DataFrame:
    return _measured(summary[summary.k > 0], figure)


def _measured(summary: pd.DataFrame, figure: str) -> pd.DataFrame:
    kept = summary[summary[figure].notna()]
    if not len(kept):
        raise DataError(f"nothing to draw: no configuration of the table has a {figure}; expected rows with status 'ok', decoded here")
    return kept


def _choose_k(own: pd.DataFrame, k: int | None, preferred: int | None) -> int:
    measured = sorted({int(value) for value in own[own.status == "ok"].k if value > 0})
    if not measured or (k is not None and k not in measured):
        raise DataError(f"nothing to draw: k is {k}, and the table has rows with status 'ok' at k > 0 for {measured or 'none'}")
    if k is not None:
        return k
    return preferred if preferred in measured else measured[-1]


def _errorbar(ax: Axes, series: Series, x: pd.Series[float], figure: str, suffix: str = "", **style: Any) -> None:
    y, bars = series.rows[figure], _bars(series.rows, figure)
    ax.errorbar(x, y, yerr=bars, color=series.colour, marker=series.marker, label=series.label + suffix, **style)


def _stack(ax: Axes, place: float, row: Any, labelled: bool) -> None:
    """One bar of `time_share`."""
    bottom = 0.0
    for part, colour in PART_COLOURS.items():
        share = 100 * row[f"{part}_share"]
        ax.bar(place, share, 0.8, bottom=bottom, color=colour, label=part if labelled else None)
        if share >= 7:
            ax.text(place, bottom + share / 2, f"{share:.0f}", ha="center", va="center", fontsize=10)
        bottom += share
    milliseconds = 1000 / row["decode_tokens_per_second"]
    ax.text(place, 101.5, f"{milliseconds:.{0 if milliseconds >= 9.95 else 1}f} ms", ha="center", va="bottom", fontsize=10)


def _label_speedups(ax: Axes, series: Series, x: pd.Series[float], above: bool) -> None:
    """Write each point's speedup over k=0 beyond its interval."""
    edge = series.rows[f"decode_tokens_per_second_{'high' if above else 'low'}"].fillna(series.rows.decode_tokens_per_second)
    backing = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}  # legible across a baseline
    place: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom" if above else "top", "fontsize": 10, "bbox": backing}
    for at, y, k, factor in zip(x, edge, series.rows.k, series.rows.speedup, strict=True):
        if k > 0 and factor == factor:
            ax.annotate(f"{factor:.2f}\u00d7", (at, y), (0, 5 if above else -5), color=series.colour, **place)


def _bars(rows: pd.DataFrame, figure: str) -> Any:
    """Distances [2, points] from a figure down and up to its interval; 0 where there is none."""
    low, high = rows[figure] - rows[f"{figure}_low"], rows[f"{figure}_high"] - rows[figure]
    return [low.fillna(0).clip(lower=0), high.fillna(0).clip(lower=0)]


def _n(summary: pd.DataFrame, per: str = "", bars: bool = True) -> str:
    """For captions: how many prompts, how many rows failed, what the bars are."""
    low, high = int(summary.num_prompts.min()), int(summary.num_prompts.max())
    count = f"n\u00a0=\u00a0{low}" + (f"\u2013{high}" if low != high else "") + (" prompts" if high > 1 else " prompt") + per
    failed = int(summary.num_failed.sum()) if "num_failed" in summary else 0
    count += f" ({failed} failed row{'s' if failed > 1 else ''} left out)" if failed else ""
    return f"{count}; bars: 95\u00a0% bootstrap over prompts" if bars and high > 1 else count


def _setting(table: pd.DataFrame) -> str:
    """For captions: the model that all verifiers are variants of, device and dtype."""
    words = [common_model(table.verifier), *("/".join(sorted({str(value) for value in table[name]})) for name in ("device", "dtype"))]
    return ", ".join(filter(None, words)) + "."

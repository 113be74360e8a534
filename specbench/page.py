"""A page to publish: what a run, or all runs below a folder, found, in one HTML file that opens without network and shows no code.

What enters: a run folder, a folder of run folders, or a sweep's folder. What leaves: `summary.html` in it. It measures nothing: every
figure and number is derived anew from the rows that lie there.
"""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plots
from .bench.atomic import write_bytes
from .bench.cost_model import compare
from .bench.records import load_runs, read_provenance
from .bench.summary import grouping, read_off, summarize
from .bench.sweep_index import read_index
from .errors import DataError
from .page_style import CSS, DEFINITIONS, READ_OFF, TABLES, Column
from .plot_style import in_style

if TYPE_CHECKING:
    import pandas as pd

PAGE = "summary.html"
FIGURES: tuple[Callable[..., Any], ...] = (
    plots.acceptance, plots.acceptance_by_category, plots.per_position, plots.throughput, plots.speedup, plots.time_share,
)  # fmt: skip


def report(folder: str | Path) -> Path:
    """Write `summary.html` for a run folder, a folder of runs, or a sweep, and return its path.

    Raises:
        FileNotFoundError: there is neither a row nor an index of a sweep.
    """
    return sweep_page(folder) if read_index(folder) is not None else run_page(folder)


def run_page(folder: str | Path) -> Path:
    """The page of one run, or of the runs below a folder: figures, tables, settings, what failed, definitions."""
    root = Path(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        table = load_runs(root, mixed_prompts=True)
    notes = [str(w.message) for w in told if issubclass(w.category, UserWarning)]
    parts = [*(f'<p class="note">{html.escape(note)}</p>' for note in notes), *_found(table), *_settings(root)]
    return _write(root, _title(table), parts)


def sweep_page(folder: str | Path) -> Path:
    """The page of a sweep: its index with links to the report of each run, then the figures over all rows that the runs left."""
    root = Path(folder)
    index = read_index(root)
    if index is None:
        raise FileNotFoundError(f"{root} holds no index of a sweep; `specbench.bench.sweep.sweep` writes one")
    counts = index.status.value_counts()
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    parts = [f"<p>{len(index)} runs: {html.escape(said)}.</p>", "<h2>Runs</h2>", _index(root, index)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the index says what did not finish
            parts += _found(load_runs(root, mixed_prompts=True))
    except FileNotFoundError:
        parts.append("<p>The notebook of this sweep leaves no rows of a benchmark; what it found is in the table above.</p>")
    return _write(root, f"Sweep {root.name}", parts)


def _found(table: pd.DataFrame) -> list[str]:
    """What rows say: a sentence for each configuration, the table, figures, failures, definitions."""
    summary = summarize(table)
    sentences = [
        f"<li>{html.escape(_named(row, summary))}: {html.escape(row['verdict'])}.</li>" for row in compare(summary).to_dict("records")
    ]
    parts = ["<h2>Faster or slower</h2>", "<ul>", *sentences, "</ul>"] if sentences else []
    keys = list(grouping(table))
    varied = [name for name in keys if summary[name].nunique(dropna=False) > 1]
    if "verifier" in varied and summary.verifier.nunique() == summary.verifier_format.nunique():
        varied.remove("verifier")  # the format tells them apart
    summary = summary.assign(verifier=summary.verifier.map(lambda name: Path(name).name))
    same = ", ".join(f"{name} {summary[name].iloc[0]}" for name in keys if name not in varied and summary[name].nunique(dropna=False) == 1)
    parts += [f"<p>The same everywhere: {html.escape(same)}.</p>"] if same else []
    for heading, columns in TABLES.items():
        shown = ["decoding", *(name for name in varied if name not in ("engine", "proposer"))]
        parts += [f"<h2>{heading}</h2>", _table(_shown(summary, shown, columns))]
    parts += _figures(table)
    expected = read_off(table)
    expected = expected[expected.measured.notna() & (expected.k < expected.longest_k)]
    if len(expected):
        parts += [
            "<h2>Shorter chains, read off the longest</h2>",
            "<p>Mean acceptance length that the longest chain's rounds give when cut to k tokens, beside what a run at k gave.</p>",
            _table(_shown(expected, [name for name in (*varied, "longest_k") if name in expected], READ_OFF)),
        ]
    failed = table[table.status == "failed"]
    if len(failed):
        named = [*varied, "question_id", "turn", "repeat", "error"]
        parts += [f"<h2>Failed: {len(failed)} of {len(table)} rows</h2>", _table(failed[list(dict.fromkeys(named))])]
    listed = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in DEFINITIONS.items())
    return [*parts, "<h2>What the words mean</h2>", f"<dl>{listed}</dl>"]


def _figures(table: pd.DataFrame) -> list[str]:
    from matplotlib import pyplot

    parts = []
    for draw in FIGURES:
        try:
            axes = draw(table)
        except DataError:  # this table has nothing of that kind: nobody speculated, or nothing was timed
            continue
        data = io.BytesIO()
        with in_style():
            axes.figure.savefig(data, format="svg", metadata={"Date": None})
        pyplot.close(axes.figure)
        title = html.escape(axes.get_title(loc="left"))
        parts.append(f'<img alt="{title}" src="data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}">')
    return ["<h2>Figures</h2>", '<div class="figures">', *parts, "</div>"] if parts else []


def _settings(root: Path) -> list[str]:
    """What the numbers depend on, run by run."""
    parts = []
    found = [root] if read_provenance(root) else sorted(path.parent for path in root.rglob("provenance.json"))
    for folder in found:
        facts = read_provenance(folder)
        flat = _flat(facts)
        rows = {key: value for key, value in flat.items() if not key.startswith("checkpoints.") or ".files." not in key}
        hashes = {key: value for key, value in flat.items() if ".files." in key}
        name = html.escape(str(facts.get("run_id", folder.name)))
        parts.append(f"<details><summary>Settings and origin of {name}</summary>{_pairs(rows)}<h3>Files</h3>{_pairs(hashes)}</details>")
    return ["<h2>Settings and origin</h2>", *parts] if parts else []


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}" if name else str(key)).items()}
    return {name: value}


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in values.items())
    return f'<div class="wide"><table class="pairs">{rows}</table></div>'


def _index(root: Path, index: pd.DataFrame) -> str:
    """The sweep's runs: what differs between them, how they ended, what they found."""
    columns = list(index.columns)
    given, facts = columns[1 : columns.index("status")], columns[columns.index("folder") + 1 :]
    varied = [name for name in given if index[name].nunique(dropna=False) > 1]
    complete = index[index.status == "complete"]
    found = [name for name in facts if len(complete) and complete[name].notna().all()]
    ended = [name for name in ("status", "seconds", "error") if name == "status" or index[name].notna().any()]
    shown = index[["run_id", *varied, *ended, *found]].copy()
    links = []
    for run_id, folder in zip(index.run_id, index.folder, strict=True):
        reports = sorted(path for path in (root / folder).glob("*.html") if path.name != PAGE)
        name = html.escape(run_id)
        links.append(f'<a href="{html.escape(reports[0].relative_to(root).as_posix())}">{name}</a>' if reports else name)
    return _table(shown.assign(run_id=links), raw=("run_id",))


def _named(row: Mapping[Any, Any], summary: pd.DataFrame) -> str:
    """What tells a configuration from the others on the page."""
    keys = list(summary.columns[: list(summary.columns).index("num_prompts")])
    varied = [name for name in keys if summary[name].nunique(dropna=False) > 1 and name not in ("engine", "proposer", "verifier")]
    forms = {"verifier_format": "{}", "k": "k = {}"}
    words = [forms[name].format(row[name]) if name in forms else plots.condition(name, row[name]) for name in varied]
    return (
        ", ".join([*(["transformers, prompt lookup"] if row["engine"] == "transformers" else []), *filter(None, words)])
        or f"k = {row['k']}"
    )


def _shown(figures: pd.DataFrame, keys: Sequence[str], columns: Mapping[str, Column]) -> pd.DataFrame:
    """Figures as a reader wants them: in their unit, with their interval in the same cell; columns without any are left out."""

    def cell(row: Mapping[Any, Any], name: str, column: Column) -> str:
        value = row[name]
        if value is None or value != value:
            return ""
        low, high = (float(row.get(f"{name}_{end}", float("nan"))) for end in ("low", "high"))
        shown = format(column.scale * value, column.form)
        return shown if low != low else f"{shown} ({column.scale * low:{column.form}} to {column.scale * high:{column.form}})"

    rows = figures.to_dict("records")
    known = {name: column for name, column in columns.items() if name in figures and figures[name].notna().any()}
    made = {column.heading: [cell(row, name, column) for row in rows] for name, column in known.items()}
    return figures[list(keys)].assign(**made)


def _table(table: pd.DataFrame, raw: Sequence[str] = ()) -> str:
    def cell(value: Any) -> str:
        if value is None or value != value:
            return ""
        if isinstance(value, float):
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        return html.escape(str(value))

    records = table.to_dict("records")
    right = {name for name in table.columns if name not in raw and all(_is_number(row[name]) for row in records)}
    head = "".join(f"<th{' class=n' if name in right else ''}>{html.escape(str(name))}</th>" for name in table.columns)
    body = []
    for row in records:
        cells = [(" class=n" if name in right else "", str(value) if name in raw else cell(value)) for name, value in row.items()]
        body.append("<tr>" + "".join(f"<td{kind}>{text}</td>" for kind, text in cells) + "</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _is_number(value: Any) -> bool:
    """A number, or text that begins as one ("1.65 (1.61 to 1.70)"), or nothing."""
    if isinstance(value, str):
        return not value or value[0].isdigit() or value[0] == "-"
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool)) or hasattr(value, "dtype")


def _title(table: pd.DataFrame) -> str:
    verifiers = sorted({Path(name).name for name in table.verifier})
    return f"Speculative decoding: {', '.join(verifiers[:3])}" + (" ..." if len(verifiers) > 3 else "")


def _write(root: Path, title: str, parts: Sequence[str]) -> Path:
    name = html.escape(title)
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{CSS}</style></head>\n<body><main><h1>{name}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )
    write_bytes(root / PAGE, page.encode())
    return root / PAGE

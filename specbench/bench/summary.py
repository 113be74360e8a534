"""Figures per configuration from a table of rows.

What enters: a table with the columns of `schema.Row`. What leaves: tidy tables, one row per group (and per draft position), with intervals
over prompts. Every rate comes from `metrics`, every speed from `speed`; failed rows are counted and left out. It knows no file and no plot.

A prompt is the unit of every interval: its turns and repeats are put together before prompts are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from . import metrics
from .speed import BASELINE, LIMITS, PENALTIES, PROMPT, pair_with_baseline, put, speed_figures

if TYPE_CHECKING:
    import pandas as pd

BY = ("engine", "verifier", "verifier_format", "k")
# What else may have been varied; each joins the groups where a table holds several of its values for one group.
CONDITIONS = (
    "draft", "policy", "proposer", "draft_shape", "draft_p_min", "draft_sampling", "temperature", *LIMITS,
    *PENALTIES, "batch_size", "dtype", "device", "threads", "max_new_tokens",
)  # fmt: skip
MEASURED = ("status", "accepted_per_round", "proposed_per_round", "token_ids", "decode_s", "total_s")
CONTEXT_EDGES = (128, 512, 2048, 8192, 32768)


def summarize(table: pd.DataFrame, by: Sequence[str] | None = None, *, seed: int = 0) -> pd.DataFrame:
    """One row per group of `by`, sorted; None is `grouping(table)`: what is never mixed is told apart.

    Columns, NaN where undefined:
        num_prompts, num_failed (rows), num_rounds, num_drafts (rounds that proposed something);
        mean_acceptance_length (bonus counted, over drafts) with _low and _high, mean_acceptance_length_over_prompts (bonus counted) with
        _low and _high, mean_accepted_tokens (bonus not counted, over drafts), draft_acceptance_rate (over proposed tokens; for a tree that
        of its longest paths), node_acceptance_rate (over tokens that the verifier scored);
        those of `speed.speed_figures`; predicted_speedup (see `cost_model`);
        decoding, in words: "plain" or who proposed; for transformers "generate" or "prompt lookup".

    Raises:
        DataError: columns are missing.
    """
    import pandas as pd

    by = grouping(table) if by is None else by
    require(table, (*by, *BASELINE, *MEASURED))
    paired = pair_with_baseline(table)

    def figures(group: pd.DataFrame) -> dict[str, Any]:
        ok = group[group.status == "ok"]
        out = {**_acceptance(ok, seed), **speed_figures(ok, seed), "num_failed": len(group) - len(ok)}
        return out | _predicted(out) | {"decoding": _decoding(group)}

    rows = [dict(zip(by, key, strict=True)) | figures(group) for key, group in paired.groupby(list(by), sort=True, dropna=False)]
    return pd.DataFrame(rows, columns=[*by, *figures(paired.iloc[:0])])


def grouping(table: pd.DataFrame) -> tuple[str, ...]:
    """`BY`, and every condition that takes several values within one of its groups: different things are not averaged unasked."""
    require(table, BY)
    groups = table.groupby(list(BY), dropna=False)
    varied = [name for name in CONDITIONS if name in table.columns and (groups[name].nunique(dropna=False) > 1).any()]
    return (*BY, *varied)


def facts(summary: pd.DataFrame, figure: str) -> dict[str, float]:
    """A figure of every configuration that speculates and has it, by a name that tells them apart: "speedup_w4a16_k3"."""
    varied = [name for name in CONDITIONS if name in summary.columns and summary[name].nunique(dropna=False) > 1]
    found = {}
    for row in summary[(summary.k > 0) & summary[figure].notna()].to_dict("records"):
        words = [
            figure,
            *([row["decoding"].replace(" ", "_")] if row["engine"] != "specbench" else []),
            row["verifier_format"],
            f"k{row['k']}",
        ]
        words += [f"{name}_{row[name]}".replace(" ", "_") for name in varied if row[name] == row[name]]
        found["_".join(map(str, words))] = float(row[figure])
    return found


def with_context(table: pd.DataFrame, edges: Sequence[int] = CONTEXT_EDGES) -> pd.DataFrame:
    """The table with a column `context`, the prompt's length in classes ("to 128", "to 512", ..., "over 32768" tokens), to group by."""
    import pandas as pd

    labels = [*(f"to {edge}" for edge in edges), f"over {edges[-1]}"]
    lengths = table.num_prompt_tokens.astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    return table.assign(context=pd.cut(lengths, [0, *edges, np.inf], labels=labels))


def per_position_rates(table: pd.DataFrame, by: Sequence[str] | None = None, *, seed: int = 0) -> pd.DataFrame:
    """One row per group of `by` (None: `grouping`) and draft position, from 1: `unconditional` and `conditional` rate, `_low` and `_high`.

    Both are over the rounds that proposed the position, bonus not counted; NaN where no round did, or none reached it. Groups without
    a proposal have no rows.
    """
    import pandas as pd

    by = grouping(table) if by is None else by
    require(table, (*by, "status", *PROMPT, "accepted_per_round", "proposed_per_round"))
    rows = []
    for key, group in table[table.status == "ok"].groupby(list(by), sort=True, dropna=False):
        counts = [metrics.flatten(*_rounds(prompt)) for _, prompt in group.groupby(PROMPT)]
        for position in range(max((int(p.max()) for _, p in counts if p.size), default=0)):
            row: dict[str, Any] = {**dict(zip(by, key, strict=True)), "position": position + 1, "num_prompts": len(counts)}
            hits = [(a > position).sum() for a, _ in counts]
            offered = [(p > position).sum() for _, p in counts]
            reached = [((a >= position) & (p > position)).sum() for a, p in counts]
            put(row, "unconditional", np.array([hits, offered]).T, metrics.ratio, seed)
            put(row, "conditional", np.array([hits, reached]).T, metrics.ratio, seed)
            rows.append(row)
    names = [f"{rate}{end}" for rate in ("unconditional", "conditional") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=[*by, "position", "num_prompts", *names])


def read_off(table: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """What the longest chain says of shorter ones, beside what they gave where they were run.

    A chain of k proposes what a chain of k' < k would, and then more: the mean acceptance length at k' is 1 + the first k' per-position
    rates of the run at k. A run at k' begins its rounds elsewhere, so the two agree within their intervals, not exactly.

    Returns:
        Per group of `grouping` without k, and k' from 1 to the longest k: longest_k, read_off (mean acceptance length, bonus counted, over
        drafts) with _low and _high, measured with _low and _high (NaN where k' was not run), num_prompts.
    """
    import pandas as pd

    by = [name for name in grouping(table) if name != "k"]
    whole = table.draft_p_min.isna() if "draft_p_min" in table else True
    ok = table[(table.status == "ok") & (table.draft_shape == "chain") & (table.k > 0) & whole]
    rows = []
    for key, group in ok.groupby(by, sort=True, dropna=False):
        longest = int(group.k.max())
        for k in range(1, longest + 1):
            row: dict[str, Any] = {**dict(zip(by, key, strict=True)), "k": k, "longest_k": longest}
            for name, rounds in (("read_off", group[group.k == longest]), ("measured", group[group.k == k])):
                prompts = [metrics.truncate(*_rounds(prompt), k) for _, prompt in rounds.groupby(PROMPT)]
                put(row, name, _draft_sums([_joined(a) for a, _ in prompts], [_joined(p) for _, p in prompts]), metrics.ratio, seed)
            rows.append(row | {"num_prompts": group[group.k == longest].question_id.nunique()})
    names = [f"{name}{end}" for name in ("read_off", "measured") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=[*by, "k", "longest_k", *names, "num_prompts"])


def _acceptance(ok: pd.DataFrame, seed: int) -> dict[str, Any]:
    prompts = [_rounds(prompt) for _, prompt in ok.groupby(PROMPT)]
    accepted, proposed = ([_joined(prompt[i]) for prompt in prompts] for i in (0, 1))
    out: dict[str, Any] = {"num_prompts": len(prompts), "num_rounds": sum(map(len, accepted))}
    sums = _draft_sums(accepted, proposed)
    out["num_drafts"] = int(sums[:, 1].sum())
    put(out, "mean_acceptance_length", sums, metrics.ratio, seed)
    lengths = np.array([(length, 1) for length in metrics.lengths_of_prompts(accepted, proposed)]).reshape(-1, 2)
    put(out, "mean_acceptance_length_over_prompts", lengths, metrics.ratio, seed)
    nodes = [_joined([list(n) for n in prompt.nodes_per_round]) for _, prompt in ok.groupby(PROMPT)] if "nodes_per_round" in ok else []
    figures = {
        "mean_accepted_tokens": metrics.mean_accepted_tokens(accepted, proposed),
        "draft_acceptance_rate": metrics.draft_acceptance_rate(accepted, proposed),
        "node_acceptance_rate": metrics.draft_acceptance_rate(accepted, nodes)
        if list(map(len, nodes)) == list(map(len, accepted))
        else None,
    }
    return out | {name: np.nan if value is None else value for name, value in figures.items()}


def _predicted(out: dict[str, Any]) -> dict[str, Any]:
    """Speedup that acceptance and the parts of a round predict, beside the measured one."""
    cost = out["verify_cost"] + out["draft_cost"]
    return {"predicted_speedup": out["mean_acceptance_length"] / cost if cost > 0 else np.nan}


def _decoding(group: pd.DataFrame) -> str:
    if not len(group) or "proposer" not in group:
        return ""
    first = group.iloc[0]
    return str(first.proposer) or ("generate" if first.engine == "transformers" else "plain")


def _draft_sums(accepted: list[list[int]], proposed: list[list[int]]) -> metrics.Array:
    """[prompts, 2]: tokens that a prompt's drafts committed, bonus counted, and how many drafts; prompts without one are left out."""
    kept = [[a for a, p in zip(*pair, strict=True) if p] for pair in zip(accepted, proposed, strict=True)]
    return np.array([(sum(rounds) + len(rounds), len(rounds)) for rounds in kept if rounds]).reshape(-1, 2)


def _rounds(rows: pd.DataFrame) -> tuple[list[list[int]], list[list[int]]]:
    return [list(counts) for counts in rows.accepted_per_round], [list(counts) for counts in rows.proposed_per_round]


def _joined(counts: list[list[int]]) -> list[int]:
    return [count for rounds in counts for count in rounds]


def require(table: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise a DataError that names what is missing."""
    missing = [name for name in dict.fromkeys(columns) if name not in table.columns]
    if missing:
        raise DataError(f"the table lacks the columns {', '.join(missing)}; expected one of `specbench.benchmark` or `specbench.load_runs`")

"""Figures per configuration from a table of rows.

What enters: a table with the columns of `records.Row`. What leaves: tidy tables, one row per group (and per draft position), with
intervals over prompts. Every rate comes from `metrics`; failed rows are counted and left out. It does not know files or plots.

A prompt is the unit of every interval: its turns and repeats are put together before prompts are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from . import metrics

if TYPE_CHECKING:
    import pandas as pd

BY = ("engine", "verifier", "verifier_format", "k")
PROMPT = ["prompt_set_hash", "question_id"]
# What a row and its k=0 row have in common.
BASELINE = ("run_id", "engine", "verifier", "verifier_format", "draft", "policy", *PROMPT, "turn", "repeat")


def summarize(table: pd.DataFrame, by: Sequence[str] = BY, *, seed: int = 0) -> pd.DataFrame:
    """One row per group of `by`, sorted.

    Columns, NaN where undefined:
        num_prompts, num_failed (rows), num_rounds;
        mean_acceptance_length (bonus counted, over rounds) with _low and _high, mean_acceptance_length_over_prompts (bonus counted),
        mean_accepted_tokens (bonus not counted, over rounds), draft_acceptance_rate (over proposed tokens);
        decode_tokens_per_second (tokens after the first / decode seconds, over all tokens) with _low, _high and _std_over_repeats,
        end_to_end_tokens_per_second;
        speedup (decode) with _low and _high and end_to_end_speedup, against the k=0 rows of the same prompts, turns, repeats and run;
        break_even_length, the mean acceptance length at which k would be as fast as those rows (seconds per round / per plain token);
        num_unlike_k0, how many outputs differ from the k=0 row's;
        draft_share, verify_share, other_share of decode seconds.

    Raises:
        DataError: columns are missing.
    """
    import pandas as pd

    _require(table, (*by, *BASELINE, "status", "accepted_per_round", "proposed_per_round", "token_ids", "decode_s", "total_s"))
    paired = pair_with_baseline(table)

    def figures(group: pd.DataFrame) -> dict[str, Any]:
        ok = group[group.status == "ok"]
        return {**_acceptance(ok, seed), **_speed(ok, seed), "num_failed": len(group) - len(ok)}

    rows = [dict(zip(by, key, strict=True)) | figures(group) for key, group in paired.groupby(list(by), sort=True, dropna=False)]
    return pd.DataFrame(rows, columns=[*by, *figures(paired.iloc[:0])])


def per_position_rates(table: pd.DataFrame, by: Sequence[str] = BY, *, seed: int = 0) -> pd.DataFrame:
    """One row per group of `by` and draft position (from 1): `unconditional` and `conditional` rate, each with `_low` and `_high`.

    Both are over the rounds that proposed the position, bonus not counted; NaN where no round did, or none reached it. Groups without
    a proposal have no rows.
    """
    import pandas as pd

    _require(table, (*by, "status", *PROMPT, "accepted_per_round", "proposed_per_round"))
    rows = []
    for key, group in table[table.status == "ok"].groupby(list(by), sort=True, dropna=False):
        counts = [metrics.flatten(*_rounds(prompt)) for _, prompt in group.groupby(PROMPT)]
        for position in range(max((int(p.max()) for _, p in counts if p.size), default=0)):
            row: dict[str, Any] = {**dict(zip(by, key, strict=True)), "position": position + 1, "num_prompts": len(counts)}
            hits = [(a > position).sum() for a, _ in counts]
            offered = [(p > position).sum() for _, p in counts]
            reached = [((a >= position) & (p > position)).sum() for a, p in counts]
            _put(row, "unconditional", np.array([hits, offered]).T, metrics.ratio, seed)
            _put(row, "conditional", np.array([hits, reached]).T, metrics.ratio, seed)
            rows.append(row)
    names = [f"{rate}{end}" for rate in ("unconditional", "conditional") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=[*by, "position", "num_prompts", *names])


def pair_with_baseline(table: pd.DataFrame) -> pd.DataFrame:
    """The table with baseline_decode_s, baseline_total_s, baseline_tokens and baseline_token_ids of each row's k=0 row.

    They are missing where that row failed or was not run.

    Raises:
        DataError: two k=0 rows for one prompt, turn and repeat of a run.
    """
    keys = list(BASELINE)
    zero = table[(table.k == 0) & (table.status == "ok")]
    twice = zero[zero.duplicated(keys)]
    if len(twice):
        first = twice.iloc[0]
        raise DataError(f"{len(twice)} k=0 rows occur twice, first question {first.question_id} of run {first.run_id}; expected one each")
    names = {name: f"baseline_{name}" for name in ("decode_s", "total_s", "token_ids")} | {"num_output_tokens": "baseline_tokens"}
    return table.merge(zero[[*keys, *names]].rename(columns=names), how="left", on=keys)


def _acceptance(ok: pd.DataFrame, seed: int) -> dict[str, Any]:
    prompts = [_rounds(prompt) for _, prompt in ok.groupby(PROMPT)]
    accepted, proposed = ([_joined(prompt[i]) for prompt in prompts] for i in (0, 1))
    out: dict[str, Any] = {"num_prompts": len(prompts), "num_rounds": sum(map(len, accepted))}
    sums = np.array([(sum(rounds) + len(rounds), len(rounds)) for rounds in accepted if rounds]).reshape(-1, 2)
    _put(out, "mean_acceptance_length", sums, metrics.ratio, seed)
    figures = {
        "mean_acceptance_length_over_prompts": metrics.mean_acceptance_length_over_prompts(accepted),
        "mean_accepted_tokens": metrics.mean_accepted_tokens(accepted),
        "draft_acceptance_rate": metrics.draft_acceptance_rate(accepted, proposed),
    }
    return out | {name: np.nan if value is None else value for name, value in figures.items()}


def _speed(ok: pd.DataFrame, seed: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    ok = ok.assign(decode_tokens=ok.num_output_tokens - 1, baseline_decode_tokens=ok.baseline_tokens - 1)
    timed = ok[(ok.decode_tokens > 0) & ok.decode_s.notna()]
    _put(out, "decode_tokens_per_second", _sums(timed, "decode_tokens", "decode_s"), metrics.ratio, seed)
    repeats = timed.groupby("repeat")[["decode_tokens", "decode_s"]].sum()
    out["decode_tokens_per_second_std_over_repeats"] = (repeats.decode_tokens / repeats.decode_s).std()
    whole = ok[ok.total_s.notna()]
    out["end_to_end_tokens_per_second"] = whole.num_output_tokens.sum() / whole.total_s.sum() if len(whole) else np.nan
    paired = timed[timed.baseline_decode_tokens > 0]
    _put(out, "speedup", _sums(paired, "decode_tokens", "decode_s", "baseline_decode_s", "baseline_decode_tokens"), _speedup, seed)
    rounds = paired.accepted_per_round.map(len).sum()
    plain = paired.baseline_decode_s.sum() / paired.baseline_decode_tokens.sum() if rounds else np.nan
    out["break_even_length"] = metrics.break_even_length(paired.decode_s.sum() / rounds, plain) if rounds else np.nan
    paired = whole[whole.baseline_total_s.notna()]
    sums = _sums(paired, "num_output_tokens", "total_s", "baseline_total_s", "baseline_tokens")
    out["end_to_end_speedup"] = float(_speedup(sums.sum(0))) if len(paired) else np.nan
    compared = ok[ok.baseline_tokens.notna()]
    unlike = [list(a) != list(b) for a, b in zip(compared.token_ids, compared.baseline_token_ids, strict=True)]
    out["num_unlike_k0"] = sum(unlike) if len(compared) else np.nan
    for part in ("draft", "verify", "other"):
        seconds = timed[f"{part}_s"].sum(min_count=1)
        out[f"{part}_share"] = seconds / timed.decode_s.sum() if len(timed) else np.nan
    return out


def _speedup(sums: metrics.Array) -> metrics.Array:
    tokens, seconds, baseline_seconds, baseline_tokens = np.moveaxis(sums, -1, 0)
    faster: metrics.Array = (tokens / seconds) * (baseline_seconds / baseline_tokens)
    return faster


def _sums(rows: pd.DataFrame, *columns: str) -> metrics.Array:
    """[prompts, columns]: what each prompt adds, its turns and repeats together."""
    sums: metrics.Array = rows.groupby(PROMPT)[list(columns)].sum().to_numpy(dtype=np.float64)
    return sums


def _put(out: dict[str, Any], name: str, sums: metrics.Array, statistic: Any, seed: int) -> None:
    known = len(sums) > 0 and sums[:, 1].sum() > 0
    interval = metrics.bootstrap(sums, statistic, seed=seed) if known else None
    out[name] = np.nan if interval is None else interval.estimate
    out[f"{name}_low"] = np.nan if interval is None or interval.low is None else interval.low
    out[f"{name}_high"] = np.nan if interval is None or interval.high is None else interval.high


def _rounds(rows: pd.DataFrame) -> tuple[list[list[int]], list[list[int]]]:
    return [list(counts) for counts in rows.accepted_per_round], [list(counts) for counts in rows.proposed_per_round]


def _joined(counts: list[list[int]]) -> list[int]:
    return [count for rounds in counts for count in rounds]


def _require(table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in dict.fromkeys(columns) if name not in table.columns]
    if missing:
        raise DataError(f"the table lacks the columns {', '.join(missing)}; expected one of `specbench.benchmark` or `records.load_runs`")

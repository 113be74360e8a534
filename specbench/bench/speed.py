"""Speeds of one configuration, from its rows and the k=0 rows beside them.

What enters: rows that went well. What leaves: figures by name, NaN where undefined. It does not know files, groups or plots.

Rows of one batch share a clock. Throughput counts a batch's seconds once: each of its rows stands for an equal share of them. Latencies are
those of the single sequence. With batch size 1 the two are the same thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from . import metrics

if TYPE_CHECKING:
    import pandas as pd

PROMPT = ["prompt_set_hash", "question_id"]
ADAPTIVE = "adaptive chain"  # the draft_shape of chains whose length is chosen for each round
LIMITS = ("top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# What a row and its k=0 row have in common.
BASELINE = (
    "run_id", "engine", "verifier", "verifier_format", "draft", "policy", "batch_size", "temperature", *LIMITS,
    *PENALTIES, "dtype", "device", "max_new_tokens", *PROMPT, "turn", "repeat",
)  # fmt: skip
CONFIGURATION = [
    "run_id", "engine", "verifier", "verifier_format", "k", "proposer", "draft_shape", "draft_p_min", "draft_sampling", "batch_size",
    "temperature", "repeat", "batch",
]  # fmt: skip
PARTS = ("draft", "verify", "other")


def pair_with_baseline(table: pd.DataFrame) -> pd.DataFrame:
    """The table with clock_s and total_clock_s of each row (its share of its batch's decode and total seconds), and of its k=0 row
    baseline_decode_s, baseline_clock_s, baseline_total_clock_s, baseline_verify_s, baseline_rounds, baseline_tokens and baseline_token_ids.

    The latter are missing where that row failed or was not run.

    Raises:
        DataError: two k=0 rows for one prompt, turn and repeat of a run.
    """
    keys = list(BASELINE)
    timed = _with_clock(table.reset_index(drop=True))  # tables that were put together may share labels
    zero = timed[(timed.k == 0) & (timed.status == "ok")]
    twice = zero[zero.duplicated(keys)]
    if len(twice):
        first = twice.iloc[0]
        raise DataError(f"{len(twice)} k=0 rows occur twice, first question {first.question_id} of run {first.run_id}; expected one each")
    zero = zero.assign(rounds=zero.accepted_per_round.map(len))
    names = {name: f"baseline_{name}" for name in ("decode_s", "clock_s", "total_clock_s", "verify_s", "rounds", "token_ids")}
    names |= {"num_output_tokens": "baseline_tokens"}
    return timed.merge(zero[[*keys, *names]].rename(columns=names), how="left", on=keys)


def _with_clock(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of one batch ran together: its seconds are those of its slowest row, and each row stands for its share of them."""
    ok = table[table.status == "ok"]
    batched = ok[ok.batch_size > 1]
    clock = table.assign(clock_s=table.decode_s, total_clock_s=table.total_s)
    if len(batched):
        groups = batched.groupby(CONFIGURATION, dropna=False)
        for share, whole in (("clock_s", "decode_s"), ("total_clock_s", "total_s")):
            clock.loc[batched.index, share] = groups[whole].transform("max") / groups[whole].transform("size")
    return clock


def speed_figures(ok: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Figures of the rows of one group, with what `pair_with_baseline` added.

    decode_tokens_per_second (tokens after the first / decode seconds, over all sequences together) with _low, _high and _std_over_repeats;
    end_to_end_tokens_per_second; ttft_s (mean over outputs) with _low and _high; inter_token_latency_s (decode seconds of a sequence / its
    tokens after the first, over all tokens) with _low and _high; emission_gap_p95_s (between the rounds that bring a sequence its tokens);
    speedup (decode) with _low and _high and end_to_end_speedup, against the k=0 rows of the same prompts, turns, repeats, batch size,
    sampling and run; break_even_length, the mean acceptance length at which k would be as fast as those rows (seconds per round / per plain
    token); verify_cost T(k+1) / T(1) and draft_cost, seconds of a round's parts over those of a plain pass, none of the three where
    rounds differ in length by choice; num_unlike_k0, how many outputs
    differ from the k=0 row's; draft_share, verify_share, other_share of decode seconds; peak_memory_bytes, the largest.
    """
    out: dict[str, Any] = {}
    ok = ok.assign(decode_tokens=ok.num_output_tokens - 1, baseline_decode_tokens=ok.baseline_tokens - 1)
    timed = ok[(ok.decode_tokens > 0) & ok.decode_s.notna()]
    put(out, "decode_tokens_per_second", _sums(timed, "decode_tokens", "clock_s"), metrics.ratio, seed)
    repeats = timed.groupby("repeat")[["decode_tokens", "clock_s"]].sum()
    out["decode_tokens_per_second_std_over_repeats"] = (repeats.decode_tokens / repeats.clock_s).std()
    whole = ok[ok.total_s.notna()]
    out["end_to_end_tokens_per_second"] = whole.num_output_tokens.sum() / whole.total_clock_s.sum() if len(whole) else np.nan
    first = ok[ok.prefill_s.notna()].assign(outputs=1)
    put(out, "ttft_s", _sums(first, "prefill_s", "outputs"), metrics.ratio, seed)
    put(out, "inter_token_latency_s", _sums(timed, "decode_s", "decode_tokens"), metrics.ratio, seed)
    gaps: Any = np.concatenate([np.diff(np.asarray(at, float)) for at in ok.emitted_at_s] or [np.empty(0)]) if "emitted_at_s" in ok else []
    out["emission_gap_p95_s"] = float(np.percentile(gaps, 95)) if len(gaps) else np.nan
    out |= _against_plain(timed, whole, seed)
    compared = ok[ok.baseline_tokens.notna()]
    unlike = [list(a) != list(b) for a, b in zip(compared.token_ids, compared.baseline_token_ids, strict=True)]
    out["num_unlike_k0"] = sum(unlike) if len(compared) else np.nan
    for part in PARTS:
        out[f"{part}_share"] = _seconds(timed, part) / timed.decode_s.sum() if len(timed) else np.nan
    out["peak_memory_bytes"] = (
        float(ok.peak_memory_bytes.max()) if "peak_memory_bytes" in ok and ok.peak_memory_bytes.notna().any() else np.nan
    )
    return out


def _against_plain(timed: pd.DataFrame, whole: pd.DataFrame, seed: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    paired = timed[timed.baseline_decode_tokens > 0]
    put(out, "speedup", _sums(paired, "decode_tokens", "clock_s", "baseline_clock_s", "baseline_decode_tokens"), speed_ratio, seed)
    # rounds of different lengths have no one cost
    varied = "draft_shape" in paired and ((paired.draft_shape == ADAPTIVE) | paired.draft_p_min.notna()).any()
    rounds = 0 if varied else paired.accepted_per_round.map(len).sum()
    plain = paired.baseline_decode_s.sum() / paired.baseline_decode_tokens.sum() if rounds else np.nan
    out["break_even_length"] = metrics.break_even_length(paired.decode_s.sum() / rounds, plain) if rounds else np.nan
    passes = paired.baseline_verify_s.sum() / paired.baseline_rounds.sum() if rounds and paired.baseline_rounds.sum() else np.nan
    for part in ("verify", "draft"):
        out[f"{part}_cost"] = _seconds(paired, part) / rounds / passes if passes > 0 else np.nan
    paired = whole[whole.baseline_total_clock_s.notna()]
    sums = _sums(paired, "num_output_tokens", "total_clock_s", "baseline_total_clock_s", "baseline_tokens")
    out["end_to_end_speedup"] = float(speed_ratio(sums.sum(0))) if len(paired) else np.nan
    return out


def _seconds(rows: pd.DataFrame, part: str) -> Any:
    """Seconds of a part of decoding; the draft's prompt pass is the draft's."""
    seconds = rows[f"{part}_s"].sum(min_count=1)
    return seconds + rows.draft_prefill_s.sum() if part == "draft" and "draft_prefill_s" in rows else seconds


def speed_ratio(sums: metrics.Array) -> metrics.Array:
    """(tokens / seconds) / (baseline tokens / baseline seconds) of sums [..., tokens, seconds, baseline seconds, baseline tokens]."""
    tokens, seconds, baseline_seconds, baseline_tokens = np.moveaxis(sums, -1, 0)
    faster: metrics.Array = (tokens / seconds) * (baseline_seconds / baseline_tokens)
    return faster


def _sums(rows: pd.DataFrame, *columns: str) -> metrics.Array:
    """[prompts, columns]: what each prompt adds, its turns and repeats together."""
    sums: metrics.Array = rows.groupby(PROMPT)[list(columns)].sum().to_numpy(dtype=np.float64)
    return sums


def put(out: dict[str, Any], name: str, sums: metrics.Array, statistic: Callable[[metrics.Array], metrics.Array], seed: int) -> None:
    """Set `name`, `name`_low and `name`_high of `out` to a figure of sums over prompts and its interval."""
    known = len(sums) > 0 and sums[:, 1].sum() > 0
    interval = metrics.bootstrap(sums, statistic, seed=seed) if known else None
    out[name] = np.nan if interval is None else interval.estimate
    out[f"{name}_low"] = np.nan if interval is None or interval.low is None else interval.low
    out[f"{name}_high"] = np.nan if interval is None or interval.high is None else interval.high

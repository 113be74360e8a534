"""The figures that matter, on the bundled pairs: `python -m specbench.bench.headline`.

What enters: pairs, prompts and a plain verifier. What leaves: a dictionary of figures; as a command, a table with one JSON line after
it. It measures through `runner` and `load_cost` and derives through `summary`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..pair import Checkpoint, Pair
from .load_cost import draft_load_cost
from .prompts import Prompt, limit_per_category, load_prompts
from .records import new_run
from .runner import benchmark
from .session import runs_root
from .summary import summarize

if TYPE_CHECKING:
    import pandas as pd

K = (0, 1, 3, 5)
AT_K = 3


def measure(
    pairs: Mapping[str, Pair], baseline: Checkpoint, prompts: Sequence[Prompt], run_dir: Path, k: Sequence[int] = K, **options: Any
) -> dict[str, Any]:
    """Benchmark every pair in turns with transformers' own loop on `baseline`, into folders below `run_dir`; load each draft once alone.

    Args:
        k: must hold 0, the baseline of every speedup. options: see `runner.benchmark` (repeats, max_new_tokens, device, dtype, progress).

    Returns:
        Per pair, by its name: the figures of `figures`, and `draft_load` (see `load_cost.LoadCost`) with `peak_over_file`.
    """
    if 0 not in k:
        raise DataError(f"k is {list(k)}; expected 0 among them, since every speedup is over k=0")
    found = {}
    for name, pair in pairs.items():
        table = benchmark(pair, prompts, k, baseline=baseline, run_dir=run_dir / name, **options)
        cost = draft_load_cost(pair, device=options.get("device", "auto"), dtype=options.get("dtype", "auto"))
        peak = cost.host_peak_bytes if cost.device_peak_bytes is None else cost.device_peak_bytes
        load = {**asdict(cost), "peak_over_file": None if peak is None else peak / cost.file_bytes}
        found[name] = {**figures(table), "draft_load": load}
    return found


def figures(table: pd.DataFrame, k: int = AT_K) -> dict[str, Any]:
    """The headline of one run: acceptance at `k` (else at the largest k), plain speed against transformers, the best k.

    None where undefined. Intervals are 95 % over prompts. `k0_over_transformers` is a ratio of decode tokens/s over all prompts of the run.
    """
    summary = summarize(table)
    own, other = (summary[summary.engine == engine].set_index("k") for engine in ("specbench", "transformers"))
    ks = own.index.to_numpy()
    plain = own.decode_tokens_per_second.get(0)
    theirs = other.decode_tokens_per_second.get(0)
    speculative = own[own.index > 0]
    best: Any = speculative.speedup.idxmax() if speculative.speedup.notna().any() else None
    at = k if k in speculative.index else max(speculative.index, default=None)
    return {
        "verifier_format": own.verifier_format.iloc[0],
        "num_prompts": int(own.num_prompts.max()),
        "num_failed": int(summary.num_failed.sum()),
        "num_unlike_k0": int(speculative.num_unlike_k0.sum()),
        "k": at,
        "mean_acceptance_length": _interval(speculative, at, "mean_acceptance_length"),
        "decode_tokens_per_second": {int(value): _number(own.decode_tokens_per_second[value]) for value in ks},
        "speedup": {int(value): _interval(own, value, "speedup") for value in ks if value},
        "best_k": None if best is None else int(best),
        "best_speedup": _interval(speculative, best, "speedup"),
        "transformers_tokens_per_second": _number(theirs),
        "k0_over_transformers": _number(plain / theirs) if plain and theirs else None,
    }


def to_frame(found: Mapping[str, Any]) -> pd.DataFrame:
    """The figures of `measure` as a table to read: a column per pair."""
    import pandas as pd

    def interval(value: Mapping[str, Any] | None) -> str:
        if value is None:
            return "n/a"
        return f"{value['estimate']:.2f}" + (f" ({value['low']:.2f} to {value['high']:.2f})" if value["low"] is not None else "")

    columns = {}
    for name, f in found.items():
        load = f["draft_load"]
        speeds = {f"decode tokens/s at k={k}": f"{speed:.1f}" for k, speed in f["decode_tokens_per_second"].items() if speed is not None}
        peak = load["host_peak_bytes"] if load["device_peak_bytes"] is None else load["device_peak_bytes"]
        columns[name] = {
            f"mean acceptance length at k={f['k']} (bonus counted, over rounds)": interval(f["mean_acceptance_length"]),
            **speeds,
            "decode tokens/s of transformers generate, plain verifier": _shown(f["transformers_tokens_per_second"], ".1f"),
            "k=0 over transformers": _shown(f["k0_over_transformers"], ".2f"),
            f"best k: {f['best_k']}, speedup over k=0": interval(f["best_speedup"]),
            "draft load (s)": f"{load['seconds']:.2f}",
            "draft load, peak extra memory (MB)": _shown(None if peak is None else peak / 1e6, ".1f"),
            "draft files (MB)": f"{load['file_bytes'] / 1e6:.1f}",
            "peak over file size": _shown(load["peak_over_file"], ".2f"),
            "prompts (failed rows)": f"{f['num_prompts']} ({f['num_failed']})",
            "outputs unlike k=0": str(f["num_unlike_k0"]),
        }
    return pd.DataFrame(columns).fillna("")


def _interval(rows: pd.DataFrame, k: Any, figure: str) -> dict[str, float | None] | None:
    if k is None or rows[figure].isna()[k]:
        return None
    return {"estimate": _number(rows[figure][k]), "low": _number(rows[f"{figure}_low"][k]), "high": _number(rows[f"{figure}_high"][k])}


def _number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _shown(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the bundled pairs; see --help."""
    from ..bundled import bundled_pair

    parser = argparse.ArgumentParser(prog="python -m specbench.bench.headline", description=main.__doc__)
    parser.add_argument("--pairs", nargs="+", default=["bf16", "w4a16"], help="bundled pairs (default: bf16 w4a16)")
    parser.add_argument("--k", nargs="+", type=int, default=list(K), help="numbers of speculative tokens, with 0 (default: 0 1 3 5)")
    parser.add_argument("--per-category", type=int, default=8, help="prompts of each of the 8 categories (default: 8, all)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--run-dir", type=Path, help="folder to fill (default: a new one)")
    options = parser.parse_args(arguments)
    prompts = limit_per_category(load_prompts(), options.per_category)
    folder = options.run_dir or new_run(runs_root(), "headline")
    pairs = {name: bundled_pair(name) for name in options.pairs}
    limits = {"repeats": options.repeats, "max_new_tokens": options.max_new_tokens, "device": options.device}
    found = measure(pairs, bundled_pair("bf16").verifier, prompts, folder, options.k, **limits)
    sys.stdout.write(to_frame(found).to_string() + "\n")
    sys.stdout.write(json.dumps({"run_dir": str(folder), "pairs": found}, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()

"""One draft beside the same verifier in many formats: what quantization does to text, acceptance, verifying cost and speed.

What enters: pairs by format name, prompts. What leaves: a row per format, all from one run on one machine. It does not know how a format is
stored.

Predicted speedups are `cost_model`'s, from parts of a round that `round_costs` times alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from ..pair import Pair

COLUMNS = (
    "verifier_format", "perplexity", "mean_acceptance_length", "mean_acceptance_length_low", "mean_acceptance_length_high", "verify_cost",
    "draft_cost", "predicted_speedup", "speedup", "speedup_low", "speedup_high", "plain_ms",
)  # fmt: skip


def across_formats(
    pairs: Mapping[str, Pair],
    prompts: Any,
    *,
    num_speculative_tokens: int = 3,
    max_new_tokens: int = 64,
    perplexity_ids: Callable[[Pair], Sequence[Sequence[int]]] | None = None,
    device: str = "auto",
    progress: bool = True,
) -> pd.DataFrame:
    """Measure every pair.

    Args:
        pairs: by format name; the draft is loaded anew beside each verifier.
        prompts: as `benchmark` takes them.
        perplexity_ids: token ids on which a pair's verifier is scored; None leaves perplexity out.

    Returns:
        verifier_format | perplexity | mean_acceptance_length (bonus counted, over rounds) with _low and _high | verify_cost T(k + 1) / T(1)
        | draft_cost, in units of T(1) | predicted_speedup | speedup (decode, against k = 0 of the same run) with _low and _high | plain_ms,
        T(1).
    """
    import pandas as pd
    from tqdm.auto import tqdm

    from ..load import load_draft
    from ..verifier import load_verifier
    from .perplexity import perplexity
    from .round_costs import round_seconds
    from .runner import benchmark
    from .summary import summarize

    k, rows = num_speculative_tokens, []
    for name, pair in tqdm(pairs.items(), desc="formats", disable=not progress):
        table = benchmark(pair, prompts, k=(0, k), max_new_tokens=max_new_tokens, device=device, progress=False)
        found: Any = summarize(table).set_index("k").loc[k]
        verifier = load_verifier(pair, device=device)
        seconds = round_seconds(verifier, load_draft(pair, device=device, verifier=verifier), k)
        tau = float(found.mean_acceptance_length)
        rows.append(
            {
                "verifier_format": name,
                "perplexity": None if perplexity_ids is None else perplexity(verifier, perplexity_ids(pair)),
                **{c: found[c] for c in ("mean_acceptance_length", "mean_acceptance_length_low", "mean_acceptance_length_high")},
                "verify_cost": seconds.cost.verify,
                "draft_cost": seconds.cost.draft,
                "predicted_speedup": seconds.cost.speedup(tau),
                **{c: found[c] for c in ("speedup", "speedup_low", "speedup_high")},
                "plain_ms": 1e3 * seconds.plain_s,
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def compare_formats(names: Sequence[str], prompts: Any, **options: Any) -> pd.DataFrame:
    """`across_formats` over bundled verifiers, by name; an empty table for no name."""
    from ..bundled import bundled_pair, text_ids

    pairs = {name: bundled_pair(name) for name in names}
    return across_formats(pairs, prompts, perplexity_ids=lambda pair: text_ids("perplexity", pair.verifier.path), **options)

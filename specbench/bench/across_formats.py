"""One draft beside the same verifier in many formats: what quantization does to text, acceptance, verifying cost and speed.

What enters: pairs by format name, prompts. What leaves: a row per format, all from one run on one machine. It does not know how a format is
stored.

Predicted speedup is mean acceptance length / (T(k + 1) / T(1) + cost of the draft / T(1)), with T(n) the seconds of one verifier pass over
n
new tokens: every round costs one pass over k + 1 tokens and the draft's k steps, and yields that many tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..decode.draft import EagleDraft
from ..decode.verify import verify

if TYPE_CHECKING:
    import pandas as pd

    from ..models.decoder import Decoder
    from ..models.eagle3 import Eagle3
    from ..pair import Pair

COLUMNS = (
    "verifier_format", "perplexity", "mean_acceptance_length", "mean_acceptance_length_low", "mean_acceptance_length_high", "verify_cost",
    "draft_cost", "predicted_speedup", "speedup", "speedup_low", "speedup_high", "plain_ms",
)  # fmt: skip
CONTEXT = 128  # committed tokens before the timed pass
PASSES = 15  # timed passes, after three that warm up; the median counts


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
    from .runner import benchmark
    from .summary import summarize

    k, rows = num_speculative_tokens, []
    for name, pair in tqdm(pairs.items(), desc="formats", disable=not progress):
        table = benchmark(pair, prompts, k=(0, k), max_new_tokens=max_new_tokens, device=device, progress=False)
        found: Any = summarize(table).set_index("k").loc[k]
        verifier = load_verifier(pair, device=device)
        costs = round_costs(verifier, load_draft(pair, device=device, verifier=verifier), k)
        tau = float(found.mean_acceptance_length)
        rows.append(
            {
                "verifier_format": name,
                "perplexity": None if perplexity_ids is None else perplexity(verifier, perplexity_ids(pair)),
                **{c: found[c] for c in ("mean_acceptance_length", "mean_acceptance_length_low", "mean_acceptance_length_high")},
                "verify_cost": costs["verify_s"] / costs["plain_s"],
                "draft_cost": costs["draft_s"] / costs["plain_s"],
                "predicted_speedup": tau * costs["plain_s"] / (costs["verify_s"] + costs["draft_s"]),
                **{c: found[c] for c in ("speedup", "speedup_low", "speedup_high")},
                "plain_ms": 1e3 * costs["plain_s"],
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def compare_formats(names: Sequence[str], prompts: Any, **options: Any) -> pd.DataFrame:
    """`across_formats` over bundled verifiers, by name; an empty table for no name."""
    from ..bundled import bundled_pair, text_ids

    pairs = {name: bundled_pair(name) for name in names}
    return across_formats(pairs, prompts, perplexity_ids=lambda pair: text_ids("perplexity", pair.verifier.path), **options)


@torch.inference_mode()
def round_costs(verifier: Decoder, draft: Eagle3, k: int) -> dict[str, float]:
    """Median seconds of one pass over one new token (plain_s), over k + 1 (verify_s), and of the draft's part of a round (draft_s)."""
    length = CONTEXT + 2 * (k + 2)
    device = verifier.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, verifier.config.vocab_size, (1, length), generator=generator).to(device)
    slots = torch.arange(length, device=device)[None]
    cache, aux_layers = verifier.new_cache(length), draft.aux_layers
    context, lengths = slots[:, :CONTEXT], torch.tensor([CONTEXT + 1], device=device)
    _, aux = verifier(ids[:, :CONTEXT], verifier.step(context, CONTEXT, causal=True), cache, aux_layers)
    chain = EagleDraft(draft)
    chain.begin(1, length)
    chain.extend(ids[:, 1 : CONTEXT + 1], aux, context, lengths - 2, 0, CONTEXT, True)
    pending, proposal = ids[:, CONTEXT : CONTEXT + 1], chain.propose(k, lengths, CONTEXT + 1)
    scored = verify(verifier, cache, pending, proposal, lengths, CONTEXT + 1, aux_layers)

    def draft_round() -> None:
        chain.propose(k, lengths, CONTEXT + 1)
        end = CONTEXT + k + 1
        chain.extend(ids[:, CONTEXT + 1 : end + 1], scored.aux, slots[:, CONTEXT:end], lengths * 0 + k, 0, end, False)

    return {
        "plain_s": _median(lambda: verify(verifier, cache, pending, None, lengths, CONTEXT + 1, ()).scores.argmax(-1), device),
        "verify_s": _median(lambda: verify(verifier, cache, pending, proposal, lengths, CONTEXT + 1, aux_layers).scores.argmax(-1), device),
        "draft_s": _median(draft_round, device),
    }


def _median(call: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(3 + PASSES):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])

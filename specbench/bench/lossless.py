"""Decode prompts with and without a draft and compare: does speculation change an output?

What enters: a pair, prompts, k, a dtype. What leaves: both generations and a table of comparisons. How two outputs are compared is
`decode.lossless`'s matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..decode.lossless import compare
from ..load import load_draft
from ..pair import Pair
from ..text import Generations, generate, load_tokenizer
from ..verifier import load_verifier
from .prompts import Prompt

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class LosslessRun:
    """One check at one dtype.

    plain, speculative: the generations at k=0 and at k. table: a row per prompt, the fields of `decode.lossless.Comparison` and more.
    """

    dtype: str
    plain: Generations
    speculative: Generations
    tokenizer: Any
    table: pd.DataFrame


def check_lossless(
    pair: Pair,
    prompts: Sequence[Prompt],
    num_speculative_tokens: int,
    *,
    max_new_tokens: int = 128,
    dtype: str = "auto",
    device: str = "auto",
    bound: float | None = None,
    progress: bool = True,
) -> LosslessRun:
    """Decode the first turn of every prompt at k=0 and at k, greedily, and compare.

    Args:
        dtype: "auto" is the verifier's own. In "float32" outputs are expected to be identical; lower precision has near ties.
        bound: see `decode.lossless.compare`.
    """
    import pandas as pd

    verifier = load_verifier(pair, device=device, dtype=dtype)
    draft = load_draft(pair, device=device, dtype=dtype, verifier=verifier)
    tokenizer, texts = load_tokenizer(verifier), [prompt.turns[0] for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "tokenizer": tokenizer, "progress": progress}
    plain = generate(verifier, None, texts, num_speculative_tokens=0, **options)
    speculative = generate(verifier, draft, texts, num_speculative_tokens=num_speculative_tokens, **options)
    name = str(verifier.dtype).removeprefix("torch.")
    rows = []
    for prompt, p, s in zip(prompts, plain, speculative, strict=True):
        check = compare(verifier, p.prompt_ids, p.token_ids, s.token_ids, bound=bound)
        known = {"dtype": name, "question_id": prompt.question_id, "category": prompt.category, "tokens": len(s.token_ids)}
        rows.append({**known, **asdict(check), "lossless": check.lossless})
    return LosslessRun(name, plain, speculative, tokenizer, pd.DataFrame(rows))


def summarize_lossless(table: pd.DataFrame) -> pd.DataFrame:
    """Per dtype: prompts, how many outputs are identical, how many lossless, near and exact ties, the largest deficit and its bound."""
    groups = table.groupby("dtype", sort=False)
    return groups.agg(
        prompts=("question_id", "size"),
        identical=("identical", "sum"),
        lossless=("lossless", "sum"),
        near_ties=("near_ties", "sum"),
        exact_ties=("exact_ties", "sum"),
        largest_deficit=("largest_deficit", "max"),
        bound=("bound", "first"),
    ).reset_index()

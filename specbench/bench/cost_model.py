"""The cost model of speculative decoding: what a round costs, what it yields, and whether that is faster than plain decoding.

What enters: lengths and costs, in units of T(1), one plain pass of the verifier. What leaves: speedups, the length at which a draft breaks
even, and a plain word about it. It does not know how anything was measured.

A round costs one verifier pass over k + 1 tokens, T(k + 1), and the draft's k steps; it yields the mean acceptance length. So speedup =
length / (T(k + 1) / T(1) + draft / T(1)), and the denominator is the length at which a draft breaks even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DataError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Parts of a round in units of T(1). verify: T(k + 1) / T(1). draft: all steps of the draft."""

    verify: float
    draft: float

    def __post_init__(self) -> None:
        if not (self.verify > 0 and self.draft >= 0):
            raise DataError(f"a round costs {self.verify} for verifying and {self.draft} for drafting; expected above 0 and from 0")

    @classmethod
    def of_steps(cls, k: int, verify: float, draft_step: float) -> RoundCost:
        """A chain of k whose every step costs `draft_step`."""
        return cls(verify, k * draft_step)

    @property
    def break_even_length(self) -> float:
        """Mean acceptance length (bonus counted, over drafts) at which rounds are as fast as plain tokens."""
        return self.verify + self.draft

    def speedup(self, mean_acceptance_length: float) -> float:
        """Decode speedup over plain decoding at that length; below 1 is slower."""
        return mean_acceptance_length / self.break_even_length

    def verdict(self, mean_acceptance_length: float, measured_speedup: float | None = None) -> str:
        """One sentence: faster or slower, by how much, where it breaks even, and what was measured."""
        modelled = self.speedup(mean_acceptance_length)
        word = "faster" if modelled > 1.005 else "slower" if modelled < 0.995 else "no faster"
        said = (
            f"{word}: {modelled:.2f} times plain decoding at a mean acceptance length of {mean_acceptance_length:.2f}; "
            f"it breaks even at {self.break_even_length:.2f} (verifying {self.verify:.2f}, drafting {self.draft:.2f})"
        )
        if measured_speedup is None or measured_speedup != measured_speedup:
            return said
        contradicts = (measured_speedup < 1) != (modelled < 1)
        return f"{said}; measured {measured_speedup:.2f}" + (", on the other side of 1" if contradicts else "")


def compare(summary: pd.DataFrame) -> pd.DataFrame:
    """Modelled beside measured: a row per configuration of a summary (`summary.summarize`) that speculates and has a k=0 beside it.

    Returns:
        The columns that tell configurations apart, then mean_acceptance_length, verify_cost, draft_cost, break_even_length (modelled),
        measured_break_even_length (host time counted), predicted_speedup, speedup, verdict.
    """
    import pandas as pd

    known = summary[(summary.k > 0) & summary.verify_cost.notna() & summary.draft_cost.notna() & summary.mean_acceptance_length.notna()]
    keys = list(summary.columns[: list(summary.columns).index("num_prompts")])
    rows = []
    for row in known.to_dict("records"):
        cost = RoundCost(row["verify_cost"], row["draft_cost"])
        length = row["mean_acceptance_length"]
        rows.append(
            {
                **{name: row[name] for name in keys},
                "mean_acceptance_length": length, "verify_cost": cost.verify, "draft_cost": cost.draft,
                "break_even_length": cost.break_even_length, "measured_break_even_length": row["break_even_length"],
                "predicted_speedup": cost.speedup(length), "speedup": row["speedup"], "verdict": cost.verdict(length, row["speedup"]),
            }
        )  # fmt: skip
    names = ("mean_acceptance_length", "verify_cost", "draft_cost", "break_even_length", "measured_break_even_length", "predicted_speedup")
    return pd.DataFrame(rows, columns=[*keys, *names, "speedup", "verdict"])


def draft_is_too_slow(k: int, draft_step: float, mean_acceptance_length: float) -> str | None:
    """What is wrong with a draft whose steps alone cost more than its tokens save, however cheap verifying is; None where they do not.

    The k steps save at most length - 1 plain passes, so `draft_step` * k > length - 1 is slower than plain decoding on any machine.
    """
    cost, gain = k * draft_step, mean_acceptance_length - 1
    if cost <= gain:
        return None
    return (
        f"slower whatever verifying costs: {k} draft steps of {draft_step:.2f} verifier steps cost {cost:.2f}, and save {gain:.2f} "
        f"(mean acceptance length {mean_acceptance_length:.2f}); a smaller draft, or a smaller k"
    )

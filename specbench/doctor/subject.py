"""What every check may look at, and how a check says what it found.

What enters: a pair whose files could be read. What leaves: `Subject`s and `Finding`s. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.families import Dialect
from ..pair import Checkpoint, Pair
from ..plan import dtype_setting
from ..policies import DRAFT, Policy
from ..settings import Question
from .findings import Affected, Finding, evidence_of
from .pages import explain

SIDES = ("verifier", "draft")
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Subject:
    """A pair, the draft as its family spells it, and what the user decided instead of the files."""

    pair: Pair
    dialect: Dialect
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """What the plan's rules are asked under the policy "draft"."""
        overrides = {**self.pair.speculative.plan_overrides(), **self.overrides}
        return Question(self.pair.draft, self.dialect, self.pair.verifier, DRAFT, overrides)

    @property
    def dtype(self) -> str:
        """What to build in: the plan's, and some dtype where the verifier names none, as only kinds of dtype are compared."""
        return "auto" if dtype_setting(self.question).value is not None else "bfloat16"

    def side(self, name: str) -> Checkpoint:
        checkpoint: Checkpoint = getattr(self.pair, name)
        return checkpoint


def finding(
    code: str,
    sentence: str,
    evidence: Mapping[str, Any] | None = None,
    *,
    severity: str | None = None,
    affected: tuple[Affected, ...] = (),
    fix: str = "",
) -> Finding:
    """A finding with what the page of its code says: severity, what a user sees, the fix, each unless given."""
    page = explain(code)
    return Finding(code, severity or page.severity, sentence, evidence_of(evidence or {}), affected, page.sees, fix or page.fix)


def place_of(subject: Subject, place: str) -> str:
    """A place as rules spell it, with the name of the file: "draft tensors: fc.weight" as "draft model.safetensors: fc.weight"."""
    side, _, rest = place.partition(" ")
    if side == "config.json:":
        return f"draft {place}"
    if side in SIDES and rest.startswith("tensors: "):
        name = rest.removeprefix("tensors: ")
        info = subject.dialect.tensors.get(name) if side == "draft" else subject.pair.verifier.tensors.get(name)
        return place if info is None else f"{side} {info.file.name}: {info.name}"
    return place


def engine_name(policy: Policy) -> str:
    """A policy as people call it: "vLLM 0.30.0 (Model Runner V2)"."""
    engine, _, release = policy.name.partition("-")
    release, _, runner = release.partition("-")
    named = {"vllm": "vLLM", "sglang": "SGLang of mid-2026", "eagle": "EAGLE's own code"}.get(engine, engine)
    return f"{named} {release}".strip() + (" (Model Runner V2)" if runner == "mrv2" else "")

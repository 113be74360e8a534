"""The rules of the plan, asked one by one under the policy "draft": what they refuse, guess or note becomes a finding.

What enters: a subject. What leaves: findings. It holds no rule of its own: `load_draft` refuses for the same reasons, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..aux_layers import KEY, aux_layers
from ..errors import ConfigError, SpecbenchError
from ..plan import brief, quantization_settings
from ..settings import Question, Setting, fusion, layers, residual, rope, sizes
from ..vocabulary import vocabulary
from .architectures import table_ends
from .findings import Finding
from .pages import explain
from .subject import Subject, finding, place_of

Rule = Callable[[Question], list[Setting]]
RULES: tuple[Rule, ...] = (quantization_settings, sizes, vocabulary, layers, fusion, residual, rope, aux_layers)
# Families whose trainers know the default layers only and write no ids, and whose code rotates with 10000 unless told otherwise.
DEFAULT_LAYERS, DEFAULT_ROPE = ("safeailab", "angelslim"), ("safeailab",)
ALWAYS = ("embedding-own", "embedding-borrowed", "head-borrowed", "map-identity", "map-from-mask", "rope-default")
NOTED = (
    "vocabulary-padded", "window-unread", "rope-differs", "dtype-cast", "unread-tensors", "architecture-unknown", "positions-short",
    "head-dim-inferred", "layer-count", "switch-contradicted", "aux-layers-guessed", "aux-layers-ambiguous", "norm-before-residual-absent",
    "norm-output-doubtful", "rotated-verifier",
)  # fmt: skip


def rule_findings(subject: Subject, others: tuple[Rule, ...] = ()) -> Iterator[Finding]:
    """What the rules say, each asked whether or not another refused."""
    for rule in (*RULES, *others):
        try:
            settings = rule(subject.question)
        except ConfigError as error:
            yield refusal(error, partial(place_of, subject))
            continue
        for setting in settings:
            if setting.code in ALWAYS or (setting.code in NOTED and setting.note and setting.value is not None):
                yield _noted(subject, setting)


def refusal(error: SpecbenchError, place: Callable[[str], str] = str, fallback: str = "refused") -> Finding:
    """An error that a rule or a reader raised, as a finding."""
    return finding(error.code or fallback, str(error), {place(where): value for where, value in error.evidence.items()})


def _noted(subject: Subject, setting: Setting) -> Finding:
    code, severity = setting.code, None
    family = subject.dialect.family.name
    evidence: dict[str, Any] = {place_of(subject, setting.source): brief(setting.value)}
    if setting.verifier is not None:
        evidence["verifier: its own"] = brief(setting.verifier)
    if code == "aux-layers-guessed":
        evidence[f"draft config.json: {KEY}"] = "absent"
        code = "aux-layers-default" if family in DEFAULT_LAYERS else code
    if code == "rope-default" and (not setting.warning or family in DEFAULT_ROPE):
        severity = "info"
    if code == "norm-before-residual-absent":
        evidence["draft config.json: norm_before_residual"] = "absent"
    affected = tuple(table_ends()) if code == "positions-short" else ()
    noted = setting.code in NOTED and setting.note
    sentence = f"{setting.name} is {brief(setting.value)}: {setting.note}" if noted else explain(code).title
    return finding(code, sentence, evidence, severity=severity, affected=affected)

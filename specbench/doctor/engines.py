"""Who will fail: the plan of every policy beside the plan of `draft`, and a rehearsal of loading under each.

What enters: a subject, the draft as its own files build it, policies. What leaves: findings, each with the releases that it concerns.
Nothing is known here beforehand about any engine: a rehearsal builds the draft on the meta device as that policy's plan says, and looks up
every stored tensor in the order in which loading would, without a weight byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checkpoint.fill import compare, place
from ..errors import ConfigError, SpecbenchError
from ..pair import Checkpoint
from ..plan import brief, describe_quantization
from ..policies import POLICIES, Policy
from ..settings import QUANTIZED_LEAVES
from .architectures import look_up
from .findings import Affected, Finding
from .pages import explain
from .subject import Subject, engine_name, finding, place_of

if TYPE_CHECKING:
    from ..load import Prepared
    from ..plan import Plan

# setting -> (code, field of the policy that decides it)
COMPARED = {
    "embed_tokens": ("embedding-replaced", "embed_tokens"),
    "norm_before_residual": ("norm-before-residual-ignored", "norm_before_residual"),
    "aux_layers": ("aux-layers-moved", "aux_layers"),
    "d2t": ("map-missing", "checks"),
    "load_config": ("load-config-ignored", "load_config"),
}  # fmt: skip
RULE_OF = {  # code -> the same for what a rehearsal finds
    "quantization-from-verifier": "layer_quantization", "quantization-ignored": "layer_quantization",
    "silent-corruption": "layer_quantization",
    "layers-invented": "layer_count", "layers-unbuilt": "layer_count", "tensors-dropped": "checks", "load-format-conflict": "load_config",
}  # fmt: skip
SILENT = ("silent-corruption", "layers-invented", "tensors-dropped", "map-missing")
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What loading under one policy would do.

    outcome: "loads", "KeyError", "shape error" or "refused". key: the parameter looked up in vain, or the tensor that does not fit.
    corrupted: tensors that would be converted to another kind of dtype. unfilled: parameters that nothing fills. dropped: tensors that are
    skipped without a word. code, evidence: of the error of a refusal.
    """

    plan: Plan | None
    outcome: str
    key: str = ""
    detail: str = ""
    code: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    corrupted: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass
class Matter:
    """One code as it builds up, policy by policy."""

    sentence: str
    evidence: dict[str, Any]
    affected: list[Affected] = field(default_factory=list)


def engine_policy(text: str) -> Policy:
    """The policy that "vllm==0.11.0", "vllm-0.32.0-mrv2", "sglang" or "eagle" names.

    Raises:
        ConfigError: none is called so.
    """
    name = text.strip().lower().replace("==", "-")
    name = name.removesuffix(".post2").removesuffix(".post1")
    if name in POLICIES and name != "draft":
        return POLICIES[name]
    known = [policy.replace("vllm-", "vllm==") for policy in POLICIES if policy != "draft"]
    raise ConfigError(f"no engine is called {text!r} here; known: {', '.join(known)}")


def rehearse(subject: Subject, policy: Policy) -> Rehearsal:
    """Load under `policy` without weights."""
    from ..load import prepare

    try:
        prepared = prepare(subject.pair, policy, subject.dtype, subject.overrides or None)
    except SpecbenchError as error:
        return Rehearsal(None, "refused", detail=str(error).splitlines()[0], code=error.code, evidence=error.evidence)
    if prepared.plan["load_format"] == "dummy":
        return Rehearsal(prepared.plan, "loads")
    problems = compare(prepared.model, prepared.tensors, prepared.borrowed | prepared.computed)
    skips = prepared.plan["checks"] == "none"
    for name in _loading_order(prepared):
        if name in problems["unexpected"] and not skips:
            return Rehearsal(prepared.plan, "KeyError", place(name)[0], problems["unexpected"][name].strip(" ()"))
        if name in problems["shape"]:
            return Rehearsal(prepared.plan, "shape error", name, problems["shape"][name].strip(": "))
    unfilled, dropped = tuple(problems["missing"]), tuple(problems["unexpected"])
    return Rehearsal(prepared.plan, "loads", corrupted=tuple(problems["dtype"]), unfilled=unfilled, dropped=dropped)


def _loading_order(prepared: Prepared) -> list[str]:
    """Canonical names in the order in which loading meets the tensors: file by file, sorted in each; a pickle in its own order."""
    files = prepared.plan.pair.draft.files
    places = {file: index for index, file in enumerate(files.files)} if files else {}
    order = _pickled_order(prepared.plan.pair.draft)

    def key(item: tuple[str, Any]) -> tuple[int, int, str]:
        info = item[1]
        return places.get(info.file, 0), order.get(info.name, 0), info.name

    return [name for name, _ in sorted(prepared.tensors.items(), key=key)]


def _pickled_order(draft: Checkpoint) -> dict[str, int]:
    if draft.files is None or not draft.files.pickled:
        return {}
    from ..checkpoint.pickles import load_state_dict

    names = [name for file in draft.files.files for name in load_state_dict(file, "meta")]
    return {name: index for index, name in enumerate(names)}


def engine_findings(subject: Subject, prepared: Prepared, policies: Sequence[Policy], chosen: bool) -> Iterator[Finding]:
    """What each policy does otherwise than the draft's own files ask for.

    Args:
        prepared: the draft as it stands under the policy "draft".
        chosen: the user named the engine, so that what it does is no longer a remark on others: it decides severity.
    """
    matters: dict[str, Matter] = {}
    for policy in policies:
        theirs = rehearse(subject, policy)
        found = [
            *_loading(subject, theirs, policy),
            *_settings(subject, prepared.plan, theirs.plan, policy),
            *_architecture(subject, policy),
        ]
        for code, affected, sentence, evidence in found:
            matters.setdefault(code, Matter(sentence, evidence)).affected.append(affected)
    for code, matter in matters.items():
        failing = code in SILENT or any(a.outcome in ("KeyError", "shape error", "refused") for a in matter.affected)
        severity = "info" if not chosen else "error" if failing else "warning"
        fix = explain(code).fix + _unaffected(code, matter.affected, policies)
        yield finding(code, matter.sentence, matter.evidence, severity=severity, affected=tuple(matter.affected), fix=fix)
    for policy in policies if chosen else ():
        if policy.unknown:
            sentence = f"how {engine_name(policy)} decides {', '.join(policy.unknown)} is not established; taken as under draft"
            yield finding("engine-unestablished", sentence, {f"policy {policy.name}: not established": ", ".join(policy.unknown)})


Found = tuple[str, Affected, str, dict[str, Any]]  # code, who, sentence, evidence


def _affected(policy: Policy, outcome: str, sees: str, rule: str) -> Affected:
    return Affected(engine_name(policy), policy.name, outcome, sees, policy.evidence.get(rule, policy.summary))


def _unaffected(code: str, affected: Sequence[Affected], policies: Sequence[Policy]) -> str:
    """The releases that were asked about, decide the matter in an established way, and do no harm."""
    rule = RULE_OF.get(code) or dict(COMPARED.values()).get(code)
    names = {one.policy for one in affected}
    good = [engine_name(p) for p in policies if rule and p.name not in names and getattr(p, rule) is not None]
    return f" Not affected: {', '.join(good)}." if good else ""


def _loading(subject: Subject, theirs: Rehearsal, policy: Policy) -> Iterable[Found]:
    code, outcome, sees = _verdict(subject, theirs, policy)
    if code:
        sentence, evidence = _sentence(subject, code, theirs)
        yield code, _affected(policy, outcome, sees, RULE_OF.get(code, "checks")), sentence, evidence


def _verdict(subject: Subject, theirs: Rehearsal, policy: Policy) -> tuple[str, str, str]:
    """Code, outcome and what a user sees; "" for a load like the draft's own."""
    if theirs.outcome != "loads" or theirs.plan is None:
        told = {"KeyError": f"KeyError: {theirs.key!r}", "shape error": f"AssertionError: {theirs.key} {theirs.detail}"}
        return _cause(subject, theirs, policy), theirs.outcome, told.get(theirs.outcome, theirs.detail)
    lost = theirs.corrupted + tuple(name for name in theirs.unfilled if name.rpartition(".")[2] not in ("weight", "bias"))
    if lost:
        code = "silent-corruption" if subject.pair.draft.quantization is None else "quantization-ignored"
        return code, "silent", f"no error; {len(lost)} tensors hold converted or unfilled values, acceptance near zero"
    if theirs.unfilled:
        return "layers-invented", "silent", f"no error; {len(theirs.unfilled)} parameters keep what memory held, {theirs.unfilled[0]} first"
    if theirs.dropped:
        quantized = any(name.rpartition(".")[2] in QUANTIZED_LEAVES for name in theirs.dropped)
        code = "quantization-ignored" if quantized else "tensors-dropped"
        return code, "silent", f"no error; {len(theirs.dropped)} tensors are skipped, {theirs.dropped[0]} first"
    return "", "", ""


def _cause(subject: Subject, theirs: Rehearsal, policy: Policy) -> str:
    """The code of a load that ends."""
    draft, verifier = subject.pair.draft, subject.pair.verifier
    inherited = draft.quantization is None and verifier.quantization is not None and policy.layer_quantization == "verifier"
    if theirs.plan is None:
        if theirs.code in ("aux-layers-count", "aux-layers-range"):
            return "aux-layers-moved"
        if theirs.code == "load-format-conflict":
            return theirs.code
        return "quantization-from-verifier" if inherited else "engine-refuses"
    parts = theirs.key.split(".")
    if parts[0] == "layers" and parts[1].isdecimal() and int(parts[1]) >= theirs.plan["num_hidden_layers"]:
        return "layers-unbuilt"
    if draft.quantization is not None:
        return "quantization-ignored"
    return "quantization-from-verifier" if inherited else "engine-refuses"


def _sentence(subject: Subject, code: str, theirs: Rehearsal) -> tuple[str, dict[str, Any]]:
    draft, verifier = subject.pair.draft, subject.pair.verifier
    own, other = describe_quantization(draft.quantization), describe_quantization(verifier.quantization)
    sections = {
        f"draft {draft.quantization_source or 'config.json: quantization_config'}": own if draft.quantization else "absent",
        f"verifier {verifier.quantization_source or 'config.json: quantization_config'}": other if verifier.quantization else "absent",
    }
    name = theirs.key or next(iter((*theirs.corrupted, *theirs.unfilled, *theirs.dropped)), "")
    info = subject.dialect.tensors.get(name)
    if info is not None:
        sections[f"draft {info.file.name}: {info.name}"] = f"{info.dtype} {list(info.shape)}"
    refused = {place_of(subject, where): value for where, value in theirs.evidence.items()}
    layers = {f"draft config.json: {subject.dialect.size('num_hidden_layers').key}": subject.dialect.size("num_hidden_layers").value}
    sentences: dict[str, tuple[str, dict[str, Any]]] = {
        "quantization-from-verifier": (f"the plain draft's layers are built from the verifier's quantization ({other})", sections),
        "quantization-ignored": (f"the draft's own quantization ({own}) is not what its layers are built from", sections),
        "silent-corruption": (
            f"the draft's tensors are copied into parameters of another kind, for a verifier stored as {other}",
            sections,
        ),
        "layers-invented": ("layers are built that the draft's files do not hold", layers),
        "layers-unbuilt": ("layers that the draft stores are not built", layers),
        "tensors-dropped": (f"stored tensors of the draft are skipped: {', '.join(theirs.dropped[:SHOWN])}", sections),
        "load-format-conflict": (f"the load format in force finds no weights of the draft: {theirs.detail}", refused),
        "aux-layers-moved": (f"other verifier states are read than the draft's fc expects: {theirs.detail}", refused),
    }
    return sentences.get(code, (f"this pair is refused: {theirs.detail or theirs.key}", refused or sections))


def _settings(subject: Subject, ours: Plan, theirs: Plan | None, policy: Policy) -> Iterable[Found]:
    for name, (code, rule) in COMPARED.items() if theirs is not None else ():
        a, b = ours.settings[name], theirs.settings[name]  # type: ignore[union-attr]
        if a.value != b.value:
            evidence = {place_of(subject, a.source): brief(a.value), f"{policy.name}: {place_of(subject, b.source)}": brief(b.value)}
            sees = f"{name} is {brief(b.value)} instead of {brief(a.value)}"
            sentence = f"{name}: the draft's files say {brief(a.value)}, some engines take {brief(b.value)}" + (
                f" ({b.note})" if b.note else ""
            )
            yield code, _affected(policy, "ignored", sees, rule), sentence, evidence


_TOLD = {
    "architecture-unregistered": "some engines look up a name that they do not have",
    "architecture-rewritten": "some engines make another class of it",
    "qk-norms-unread": "some engines build a class without q_norm and k_norm for it",
    "nested-config": "the sizes lie in transformer_layer_config, where some engines do not look",
}


def _architecture(subject: Subject, policy: Policy) -> Iterable[Found]:
    found = look_up(subject, policy)
    if found is not None and found.problem:
        names = subject.pair.draft.config.get("architectures") or "absent"
        sentence = f"architectures is {names}; {_TOLD[found.code]}"
        evidence = {"draft config.json: architectures": names, f"{policy.name}: looked up": found.asked or "nothing"}
        yield found.code, _affected(policy, found.outcome, found.problem, "architectures"), sentence, evidence

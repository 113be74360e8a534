"""Diagnose a pair: run every check, and report what was found.

What enters: a pair, or what names its sides. What leaves: a `Report`. No weight byte is read, but for the maps and embedding rows that
`values=True` asks for; nothing is loaded, and no GPU is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.families import Dialect, recognise
from ..errors import CheckpointFileError, ConfigError, DownloadError
from ..pair import Checkpoint, Pair
from ..plan import describe_quantization, dtype_setting, family_setting
from ..policies import DRAFT, POLICIES, Policy
from ..speculative import parse_speculative_config
from .config_values import draft_values, top_values, verifier_values
from .engines import engine_findings, engine_policy
from .findings import Finding, Report, ordered
from .pairing import pairing_findings
from .reading import CONFLICT, duplicate_keys, headers_at_hand, read_pair
from .rules import refusal, rule_findings
from .subject import SIDES, Subject, finding
from .verifier_files import verifier_findings
from .weights import file_findings, prepared_draft, tensor_findings

# Ranks that the rules rely on, by canonical name.
RANKS = {
    "embed_tokens.weight": 2, "fc.weight": 2, "lm_head.weight": 2, "d2t": 1, "t2d": 1, "layers.0.self_attn.q_proj.weight": 2,
    "layers.0.input_layernorm.weight": 1,
}  # fmt: skip


def diagnose(
    pair: Pair | str | Path,
    draft: str | Path | None = None,
    *,
    engine: str | None = None,
    values: bool = False,
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Say who will fail with a pair, how, and what to do.

    Args:
        pair: an opened pair; or the verifier, a folder or hub id, whose side that cannot be read then becomes a finding, not an error.
        draft: the draft, folder or hub id, where `pair` is a verifier.
        engine: one engine, as "vllm==0.11.0", "sglang" or the name of a policy: what it does then counts as warning or error. None asks all
            of them, and what only some releases do wrong with files that are right is "info".
        values: also read the values of d2t and t2d and some embedding rows.
        overrides: see `resolve`.
        options: further arguments of `open_pair`, where it is called here.

    Raises:
        ConfigError: an unknown engine; both a pair and a draft.
    """
    policies = tuple(policy for policy in POLICIES.values() if policy is not DRAFT) if engine is None else (engine_policy(engine),)
    if isinstance(pair, Pair):
        if draft is not None or options:
            raise ConfigError("a pair and a draft were given; give a pair alone, or verifier and draft")
        opened, names = pair, (pair.verifier.name, pair.draft.name)
    else:
        found_pair, unread = read_pair(pair, draft, options)
        names = str(pair), str(draft or parse_speculative_config(options.get("speculative_config")).model)
        if found_pair is None:
            return _report(names, None, None, unread, engine, readable=all(found.code == CONFLICT for found in unread))
        opened = found_pair
    try:
        dialect, findings = _checked(opened, policies, engine is not None, values, overrides or {})
    except (CheckpointFileError, DownloadError) as error:  # headers of large hub checkpoints are read when they are asked for
        return _report(names, opened, None, [refusal(error, fallback="damaged-file")], engine, readable=False)
    asked = {policy.name for policy in policies}
    findings = [replace(found, affected=tuple(one for one in found.affected if one.policy in asked)) for found in findings]
    return _report(names, opened, dialect, findings, engine)


def _checked(
    pair: Pair, policies: tuple[Policy, ...], chosen: bool, values: bool, overrides: Mapping[str, Any]
) -> tuple[Dialect | None, list[Finding]]:
    findings = [*duplicate_keys(pair), *(found for side in SIDES for found in top_values(side, getattr(pair, side).config))]
    if _stops(findings):
        return None, findings
    findings += verifier_values(pair.verifier.config)
    usable = not _stops(findings)
    if usable:
        findings += verifier_findings(pair.verifier, headers_at_hand(pair.verifier))
    try:
        dialect = recognise(pair.draft.config, pair.draft.tensors, f"draft {pair.draft.name}")
    except ConfigError as error:
        return None, [*findings, refusal(error)]
    kinds = [*draft_values(dialect), *_ranks(pair, dialect)]
    findings += kinds
    if kinds or not usable:
        return dialect, findings
    subject = Subject(pair, dialect, overrides)
    findings += [*rule_findings(subject, (_family, _dtype)), *file_findings(subject), *pairing_findings(subject)]
    findings += _built(subject, policies, chosen, {found.code for found in findings if found.severity == "error"})
    if values:
        from .values import value_findings

        findings += value_findings(subject)
    return dialect, findings


def _built(subject: Subject, policies: tuple[Policy, ...], chosen: bool, known: set[str]) -> Iterator[Finding]:
    """What comes of building the draft; a refusal that a rule has named already is not said twice."""
    prepared, refused = prepared_draft(subject)
    if prepared is None:
        yield from (found for found in refused if found.code not in known and not (found.code == "refused" and known))
        return
    problems = list(tensor_findings(subject, prepared))
    yield from problems
    if not problems:
        yield from engine_findings(subject, prepared, policies, chosen)


def _family(question: Any) -> list[Any]:
    return [family_setting(question)]


def _dtype(question: Any) -> list[Any]:
    return [dtype_setting(question)]


def _ranks(pair: Pair, dialect: Dialect) -> Iterator[Finding]:
    """Tensors whose number of dimensions no rule could work with."""
    for name, rank in RANKS.items():
        info = dialect.tensors.get(name)
        if info is not None and len(info.shape) != rank:
            sentence = f"{info.name} of the draft has {len(info.shape)} dimensions; {rank} are expected"
            yield finding("shape-mismatch", sentence, {f"draft {info.file.name}: {info.name}": list(info.shape)})
    for name in ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"):
        if name in pair.verifier.tensors and len(shape := pair.verifier.tensors[name].shape) != 2:
            sentence = f"{name} of the verifier has {len(shape)} dimensions; 2 are expected"
            yield finding("shape-mismatch", sentence, {f"verifier tensors: {name}": list(shape)})


def _stops(findings: list[Finding]) -> bool:
    return any(found.severity == "error" for found in findings)


def _report(
    names: tuple[str, str], pair: Pair | None, dialect: Dialect | None, findings: list[Finding], engine: str | None, readable: bool = True
) -> Report:
    from .. import __version__

    sides = dict(zip(SIDES, names, strict=True))
    described = {side: _described(sides[side], getattr(pair, side) if pair else None) for side in SIDES}
    described["draft"]["family"] = dialect.family.name if dialect else None
    named = None if engine is None else engine_policy(engine).name
    return Report(described["verifier"], described["draft"], ordered(findings), named, readable, __version__)


def _described(name: str, checkpoint: Checkpoint | None) -> dict[str, str | None]:
    if checkpoint is None:
        return {"name": name, "revision": None, "quantization": None}
    return {"name": checkpoint.name, "revision": checkpoint.revision, "quantization": describe_quantization(checkpoint.quantization)}

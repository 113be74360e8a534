"""Resolve a pair under a policy: every setting with its value, its source and any disagreement.

What enters: a pair, a policy, overrides. What leaves: a `Plan`, from which `load_draft` builds and `to_frame` reports. It does not read a
weight byte, and loads nothing; the rules themselves are in `settings` and `aux_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .aux_layers import aux_layers
from .checkpoint.families import Dialect, look, recognise
from .checkpoint.load_config import LoadConfig
from .errors import ConfigError
from .load_settings import load_settings
from .pair import Checkpoint, Pair
from .policies import Policy, get_policy
from .settings import QUANTIZED_LEAVES, Question, Setting, fusion, layers, residual, rope, sizes
from .vocabulary import vocabulary

if TYPE_CHECKING:
    import pandas as pd

# What llm-compressor, vllm-ascend, TorchAO and others write for rotated models.
ROTATION_KEYS = ("transform_config", "rotation_config", "quarot", "spinquant", "spin_quant", "rotate", "online_rotation", "hadamard")
OVERRIDES = ("aux_layers", "aux_layer_convention", "embed_tokens", "norm_before_residual", "quantization", "rope_theta")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a draft will be loaded, and why."""

    pair: Pair
    policy: Policy
    dialect: Dialect
    settings: dict[str, Setting]

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    @property
    def warnings(self) -> list[str]:
        """What may cost acceptance without an error: the notes of settings that were guessed or contradicted."""
        return [f"{s.name}: {s.note}" for s in self.settings.values() if s.warning]

    def command(self, engine: str = "vllm", num_speculative_tokens: int | None = None) -> str:
        """How `engine` ("vllm", "sglang", "trtllm") is started on this pair, with what it cannot express as comments (see
        `command.command`).
        """
        from .command import command

        return command(self, engine, num_speculative_tokens, speculative_config=self.pair.speculative)

    def to_frame(self) -> pd.DataFrame:
        """One row per setting: setting | value | source | verifier | note."""
        import pandas as pd

        rows = [(s.name, brief(s.value), s.source, brief(s.verifier), s.note) for s in self.settings.values()]
        return pd.DataFrame(rows, columns=["setting", "value", "source", "verifier", "note"])

    def diff(self, other: Plan) -> pd.DataFrame:
        """Settings whose value differs between two plans: setting | one column a policy | why (the notes)."""
        import pandas as pd

        ours, theirs = self.policy.name, other.policy.name
        if ours == theirs:
            ours, theirs = f"{ours} (1)", f"{theirs} (2)"
        rows = []
        for name in dict.fromkeys((*self.settings, *other.settings)):
            a, b = self.settings.get(name), other.settings.get(name)
            if a is None or b is None or a.value != b.value:
                why = "; ".join(dict.fromkeys(s.note or s.source for s in (a, b) if s is not None))
                rows.append((name, brief(a.value) if a else "absent", brief(b.value) if b else "absent", why))
        return pd.DataFrame(rows, columns=["setting", ours, theirs, "why"])


def resolve(pair: Pair, policy: str | Policy = "draft", overrides: Mapping[str, Any] | None = None) -> Plan:
    """Decide every draft setting of `pair` under `policy`.

    Args:
        overrides: what the user decides instead of the files: aux_layers (ids in the input convention), aux_layer_convention ("input",
        "output"),
            embed_tokens ("draft", "verifier"), norm_before_residual, quantization ("none", "verifier", or the method that the
            draft must declare),
            rope_theta.

    Raises:
        ConfigError: not an EAGLE-3 draft, or a setting that the files leave open or contradict.
    """
    policy, overrides = get_policy(policy), {**pair.speculative.plan_overrides(), **(overrides or {})}
    unknown = [key for key in overrides if key not in OVERRIDES]
    if unknown:
        raise ConfigError(f"unknown override {unknown[0]!r}; known: {', '.join(OVERRIDES)}")
    draft, verifier = pair.draft, pair.verifier
    dialect = recognise(draft.config, draft.tensors, f"draft {draft.name}")
    q = Question(draft, dialect, verifier, policy, overrides)
    settings = [
        family_setting(q),
        *quantization_settings(q),
        *sizes(q),
        *vocabulary(q),
        *layers(q),
        *fusion(q),
        *residual(q),
        *rope(q),
        *aux_layers(q),
        dtype_setting(q),
        *load_settings(pair, policy),
        Setting("checks", policy.rule("checks"), f"policy {policy.name}"),
    ]
    if policy.unknown:
        note = f"not established for {policy.name}; shown as under policy draft"
        settings.append(Setting("unknown", ", ".join(policy.unknown), f"policy {policy.name}", None, note))
    return Plan(pair, policy, dialect, {s.name: s for s in settings})


def family_setting(q: Question) -> Setting:
    """Which dialect the draft is in, and what is odd about it."""
    notes = [*q.dialect.notes]
    if q.dialect.ignored:
        notes.append(f"not read: {', '.join(q.dialect.ignored)}")
    named = bool(q.dialect.notes)
    code = "architecture-unknown" if named else "unread-tensors"
    return Setting("family", q.dialect.family.name, "draft tensors and config.json", None, "; ".join(notes), named, code)


def quantization_settings(q: Question) -> list[Setting]:
    """Whose quantization section the draft is built from, what was declared and asked for, and whether the verifier is rotated."""
    own, other = q.draft.quantization, q.verifier.quantization
    asked = q.overrides.get("quantization")
    requested = asked if asked != "verifier" else str((other or {}).get("quant_method") or "none")
    evidence = [name for name in q.dialect.tensors if name.endswith(tuple(f".{leaf}" for leaf in QUANTIZED_LEAVES))]
    if requested == "none":
        if evidence:
            raise q.fail(
                f"quantization 'none' was asked for, but the file holds packed or scaled tensors ({evidence[0]} and {len(evidence) - 1} "
                f"more)",
                "quantization-request",
                {"speculative_config: quantization": "none", f"draft tensors: {evidence[0]}": "stored"},
            )
        own = None
    elif requested is not None and (own or {}).get("quant_method") != requested:
        said = {"speculative_config: quantization": requested, "draft config.json: quantization_config": describe_quantization(own)}
        raise q.fail(
            f"quantization {requested!r} was asked for, but its config declares {describe_quantization(own)}", "quantization-request", said
        )
    if own is None and evidence and q.policy.rule("checks") == "strict":
        raise q.fail(
            f"it declares no quantization, but holds {evidence[0]} and {len(evidence) - 1} more such tensors; its quantization_config is "
            f"missing",
            "quantization-undeclared",
            {"draft config.json: quantization_config": "absent", f"draft tensors: {evidence[0]}": "stored"},
        )
    files = {"draft": (q.draft, own), "verifier": (q.verifier, other), "none": (q.draft, None)}
    rows = []
    for name, origin in (("quantization", q.policy.rule("layer_quantization")), ("edge_quantization", q.policy.rule("edge_quantization"))):
        checkpoint, section = files[origin]
        source = f"{origin} {checkpoint.name}: {checkpoint.quantization_source if section else 'declares nothing'}"
        note = "" if section == own else f"the draft's own files say {describe_quantization(own)}"
        if origin == "draft" and own is None:
            source += ", and only plain .weight tensors" if not evidence else ""
        if origin == "none":
            source = f"policy {q.policy.name}: always plain"
        if origin == "draft" and requested == "none":
            source = "asked for: none"
        rows.append(Setting(name, section, source, describe_quantization(other), note, bool(note), "quantization"))
    declared = Setting(
        "quantization_declared", q.draft.quantization, q.draft.quantization_source or "the draft's files", describe_quantization(other)
    )
    return [*rows, declared, Setting("quantization_requested", asked or "unset", "speculative_config or override"), *_rotation(q)]


def _rotation(q: Question) -> list[Setting]:
    """QuaRot- or SpinQuant-like verifiers: their states live in a rotated basis that a draft trained on the plain model does not know."""
    section = q.verifier.quantization or {}
    seen = [key for key in ROTATION_KEYS if section.get(key) or q.verifier.config.get(key)]
    if not seen:
        return []
    note = (
        f"{seen[0]} is set: hidden states may be rotated, and this draft's fc was not; acceptance falls without an error. Rotate fc, "
        f"or use a draft of this verifier"
    )
    return [Setting("rotation", seen[0], f"verifier {q.verifier.name}: {seen[0]}", seen[0], note, True, "rotated-verifier")]


def dtype_setting(q: Question) -> Setting:
    """What the draft computes in: the verifier's dtype."""
    own, other = _named_dtype(q.draft), _named_dtype(q.verifier)
    note = "" if own in (None, other) else f"the draft's config says {own}; it is cast to compute beside the verifier's states"
    return Setting("dtype", other, f"verifier {q.verifier.name}/config.json: dtype", other, note, code="dtype-cast")


def _named_dtype(checkpoint: Checkpoint) -> str | None:
    value = look(checkpoint.config, "dtype", "torch_dtype", "text_config.dtype", "text_config.torch_dtype").value
    return None if value is None else str(value).removeprefix("torch.")


def describe_quantization(section: dict[str, Any] | None) -> str:
    """A short name for a quantization section: "none", "compressed-tensors pack-quantized W4", "awq" ..."""
    if not section:
        return "none"
    words = [str(section[key]) for key in ("quant_method", "format", "quant_algo") if section.get(key)]
    bits = section.get("bits") or look(section, "config_groups.group_0.weights.num_bits").value
    return " ".join([*words, f"W{bits}"] if bits else words)


def brief(value: Any) -> Any:
    """A setting's value as a table shows it."""
    if isinstance(value, dict):
        return describe_quantization(value)
    return "none" if value is None else str(value) if isinstance(value, LoadConfig) else value

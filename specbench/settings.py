"""How each draft setting is decided: one function a question, each answer with its source and what disagrees.

What enters: a draft as its family spells it, the verifier's files, a policy, the user's overrides. What leaves: `Setting`s. It does not
read a weight byte. Whatever the files leave open is decided here and nowhere else, and says so in its note; `warning` marks what may cost
acceptance silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .checkpoint.families import Dialect, Found, look
from .checkpoint.files import TensorInfo
from .checkpoint.rope import Rope, read_rope
from .errors import ConfigError
from .pair import Checkpoint, text_part
from .policies import Policy

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
# Leaf names that only packed or scaled formats store (checked before a config is believed).
QUANTIZED_LEAVES = ("weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight_scale_2", "scales", "SCB", "weight.absmax")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting. source: file and key, or why a value stands that no file gives. verifier: the verifier's own value, None if
    it has none. code: what the doctor calls the matter of the note.
    """

    name: str
    value: Any
    source: str
    verifier: Any = None
    note: str = ""
    warning: bool = False
    code: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """What every rule may look at."""

    draft: Checkpoint
    dialect: Dialect
    verifier: Checkpoint
    policy: Policy
    overrides: dict[str, Any]

    @property
    def verifier_config(self) -> Mapping[str, Any]:
        """The verifier's text part: multimodal configs nest it under `text_config`."""
        return text_part(self.verifier.config)

    def fail(self, text: str, code: str, evidence: Mapping[str, Any] | None = None) -> ConfigError:
        """The error of a rule that cannot decide; code and evidence as in `SpecbenchError`."""
        return ConfigError(f"draft {self.draft.name}: {text}", code=code, evidence=evidence)

    def said(self, key: str | None) -> str:
        """The place of a key of the draft's config."""
        return f"draft config.json: {key}"


def sizes(q: Question) -> list[Setting]:
    """Sizes of the decoder layer, all from the draft; head_dim from the stored q_proj where the config is silent."""
    settings = []
    for name in SIZES:
        found = q.dialect.size(name)
        if found.key is None and name == "num_key_value_heads":
            found = q.dialect.size("num_attention_heads")
        if found.key is None:
            key = q.dialect.family.config_prefix + name
            raise q.fail(f"config.json lacks {key}; nothing stands in for it", "size-missing", {q.said(key): "absent"})
        settings.append(_from_draft(name, found, q.verifier_config.get(name)))
    value = {s.name: s.value for s in settings}
    reach = settings[-1]
    if reach.verifier is not None and reach.value < reach.verifier:
        note = f"min is {reach.value}; past it the draft's rotary table is extended (vLLM since 0.28), and rounds there are counted"
        settings[-1] = replace(reach, note=note, warning=True, code="positions-short")
    heads, hidden = value["num_attention_heads"], value["hidden_size"]
    q_proj, found = _plain(q, "layers.0.self_attn.q_proj"), q.dialect.size("head_dim")
    if found.key:
        settings.append(_from_draft("head_dim", found, q.verifier_config.get("head_dim")))
    elif q_proj is not None and q_proj.shape[0] % heads == 0:
        note = (
            "" if q_proj.shape[0] == hidden else f"inferred: q_proj has {q_proj.shape[0]} rows for {heads} heads, hidden_size is {hidden}"
        )
        settings.append(
            Setting(
                "head_dim",
                q_proj.shape[0] // heads,
                "draft tensors: rows of q_proj / num_attention_heads",
                None,
                note,
                bool(note),
                "head-dim-inferred",
            )  # fmt: skip
        )
    elif hidden % heads == 0:
        settings.append(Setting("head_dim", hidden // heads, "hidden_size / num_attention_heads; config.json has no head_dim"))
    else:
        said = {q.said("head_dim"): "absent", q.said("hidden_size"): hidden, q.said("num_attention_heads"): heads}
        raise q.fail(f"no head_dim, and neither q_proj nor hidden_size {hidden} is a multiple of {heads} heads", "head-dim", said)
    return settings


def layers(q: Question) -> list[Setting]:
    """Layer count from the tensors, switches that the tensors show, sliding windows."""
    tensors = q.dialect.tensors
    indices = sorted({int(n.split(".")[1]) for n in tensors if n.startswith("layers.") and n.split(".")[1].isdecimal()})
    if indices != list(range(len(indices))):
        numbered = f"its layers are numbered {indices}; 0..{len(indices) - 1} is expected"
        raise q.fail(numbered, "layers-numbering", {"draft tensors: layers.*": indices})
    claimed = q.dialect.size("num_hidden_layers").value
    note = "" if claimed in (None, len(indices)) else f"config.json says {claimed}; the stored tensors decide"
    count, source, rule = len(indices), "draft tensors: layers.*", q.policy.rule("layer_count")
    if rule == "one" or (rule == "config" and claimed is not None):
        count = 1 if rule == "one" else claimed
        source = f"policy {q.policy.name}: " + ("always one" if rule == "one" else "num_hidden_layers of config.json")
        note = "" if count == len(indices) else f"{len(indices)} are stored"
    elif claimed is not None and claimed < len(indices):
        unused = [n for n in tensors if n.startswith("layers.") and n.split(".")[1] in {str(i) for i in indices if i >= claimed}]
        raise q.fail(
            f"config.json says num_hidden_layers {claimed}, but layers {indices} are stored; unused would be: {', '.join(unused[:12])}",
            "layers-unread",
            {q.said(q.dialect.size("num_hidden_layers").key): claimed, "draft tensors: layers.*": indices},
        )
    act = q.dialect.size("hidden_act")
    if act.value not in (None, "silu", "swish"):
        raise q.fail(
            f"{act.key} is {act.value!r}; EAGLE-3 drafts are computed with 'silu', here as in engines",
            "activation",
            {q.said(act.key): act.value},
        )
    has = {
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "o_bias": "layers.0.self_attn.o_proj.bias" in tensors,
        "mlp_bias": "layers.0.mlp.down_proj.bias" in tensors,
        "fc_bias": "fc.bias" in tensors,
        "use_hidden_norm": "layers.0.hidden_norm.weight" in tensors,
    }
    settings = [Setting("num_hidden_layers", count, source, None, note, bool(note), "layer-count")]
    for name, value in has.items():
        spelled = q.dialect.flag({"fc_bias": "eagle_fc_bias"}.get(name, name))
        clash = spelled.key is not None and bool(spelled.value) != value and name in ("attention_bias", "mlp_bias", "fc_bias")
        note = f"{spelled.key} is {spelled.value}; the stored tensors decide" if clash else ""
        settings.append(Setting(name, value, "draft tensors", None, note, clash, "switch-contradicted"))
    return [*settings, _windows(q, count)]


def _windows(q: Question, count: int) -> Setting:
    kinds, window = q.dialect.size("layer_types"), q.dialect.size("sliding_window")
    if kinds.value is None:
        note = "sliding_window is set without layer_types: full attention, as its readers do" if window.value and not _off(q) else ""
        return Setting("windows", (None,) * count, "default: full attention", None, note, code="window-unread")
    if len(kinds.value) < count or not set(kinds.value) <= {"full_attention", "sliding_attention"}:
        raise q.fail(
            f"layer_types is {kinds.value}; {count} of 'full_attention' or 'sliding_attention' are expected",
            "windows",
            {q.said(kinds.key): kinds.value, "draft: layers": count},
        )
    sliding = [k == "sliding_attention" for k in kinds.value[:count]]
    if any(sliding) and not isinstance(window.value, int):
        said = {q.said(kinds.key): kinds.value, q.said("sliding_window"): window.value}
        raise q.fail(f"layer_types asks for sliding attention, but sliding_window is {window.value!r}", "windows", said)
    return Setting("windows", tuple(window.value if s else None for s in sliding), f"draft config.json: {kinds.key}")


def _off(q: Question) -> bool:
    return q.dialect.size("use_sliding_window").value is False


def fusion(q: Question) -> list[Setting]:
    """fc: how many verifier states it reads, their width, norms before it."""
    hidden = q.dialect.size("hidden_size").value
    claimed = q.dialect.flag("target_hidden_size")
    actual = int(q.verifier_config["hidden_size"])
    expected = claimed.value if claimed.key else hidden
    if expected != actual:
        why = claimed.key or "hidden_size; it has no target_hidden_size"
        raise q.fail(
            f"it expects a verifier of hidden size {expected} ({why}); {q.verifier.name} has {actual}: another verifier's draft",
            "verifier-hidden-size",
            {q.said(claimed.key or q.dialect.size("hidden_size").key): expected, "verifier config.json: hidden_size": actual},
        )
    settings = [
        Setting("target_hidden_size", actual, f"verifier config.json, agreeing with the draft's {claimed.key or 'hidden_size'}", actual)
    ]
    use_fc = any(name.startswith("fc.") for name in q.dialect.tensors)
    uses_aux = _switch(q, "use_aux_hidden_state")
    if uses_aux.value is False and use_fc:
        said_here = {q.said(uses_aux.key): False, "draft tensors: fc": "stored"}
        raise q.fail(f"{uses_aux.key} is false, but fc is stored; correct one of them", "fc-contradicted", said_here)
    if uses_aux.value is not False and not use_fc:
        raise q.fail(
            "it holds no fc, and its config.json does not say use_aux_hidden_state false; a tensor is missing, or that key",
            "fc-contradicted",
            {"draft tensors: fc": "absent", q.said("use_aux_hidden_state"): uses_aux.value if uses_aux.key else "absent"},
        )
    settings.append(
        Setting("use_fc", use_fc, "draft tensors: fc", None, "" if use_fc else "the verifier's final normed state is used as it is")
    )
    each = any(name.startswith("fc_norm.") for name in q.dialect.tensors)
    joint = "input_norm.weight" in q.dialect.tensors
    flags = {"norm_before_fc": joint, "fc_norm": each}
    said = {name: _switch(q, name) for name in flags}
    if all(f.value for f in said.values()):
        both = {q.said(f.key): f.value for f in said.values()}
        raise q.fail("norm_before_fc and fc_norm are both true; they exclude each other", "norms-before-fc", both)
    for name, stored in flags.items():
        if bool(said[name].value) != stored:
            tensor = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.*.weight"}[name]
            raise q.fail(
                f"{name} is {said[name].value!r} in config.json, but {tensor} is {'stored' if stored else 'absent'}; correct one of them",
                "norms-before-fc",
                {q.said(said[name].key or name): said[name].value, f"draft tensors: {tensor}": "stored" if stored else "absent"},
            )
    settings.append(Setting("fc_input_norm", "joint" if joint else "each" if each else "none", "draft tensors, agreeing with config.json"))
    return settings


def residual(q: Question) -> list[Setting]:
    """norm_before_residual and norm_output."""
    family, found = q.dialect.family, _switch(q, "norm_before_residual")
    if "norm_before_residual" in q.overrides:
        before = Setting("norm_before_residual", bool(q.overrides["norm_before_residual"]), "override")
    elif q.policy.rule("norm_before_residual") == "false":
        note = f"config.json says {found.value}, which is never read" if found.value else ""
        before = Setting("norm_before_residual", False, f"policy {q.policy.name}", None, note, bool(note), "norm-before-residual-ignored")
    elif found.key:
        before = Setting("norm_before_residual", bool(found.value), f"draft config.json: {found.key}")
    else:
        disagree = "vLLM reads true, the speculators library false: state it in config.json" if family.norm_before_residual else ""
        source = f"default of the {family.name} format where config.json is silent"
        silent = "norm-before-residual-absent"
        before = Setting("norm_before_residual", family.norm_before_residual, source, None, disagree, bool(disagree), silent)
    output = _switch(q, "norm_output")
    note = ""
    if output.value and family.name == "specforge":
        note = (
            "SpecForge before September 2026 wrote norm_output: true for drafts trained to feed back the state before the norm (its PR 879)"
        )
    source = f"draft config.json: {output.key}" if output.key else "default false, as vLLM, SGLang and speculators"
    return [before, Setting("norm_output", bool(output.value), source, None, note, bool(note), "norm-output-doubtful")]


def rope(q: Question) -> list[Setting]:
    """Rotary settings, from the draft alone."""
    prefix, where = q.dialect.family.config_prefix, f"draft {q.draft.name}/config.json"
    section = look(q.dialect.config, prefix.rstrip(".")).value if prefix else q.dialect.config
    max_positions = int(q.dialect.size("max_position_embeddings").value or 2048)
    if "rope_theta" in q.overrides:
        section = {k: v for k, v in section.items() if k != "rope_theta"}
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(section.get(key), dict):
                section = {**section, key: {k: v for k, v in section[key].items() if k != "rope_theta"}}
        section = {**section, "rope_theta": q.overrides["rope_theta"]}
    value, source = read_rope(section, where, max_positions)
    if "rope_theta" in q.overrides:
        source = "override"
    other = _verifier_rope(q)
    defaulted = source.startswith("default")
    note = "differs from the verifier's" if other is not None and (other.theta, other.kind) != (value.theta, value.kind) else ""
    return [
        Setting(
            "rope",
            value,
            source if defaulted or source == "override" else f"draft config.json: {prefix}{source}",
            other,
            note,
            defaulted and bool(note),
            "rope-default" if defaulted else "rope-differs",
        )
    ]


def _verifier_rope(q: Question) -> Rope | None:
    try:
        config = q.verifier_config
        return read_rope(config, "verifier", int(config.get("max_position_embeddings") or 2048))[0]
    except ConfigError:
        return None  # a scaling that only the verifier needs; loading it will say so


def _switch(q: Question, name: str) -> Found:
    """A switch of the draft's config; a text such as "false" would count as true."""
    found = q.dialect.flag(name)
    if found.key is not None and not isinstance(found.value, bool):
        raise q.fail(
            f"{found.key} is {found.value!r} in config.json; true or false is expected", "config-value", {q.said(found.key): found.value}
        )
    return found


def _from_draft(name: str, found: Found, verifier_value: Any) -> Setting:
    note = "differs from the verifier's" if verifier_value is not None and verifier_value != found.value else ""
    return Setting(name, found.value, f"draft config.json: {found.key}", verifier_value, note)


def _plain(q: Question, module: str) -> TensorInfo | None:
    info = q.dialect.tensors.get(f"{module}.weight")
    return info if info is not None and info.dtype in FLOATS else None

"""How each draft setting is decided: one function a question, each answer with its source and what disagrees.

What enters: a draft as its family spells it, the verifier's files, a policy, the user's overrides. What leaves: `Setting`s. It does not
read a weight byte. Whatever the files leave open is decided here and nowhere else, and says so in its note; `warning` marks what may cost
acceptance silently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .checkpoint.families import Dialect, Found, look
from .checkpoint.files import TensorInfo
from .checkpoint.rope import Rope, read_rope
from .errors import ConfigError
from .pair import Checkpoint
from .policies import Policy

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
# Leaf names that only packed or scaled formats store (checked before a config is believed).
QUANTIZED_LEAVES = ("weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight_scale_2", "scales", "SCB", "weight.absmax")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting. source: file and key, or why a value stands that no file gives. verifier: the verifier's own value, None if
    it has none.
    """

    name: str
    value: Any
    source: str
    verifier: Any = None
    note: str = ""
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """What every rule may look at."""

    draft: Checkpoint
    dialect: Dialect
    verifier: Checkpoint
    policy: Policy
    overrides: dict[str, Any]

    @property
    def verifier_config(self) -> dict[str, Any]:
        """The verifier's text part: multimodal configs nest it under `text_config`."""
        nested = self.verifier.config.get("text_config")
        return nested if isinstance(nested, dict) else self.verifier.config

    def fail(self, text: str) -> ConfigError:
        return ConfigError(f"draft {self.draft.name}: {text}")


def sizes(q: Question) -> list[Setting]:
    """Sizes of the decoder layer, all from the draft; head_dim from the stored q_proj where the config is silent."""
    settings = []
    for name in SIZES:
        found = q.dialect.size(name)
        if found.key is None and name == "num_key_value_heads":
            found = q.dialect.size("num_attention_heads")
        if found.key is None:
            raise q.fail(f"config.json lacks {q.dialect.family.config_prefix + name}; nothing stands in for it")
        settings.append(_from_draft(name, found, q.verifier_config.get(name)))
    value = {s.name: s.value for s in settings}
    reach = settings[-1]
    if reach.verifier is not None and reach.value < reach.verifier:
        note = f"min is {reach.value}; past it the draft's rotary table is extended (vLLM since 0.28), and rounds there are counted"
        settings[-1] = replace(reach, note=note, warning=True)
    heads, hidden = value["num_attention_heads"], value["hidden_size"]
    q_proj, found = _plain(q, "layers.0.self_attn.q_proj"), q.dialect.size("head_dim")
    if found.key:
        settings.append(_from_draft("head_dim", found, q.verifier_config.get("head_dim")))
    elif q_proj is not None and q_proj.shape[0] % heads == 0:
        note = (
            "" if q_proj.shape[0] == hidden else f"inferred: q_proj has {q_proj.shape[0]} rows for {heads} heads, hidden_size is {hidden}"
        )
        settings.append(
            Setting("head_dim", q_proj.shape[0] // heads, "draft tensors: rows of q_proj / num_attention_heads", None, note, bool(note))
        )
    elif hidden % heads == 0:
        settings.append(Setting("head_dim", hidden // heads, "hidden_size / num_attention_heads; config.json has no head_dim"))
    else:
        raise q.fail(f"no head_dim, and neither q_proj nor hidden_size {hidden} is a multiple of {heads} heads")
    return settings


def vocabulary(q: Question) -> list[Setting]:
    """Embedding rows, draft vocabulary, and who owns embedding and head."""
    tensors, config_vocab = q.dialect.tensors, q.dialect.size("vocab_size")
    own, other = tensors.get("embed_tokens.weight"), _verifier_embedding(q)
    verifier_vocab = int(q.verifier_config["vocab_size"])
    choice = q.overrides.get("embed_tokens")
    if choice not in (None, "draft", "verifier"):
        raise ConfigError(f"override embed_tokens is {choice!r}; 'draft' or 'verifier' is expected")
    if choice == "draft" and own is None:
        raise q.fail("override embed_tokens='draft', but it has no embed_tokens.weight")
    shareable = other is not None and (own is None or own.shape == other.shape)
    prefer_own = choice == "draft" or (choice is None and _own_embedding_first(q))
    if own is not None and (prefer_own or not shareable):
        if choice == "verifier":
            raise q.fail(
                f"override embed_tokens='verifier', but its own is {list(own.shape)} and the verifier's "
                f"{list(other.shape) if other else 'absent'}"
            )
        note = "" if prefer_own else "the shapes differ, so it is not shared"
        embedding = Setting("embed_tokens", "draft", "draft tensors: embed_tokens.weight", None, note)
        vocab = own.shape[0]
    elif other is not None:
        hidden = q.dialect.size("hidden_size").value
        if other.shape[1] != hidden:
            raise q.fail(f"it has no embedding and hidden_size {hidden}; the verifier's is {list(other.shape)} and cannot be borrowed")
        note = "borrowed: the draft has none" if own is None else "the draft's own embedding is thrown away"
        embedding = Setting("embed_tokens", "verifier", f"verifier tensors: {other.name}", None, note, own is not None)
        vocab = other.shape[0]
    else:
        raise q.fail("neither it (embed_tokens.weight) nor the verifier (model.embed_tokens.weight) has an embedding")
    differs = config_vocab.value is not None and config_vocab.value != verifier_vocab
    note = f"the draft's config says {config_vocab.value}, the verifier's {verifier_vocab}: padded differently" if differs else ""
    return [embedding, Setting("vocab_size", vocab, embedding.source, verifier_vocab, note), *_draft_vocabulary(q, verifier_vocab, vocab)]


def _own_embedding_first(q: Question) -> bool:
    rule = q.policy.rule("embed_tokens")
    return rule == "draft" or (rule == "verifier-unless-target-hidden-size" and q.dialect.flag("target_hidden_size").key is not None)


def _draft_vocabulary(q: Question, verifier_vocab: int, embedding_rows: int) -> list[Setting]:
    tensors = q.dialect.tensors
    claimed = q.dialect.flag("draft_vocab_size")
    head, d2t, t2d = (tensors.get(name) for name in ("lm_head.weight", "d2t", "t2d"))
    head_rows = next((i.shape[0] for n, i in tensors.items() if n in ("lm_head.weight", "lm_head.weight_packed")), None)
    counts = {
        "draft_vocab_size in config.json": claimed.value,
        "rows of lm_head": head_rows,
        "entries of d2t": d2t.shape[0] if d2t else None,
    }
    known = {k: v for k, v in counts.items() if v is not None}
    if len(set(known.values())) > 1:
        extra = f"; t2d has {t2d.shape[0]} entries" if t2d else ""
        raise q.fail(
            "vocabulary sizes conflict: " + ", ".join(f"{k} {v}" for k, v in known.items()) + extra + "; nothing is cut or padded to fit"
        )
    size = next(iter(known.values()), verifier_vocab)
    source = ", ".join(known) or "full vocabulary: neither config.json nor a tensor names a smaller one"
    settings = [Setting("draft_vocab_size", size, f"draft: {source}", verifier_vocab)]
    if head_rows is not None:
        settings.append(Setting("lm_head", "draft", "draft tensors: " + (head.name if head else "lm_head")))
    elif size == verifier_vocab:
        settings.append(
            Setting("lm_head", "verifier", "verifier's lm_head", None, "borrowed: the draft has none and its vocabulary is the verifier's")
        )
    else:
        raise q.fail(f"it has no lm_head, and its vocabulary {size} is not the verifier's {verifier_vocab}, so none can be borrowed")
    if d2t is not None:
        settings.append(Setting("d2t", "draft", "draft tensors: d2t (offsets: verifier id = draft id + d2t)"))
    elif size in (verifier_vocab, embedding_rows):
        settings.append(Setting("d2t", "identity", "full vocabulary, no d2t stored"))
    elif t2d is not None and q.policy.rule("checks") == "strict":
        settings.append(
            Setting("d2t", "t2d", "draft tensors: t2d", None, "d2t is absent; the ids that t2d marks, in order, stand in", True)
        )
    elif q.policy.rule("checks") != "strict":
        settings.append(Setting("d2t", "identity", f"policy {q.policy.name}", None, "no d2t: draft ids are taken for verifier ids", True))
    else:
        raise q.fail(f"draft vocabulary {size} is smaller than the verifier's {verifier_vocab}, and there is neither d2t nor t2d to map it")
    return settings


def layers(q: Question) -> list[Setting]:
    """Layer count from the tensors, switches that the tensors show, sliding windows."""
    tensors = q.dialect.tensors
    indices = sorted({int(n.split(".")[1]) for n in tensors if n.startswith("layers.") and n.split(".")[1].isdigit()})
    if indices != list(range(len(indices))):
        raise q.fail(f"its layers are numbered {indices}; 0..{len(indices) - 1} is expected")
    claimed = q.dialect.size("num_hidden_layers").value
    note = "" if claimed in (None, len(indices)) else f"config.json says {claimed}; the stored tensors decide"
    count, source, rule = len(indices), "draft tensors: layers.*", q.policy.rule("layer_count")
    if rule == "one" or (rule == "config" and claimed is not None):
        count = 1 if rule == "one" else claimed
        source = f"policy {q.policy.name}: " + ("always one" if rule == "one" else "num_hidden_layers of config.json")
        note = "" if count == len(indices) else f"{len(indices)} are stored"
    elif claimed is not None and claimed < len(indices):
        unused = [n for n in tensors if n.startswith("layers.") and int(n.split(".")[1]) >= claimed]
        raise q.fail(
            f"config.json says num_hidden_layers {claimed}, but layers {indices} are stored; unused would be: {', '.join(unused[:12])}"
        )
    has = {
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "o_bias": "layers.0.self_attn.o_proj.bias" in tensors,
        "mlp_bias": "layers.0.mlp.down_proj.bias" in tensors,
        "fc_bias": "fc.bias" in tensors,
        "use_hidden_norm": "layers.0.hidden_norm.weight" in tensors,
    }
    settings = [Setting("num_hidden_layers", count, source, None, note, bool(note))]
    for name, value in has.items():
        spelled = q.dialect.flag({"fc_bias": "eagle_fc_bias"}.get(name, name))
        clash = spelled.key is not None and bool(spelled.value) != value and name in ("attention_bias", "mlp_bias", "fc_bias")
        note = f"{spelled.key} is {spelled.value}; the stored tensors decide" if clash else ""
        settings.append(Setting(name, value, "draft tensors", None, note, clash))
    return [*settings, _windows(q, count)]


def _windows(q: Question, count: int) -> Setting:
    kinds, window = q.dialect.size("layer_types"), q.dialect.size("sliding_window")
    if kinds.value is None:
        note = "sliding_window is set without layer_types: full attention, as its readers do" if window.value and not _off(q) else ""
        return Setting("windows", (None,) * count, "default: full attention", None, note)
    if len(kinds.value) < count or not set(kinds.value) <= {"full_attention", "sliding_attention"}:
        raise q.fail(f"layer_types is {kinds.value}; {count} of 'full_attention' or 'sliding_attention' are expected")
    sliding = [k == "sliding_attention" for k in kinds.value[:count]]
    if any(sliding) and not isinstance(window.value, int):
        raise q.fail(f"layer_types asks for sliding attention, but sliding_window is {window.value!r}")
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
        raise q.fail(f"it expects a verifier of hidden size {expected} ({why}); {q.verifier.name} has {actual}: another verifier's draft")
    settings = [
        Setting("target_hidden_size", actual, f"verifier config.json, agreeing with the draft's {claimed.key or 'hidden_size'}", actual)
    ]
    use_fc = any(name.startswith("fc.") for name in q.dialect.tensors)
    uses_aux = _switch(q, "use_aux_hidden_state")
    if uses_aux.value is False and use_fc:
        raise q.fail(f"{uses_aux.key} is false, but fc is stored; correct one of them")
    if uses_aux.value is not False and not use_fc:
        raise q.fail("it holds no fc, and its config.json does not say use_aux_hidden_state false; a tensor is missing, or that key")
    settings.append(
        Setting("use_fc", use_fc, "draft tensors: fc", None, "" if use_fc else "the verifier's final normed state is used as it is")
    )
    each = any(name.startswith("fc_norm.") for name in q.dialect.tensors)
    joint = "input_norm.weight" in q.dialect.tensors
    flags = {"norm_before_fc": joint, "fc_norm": each}
    said = {name: _switch(q, name) for name in flags}
    if all(f.value for f in said.values()):
        raise q.fail("norm_before_fc and fc_norm are both true; they exclude each other")
    for name, stored in flags.items():
        if bool(said[name].value) != stored:
            tensor = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.*.weight"}[name]
            raise q.fail(
                f"{name} is {said[name].value!r} in config.json, but {tensor} is {'stored' if stored else 'absent'}; correct one of them"
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
        before = Setting("norm_before_residual", False, f"policy {q.policy.name}", None, note, bool(note))
    elif found.key:
        before = Setting("norm_before_residual", bool(found.value), f"draft config.json: {found.key}")
    else:
        disagree = "vLLM reads true, the speculators library false: state it in config.json" if family.norm_before_residual else ""
        source = f"default of the {family.name} format where config.json is silent"
        before = Setting("norm_before_residual", family.norm_before_residual, source, None, disagree, bool(disagree))
    output = _switch(q, "norm_output")
    note = ""
    if output.value and family.name == "specforge":
        note = (
            "SpecForge before September 2026 wrote norm_output: true for drafts trained to feed back the state before the norm (its PR 879)"
        )
    source = f"draft config.json: {output.key}" if output.key else "default false, as vLLM, SGLang and speculators"
    return [before, Setting("norm_output", bool(output.value), source, None, note, bool(note))]


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
        raise q.fail(f"{found.key} is {found.value!r} in config.json; true or false is expected")
    return found


def _from_draft(name: str, found: Found, verifier_value: Any) -> Setting:
    note = "differs from the verifier's" if verifier_value is not None and verifier_value != found.value else ""
    return Setting(name, found.value, f"draft config.json: {found.key}", verifier_value, note)


def _plain(q: Question, module: str) -> TensorInfo | None:
    info = q.dialect.tensors.get(f"{module}.weight")
    return info if info is not None and info.dtype in FLOATS else None


def _verifier_embedding(q: Question) -> TensorInfo | None:
    names = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
    return next((q.verifier.tensors[n] for n in names if n in q.verifier.tensors), None)

"""Resolve a pair under a policy: every setting with its value, its source and any disagreement.

What enters: a pair and a policy. What leaves: a `Plan`, from which `load_draft` builds and `to_frame` reports. It does not read a weight byte, and loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checkpoint.families import Found, draft_prefix, look, rope_theta
from .errors import ConfigError
from .pair import Checkpoint, Pair
from .policies import Policy, get_policy

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting. source: file and key, or why a value stands that no file gives. verifier: the verifier's own value, None if it has none."""

    name: str
    value: Any
    source: str
    verifier: Any = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a draft will be loaded, and why."""

    pair: Pair
    policy: Policy
    settings: dict[str, Setting]

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def to_frame(self) -> pd.DataFrame:
        """One row per setting: setting | value | source | verifier | note."""
        import pandas as pd

        rows = [(s.name, _brief(s.value), s.source, _brief(s.verifier), s.note) for s in self.settings.values()]
        return pd.DataFrame(rows, columns=["setting", "value", "source", "verifier", "note"])


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "vocab_size")


def resolve(pair: Pair, policy: str | Policy = "draft") -> Plan:
    """Decide every draft setting of `pair` under `policy`.

    Raises:
        ConfigError: a setting that the files leave open or contradict.
    """
    policy = get_policy(policy)
    draft, verifier = pair.draft, pair.verifier
    where = f"draft {draft.name}/config.json"
    prefix = draft_prefix(draft.config, where)
    settings = [*_quantization(pair, policy)]
    for name in SIZES:
        found = look(draft.config, prefix + name)
        if found.key is None:
            raise ConfigError(f"{where} lacks {prefix + name}; nothing stands in for it")
        settings.append(_from_draft(name, found, verifier.config.get(name)))
    value = {s.name: s.value for s in settings}
    settings += [
        _head_dim(draft, prefix, value),
        _from_draft("rope_theta", rope_theta(draft.config, prefix, where), _verifier_theta(verifier)),
        _num_layers(draft, prefix),
        _norm_before_residual(draft),
        _target_hidden_size(draft, verifier),
        _aux_layers(draft, verifier, policy),
        _draft_vocab_size(draft),
        Setting("dtype", _dtype(verifier), f"verifier {verifier.name}/config.json: dtype", _dtype(verifier), _dtype_note(draft, verifier)),
        _embedding(draft, verifier, policy),
        Setting("checks", policy.checks, f"policy {policy.name}"),
    ]
    return Plan(pair, policy, {s.name: s for s in settings})


def _quantization(pair: Pair, policy: Policy) -> list[Setting]:
    own, other = pair.draft.quantization, pair.verifier.quantization
    described = describe_quantization(other)
    source = {
        "draft": f"draft {pair.draft.name}/config.json: " + ("quantization_config" if own else "no quantization_config"),
        "verifier": f"verifier {pair.verifier.name}/config.json: " + ("quantization_config" if other else "no quantization_config"),
        "none": f"policy {policy.name}: always plain",
    }
    section = {"draft": own, "verifier": other, "none": None}
    rows = []
    for name, origin in (("quantization", policy.layer_quantization), ("edge_quantization", policy.edge_quantization)):
        note = ""
        if section[origin] != own:
            note = f"the draft's own files say {describe_quantization(own)}"
        rows.append(Setting(name, section[origin], source[origin], described, note))
    return rows


def describe_quantization(section: dict[str, Any] | None) -> str:
    """A short name for a quantization section: "none", "compressed-tensors pack-quantized", "awq" ..."""
    if not section:
        return "none"
    return " ".join(str(section[key]) for key in ("quant_method", "format") if section.get(key))


def _from_draft(name: str, found: Found, verifier_value: Any) -> Setting:
    source = f"draft config.json: {found.key}" if found.key else "default where config.json is silent"
    note = "differs from the verifier's" if verifier_value is not None and verifier_value != found.value else ""
    return Setting(name, found.value, source, verifier_value, note)


def _head_dim(draft: Checkpoint, prefix: str, value: dict[str, Any]) -> Setting:
    found = look(draft.config, prefix + "head_dim")
    if found.key:
        return _from_draft("head_dim", found, None)
    heads, hidden = value["num_attention_heads"], value["hidden_size"]
    if hidden % heads:
        raise ConfigError(f"draft {draft.name}/config.json: no head_dim, and hidden_size {hidden} is no multiple of {heads} heads")
    return Setting("head_dim", hidden // heads, "hidden_size / num_attention_heads; config.json has no head_dim")


def _verifier_theta(verifier: Checkpoint) -> Any:
    return look(verifier.config, "rope_parameters.rope_theta", "rope_theta").value


def _num_layers(draft: Checkpoint, prefix: str) -> Setting:
    stored = {int(name.split(".")[1]) for name in draft.tensors if name.startswith("layers.") and name.split(".")[1].isdigit()}
    claimed = look(draft.config, prefix + "num_hidden_layers").value
    note = "" if claimed == len(stored) else f"config.json says {claimed}; the stored tensors decide"
    return Setting("num_hidden_layers", len(stored), "draft tensors: layers.*", None, note)


def _norm_before_residual(draft: Checkpoint) -> Setting:
    found = look(draft.config, "norm_before_residual")
    if found.key:
        return Setting("norm_before_residual", bool(found.value), "draft config.json: norm_before_residual")
    return Setting(
        "norm_before_residual", True, "default of the speculators format where config.json is silent", None,
        "vLLM reads true, the speculators library false: state it in config.json",
    )  # fmt: skip


def _target_hidden_size(draft: Checkpoint, verifier: Checkpoint) -> Setting:
    actual = verifier.config.get("hidden_size")
    found = look(draft.config, "target_hidden_size")
    if found.key and found.value != actual:
        raise ConfigError(f"draft {draft.name} expects a verifier of hidden size {found.value} (target_hidden_size); {verifier.name} has {actual}")
    return Setting("target_hidden_size", actual, f"verifier {verifier.name}/config.json: hidden_size", actual)


def _aux_layers(draft: Checkpoint, verifier: Checkpoint, policy: Policy) -> Setting:
    n = int(verifier.config["num_hidden_layers"])
    default = (2, n // 2, n - 3)
    found = look(draft.config, "eagle_aux_hidden_state_layer_ids")
    if policy.aux_layers == "draft" and found.key:
        ids = tuple(int(i) for i in found.value)
        if len(set(ids)) != len(ids) or not all(0 <= i <= n for i in ids):
            raise ConfigError(f"draft config.json: {found.key} is {list(ids)}; distinct ids in 0..{n} are expected beside {n} layers")
        return Setting("aux_layers", ids, f"draft config.json: {found.key}", None, "id i is the residual stream entering layer i")
    if not 0 <= default[0] < default[1] < default[2] < n:
        raise ConfigError(f"the default auxiliary layers (2, n // 2, n - 3) are {default} beside {n} layers; set eagle_aux_hidden_state_layer_ids")
    note = "guessed: config.json has no eagle_aux_hidden_state_layer_ids" if not found.key else f"config.json says {found.value}, ignored"
    return Setting("aux_layers", default, "default (2, n // 2, n - 3)", None, note)


def _draft_vocab_size(draft: Checkpoint) -> Setting:
    found, head = look(draft.config, "draft_vocab_size"), draft.tensors.get("lm_head.weight")
    if head is None:
        raise ConfigError(f"draft {draft.name} has no lm_head.weight")
    if found.key and found.value != head.shape[0]:
        raise ConfigError(f"draft {draft.name}: draft_vocab_size is {found.value} in config.json, lm_head.weight has {head.shape[0]} rows")
    return Setting("draft_vocab_size", head.shape[0], "draft tensors: rows of lm_head.weight")


def _dtype(checkpoint: Checkpoint) -> str | None:
    value = look(checkpoint.config, "dtype", "torch_dtype").value
    return None if value is None else str(value).removeprefix("torch.")


def _dtype_note(draft: Checkpoint, verifier: Checkpoint) -> str:
    own = _dtype(draft)
    return "" if own in (None, _dtype(verifier)) else f"draft config.json says {own}; it computes beside the verifier's states"


def _embedding(draft: Checkpoint, verifier: Checkpoint, policy: Policy) -> Setting:
    own, other = draft.tensors.get("embed_tokens.weight"), verifier.tensors.get("model.embed_tokens.weight")
    if own is not None and policy.embed_tokens == "draft":
        return Setting("embed_tokens", "draft", "draft tensors: embed_tokens.weight")
    if own is not None and (other is None or other.shape != own.shape):
        return Setting("embed_tokens", "draft", "draft tensors: embed_tokens.weight", None, "shapes differ, so it is not shared")
    if other is None:
        raise ConfigError(f"neither draft {draft.name} (embed_tokens.weight) nor verifier {verifier.name} (model.embed_tokens.weight) has an embedding")
    note = "borrowed: the draft has none" if own is None else "the draft's own embedding is thrown away"
    return Setting("embed_tokens", "verifier", "verifier tensors: model.embed_tokens.weight", None, note)


def _brief(value: Any) -> Any:
    if isinstance(value, dict):
        return describe_quantization(value)
    return "none" if value is None else value

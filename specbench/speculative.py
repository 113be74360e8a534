"""vLLM's `speculative_config`, taken verbatim: read, checked, and sorted into what specbench does, keeps or refuses.

What enters: the dict that vLLM takes as `speculative_config`, or its JSON text as after `--speculative-config`. What leaves: a
`SpeculativeConfig`. It does not know how a setting is carried out. No key is ignored: one of role "here" is for whoever opens, plans and
decodes; one of role "engine" is kept for the command that is printed for an engine; one of role "refused" may only say what already holds.

Keys, types and defaults: vLLM 0.32.0, vllm/config/speculative.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING, Any

from .checkpoint.families import look
from .errors import ConfigError

if TYPE_CHECKING:
    from .checkpoint.load_config import LoadConfig
    from .pair import Pair

METHOD = "eagle3"
OTHER_METHODS = (
    "eagle", "mtp", "draft_model", "ngram", "ngram_gpu", "medusa", "mlp_speculator", "suffix", "dflash", "dspark", "extract_hidden_states",
    "custom_class",
)  # fmt: skip
PLAIN = ("none", "unquant")
SAME_FORMAT = {  # vLLM has several names for one stored format, by the kernel that reads it
    "awq_marlin": "awq", "auto_awq": "awq", "gptq_marlin": "gptq", "auto_gptq": "gptq", "gpt_oss_mxfp4": "mxfp4",
    "modelopt_fp4": "modelopt", "modelopt_mxfp8": "modelopt", "modelopt_mixed": "modelopt",
}  # fmt: skip
SET_BY_VLLM = ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config")


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _integer(value) or (isinstance(value, float) and isfinite(value))


def _row(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_integer, value))


# kind -> (what is expected, whether a value is one)
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("an integer of at least 1", lambda v: _integer(v) and v >= 1),
    "integer": ("an integer", _integer),
    "number": ("a finite number", _number),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "text": ("a non-empty string", lambda v: isinstance(v, str) and v.strip() != ""),
    "numbers": ("a list of finite numbers", lambda v: isinstance(v, list | tuple) and all(map(_number, v))),
    "schedule": (
        "a list of [first batch size, last batch size, num_speculative_tokens]",
        lambda v: isinstance(v, list | tuple) and all(map(_row, v)),
    ),
}


def _here(kind: str) -> Any:
    return field(default=None, metadata={"kind": kind, "role": "here"})


def _engine(kind: str, why: str, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind, "role": "engine", "why": why})


def _only(kind: str, why: str, default: Any = None, also: Any = None, choices: tuple[str, ...] = ()) -> Any:
    """Refused unless it is the default, or `also`, which means the same."""
    more = {"why": why, "admits": [v for v in (default, also) if v is not None], "choices": choices}
    return field(default=default, metadata={"kind": kind, "role": "refused", **more})


def _of(method: str, kind: str, default: Any = None) -> Any:
    """Refused because it belongs to another method."""
    return field(default=default, metadata={"kind": kind, "role": "refused", "method": method})


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """One field per key of vLLM's dict, with vLLM's defaults.

    quantization: three states. None is unset: the draft's own files decide. "none" ("unquant", SGLang's spelling, is read as the same) is
        plain whatever they say. Anything else is a method, which the draft's files must confirm.
    method: None stands for "eagle3".
    """

    model: str | None = _here("text")
    method: str | None = _here("text")
    num_speculative_tokens: int | None = _here("count")
    quantization: str | None = _here("text")
    revision: str | None = _here("text")
    max_model_len: int | None = _here("count")
    draft_load_config: LoadConfig | None = _here("load config")

    code_revision: str | None = _engine("text", "no code of a checkpoint is run")
    enforce_eager: bool | None = _engine("flag", "an engine's switch for CUDA graphs")
    attention_backend: str | None = _engine("text", "an engine's choice of attention kernel")
    moe_backend: str | None = _engine("text", "an engine's choice of expert kernel; the drafts read here are dense")
    disable_padded_drafter_batch: bool = _engine("flag", "how an engine lays out a batch", False)
    disable_eagle_block_drop: bool = _engine("flag", "an engine's prefix cache", False)
    use_local_argmax_reduction: bool = _engine("flag", "how tensor-parallel ranks agree on a token", False)

    draft_tensor_parallel_size: int | None = _only("count", "1 or the verifier's size, which is 1: both run on one device", also=1)
    kv_cache_dtype: str | None = _only("text", "the draft's cache holds the dtype that it computes in", also="auto")
    parallel_drafting: bool = _only("flag", "drafts that are trained for it (P-EAGLE) are not supported", False)
    draft_sample_method: str = _only("text", "each proposal is the draft's best token", "greedy", choices=("greedy", "probabilistic"))
    rejection_sample_method: str = _only(
        "text", "each proposal is compared with the verifier's own token", "standard", choices=("standard", "block", "synthetic")
    )
    synthetic_acceptance_rates: list[float] | None = _only("numbers", "acceptance is measured, never drawn")
    synthetic_acceptance_length: float | None = _only("number", "acceptance is measured, never drawn")
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = _only("schedule", "a run proposes one number of tokens")

    prompt_lookup_max: int | None = _of("ngram", "count")
    prompt_lookup_min: int | None = _of("ngram", "count")
    use_heterogeneous_vocab: bool = _of("draft_model", "flag", False)
    index_share_for_mtp_iteration: bool | None = _of("mtp", "flag")
    enable_adaptive_verification: bool = _of("dspark", "flag", False)
    dspark_draft_topk: int | None = _of("dspark", "count")
    suffix_decoding_max_tree_depth: int = _of("suffix", "integer", 24)
    suffix_decoding_max_cached_requests: int = _of("suffix", "integer", 10000)
    suffix_decoding_max_spec_factor: float = _of("suffix", "number", 1.0)
    suffix_decoding_min_token_prob: float = _of("suffix", "number", 0.1)

    def to_dict(self) -> dict[str, Any]:
        """vLLM's dict again: the keys that differ from vLLM's defaults, as JSON holds them."""
        return _changed(self)

    def plan_overrides(self) -> dict[str, Any]:
        """What of it `resolve` takes as overrides: quantization, where it is set, by the name of the stored format."""
        return {} if self.quantization is None else {"quantization": SAME_FORMAT.get(self.quantization, self.quantization)}

    def not_applicable(self) -> dict[str, str]:
        """The keys that are set and concern serving engines only -> why nothing here answers to them."""
        said = _changed(self)
        return {f.name: f.metadata["why"] for f in fields(self) if f.name in said and f.metadata["role"] == "engine"}


def parse_speculative_config(value: SpeculativeConfig | dict[str, Any] | str | None) -> SpeculativeConfig:
    """Read vLLM's `speculative_config`.

    Args:
        value: the dict; its JSON text; None for nothing said; or a `SpeculativeConfig`, which is returned as it is.

    Raises:
        ConfigError: text that is no JSON object, a key that vLLM does not know (the message has the nearest one), a value of another
            type, keys that contradict each other, or a setting that specbench cannot carry out.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    given = {} if value is None else _object(value)
    known = {f.name: f for f in fields(SpeculativeConfig)}
    for key in given:
        if key not in known:
            raise _unknown(key, list(known))
    config = SpeculativeConfig(**{key: _value(key, item, known[key]) for key, item in given.items()})
    _check_method(config.method)
    for name in ("synthetic_acceptance_rates", "synthetic_acceptance_length"):
        if getattr(config, name) is not None and config.rejection_sample_method != "synthetic":
            raise _refusal(name, getattr(config, name), f"rejection_sample_method is {config.rejection_sample_method!r}, not 'synthetic'")
    for name, f in known.items():
        if f.metadata["role"] == "refused":
            _check_support(name, getattr(config, name), f)
    return config


def check_speculative_config(config: SpeculativeConfig, pair: Pair) -> None:
    """Compare what `config` says with what `pair` is (its quantization is compared by `resolve`, see `plan_overrides`).

    Raises:
        ConfigError: another draft or draft_load_config than the pair's, a revision of a local folder, or a length that one of the models
            was not made for, or at which drafting would have to stop before the verifier does.
    """
    draft = pair.draft
    if config.model not in (None, draft.name):
        raise _refusal("model", config.model, f"the pair's draft is {draft.name!r}; name one of them")
    if config.revision is not None and draft.revision is None:
        raise _refusal("revision", config.revision, f"draft {draft.name!r} is a local folder and has none; remove the key")
    if config.draft_load_config is not None and pair.draft_load not in (None, config.draft_load_config):
        raise _refusal("draft_load_config", str(config.draft_load_config), f"the pair was opened with {pair.draft_load}; give one of them")
    if config.max_model_len is not None:
        _check_length(config.max_model_len, pair)


def _check_length(length: int, pair: Pair) -> None:
    paths = [f"{prefix}max_position_embeddings" for prefix in ("transformer_layer_config.", "text_config.", "")]
    for which, checkpoint in (("draft", pair.draft), ("verifier", pair.verifier)):
        found = look(checkpoint.config, *paths)
        said = f"{which} {checkpoint.name}/config.json: {found.key} is {found.value}"
        if found.key and length > found.value:
            raise _refusal("max_model_len", length, f"{said}; at most that is possible")
        if found.key and which == "verifier" and length < found.value:
            raise _refusal("max_model_len", length, f"{said}, and proposals are made as far as that; remove the key")


def _object(value: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            place = f"{error.msg} at line {error.lineno}, column {error.colno}"
            raise ConfigError(f"speculative_config is no JSON: {place} of {_short(error.doc)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"speculative_config is {_short(value)} ({type(value).__name__}); a dict or a JSON object's text is expected")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"speculative_config: {name!r} stands twice in one object; keep one")
    return dict(pairs)


def _unknown(key: Any, known: list[str]) -> ConfigError:
    if key == "tensor_parallel_size":
        return ConfigError(f"speculative_config has {key!r}, which is the verifier's setting; the draft's is 'draft_tensor_parallel_size'")
    if key in SET_BY_VLLM:
        return ConfigError(f"speculative_config has {key!r}, which vLLM fills in by itself; remove it")
    return ConfigError(f"speculative_config has no key {key!r}; {_nearest(key, known) or 'known: ' + ', '.join(known)}")


def _value(key: str, value: Any, f: Any) -> Any:
    """`value` as the field holds it."""
    if value is None and f.default is None:
        return None
    if f.metadata["kind"] == "load config":
        from .checkpoint.load_config import parse_load_config

        return parse_load_config(value, f"speculative_config.{key}")
    expected, fits = KINDS[f.metadata["kind"]]
    if not fits(value):
        or_null = " or null" if f.default is None else ""
        raise _refusal(key, value, f"{type(value).__name__} where {expected}{or_null} is expected")
    choices = f.metadata.get("choices")
    if choices and value not in choices:
        raise _refusal(key, value, f"expected one of {', '.join(map(repr, choices))}")
    if key == "quantization":
        return _quantization(value)
    return float(value) if f.metadata["kind"] == "number" else value


def _quantization(value: str) -> str:
    if value in PLAIN:
        return PLAIN[0]
    if value.lower() in ("none", "null", "false", "unquant", "unquantized", "plain"):
        raise _refusal("quantization", value, "null leaves it to the draft's own files; 'none' says plain whatever they say")
    if value in ("verifier", "target"):
        raise _refusal("quantization", value, "no method; for the verifier's, name its method, or give resolve the override 'verifier'")
    return value


def _check_method(method: str | None) -> None:
    if method in (None, METHOD):
        return
    if method in OTHER_METHODS or str(method).endswith("_mtp"):
        raise _refusal("method", method, f"specbench decodes with EAGLE-3 drafts: {METHOD!r} (or no method) is expected")
    near = _nearest(method, [METHOD, *OTHER_METHODS])
    raise _refusal("method", method, f"no method of vLLM{' (' + near + ')' if near else ''}; {METHOD!r} is expected")


def _check_support(name: str, value: Any, f: Any) -> None:
    if "method" in f.metadata and value != f.default:
        raise _refusal(name, value, f"it belongs to method {f.metadata['method']!r}, and the method is {METHOD!r}; remove the key")
    if "why" in f.metadata and value is not None and value not in f.metadata["admits"]:
        admitted = " or ".join(map(json.dumps, f.metadata["admits"])) or "null"
        raise _refusal(name, value, f"specbench carries out {admitted} only: {f.metadata['why']}")


def _refusal(key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"speculative_config.{key} is {_short(value)}: {why}")


def _nearest(word: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(word), known, n=1)
    return f"nearest: {near[0]!r}" if near else ""


def _changed(instance: Any) -> dict[str, Any]:
    """What of a settings dataclass differs from its defaults, as JSON holds it."""
    said = {}
    for f in fields(instance):
        value = getattr(instance, f.name)
        if value != (f.default_factory() if f.default_factory is not MISSING else f.default):
            said[f.name] = _plain(value)
    return said


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return _changed(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""Whether the values of both config.json are of a kind that rules can work with.

What enters: configs as JSON gave them. What leaves: findings about values that are no counts, lists or objects where those are expected. It
knows kinds and bounds, not what a value means; what follows may then rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any

from ..checkpoint.families import Dialect, look
from ..pair import text_part
from .findings import Finding, shown
from .subject import finding

LARGEST = 1 << 26  # of any size; real ones stay below 300,000
MOST_LAYERS = 1024


def _count(value: Any, most: int = LARGEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


Test = tuple[Callable[[Any], bool], str]
COUNT: Test = (_count, f"a whole number from 1 to {LARGEST}")
LAYERS: Test = (lambda value: _count(value, MOST_LAYERS), f"a whole number from 1 to {MOST_LAYERS}")
POSITIONS: Test = (lambda value: _count(value, 1 << 40), "a whole number of at least 1")
NUMBER: Test = (_number, "a positive number")
OBJECT: Test = (lambda value: isinstance(value, dict), "an object")
TEXT: Test = (lambda value: isinstance(value, str), "a text")
TEXTS: Test = (_texts, "a list of texts")

TOP: dict[str, Test] = {
    "architectures": TEXTS, "eagle_config": OBJECT, "transformer_layer_config": OBJECT, "speculators_config": OBJECT, "text_config": OBJECT,
    "torch_dtype": TEXT, "dtype": TEXT, "model_type": TEXT,
}  # fmt: skip
SIZES: dict[str, Test] = {
    "hidden_size": COUNT, "intermediate_size": COUNT, "num_attention_heads": COUNT, "num_key_value_heads": COUNT, "head_dim": COUNT,
    "vocab_size": COUNT, "num_hidden_layers": LAYERS, "max_position_embeddings": POSITIONS, "rms_norm_eps": NUMBER, "sliding_window": COUNT,
    "layer_types": TEXTS, "rope_theta": NUMBER, "rope_parameters": OBJECT, "rope_scaling": OBJECT,
}  # fmt: skip
# Of a verifier only what rules work with: other sizes may be lists, one entry a layer.
VERIFIER_SIZES = {key: SIZES[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "rope_theta")}
DRAFT_ONLY: dict[str, Test] = {"draft_vocab_size": COUNT, "target_hidden_size": COUNT}
NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers")  # of the verifier, without which no draft can be placed beside it
# What each scaling of rotary tables cannot do without (transformers modeling_rope_utils).
SCALINGS = {
    "linear": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip


def top_values(side: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """What can be asked before the draft's family is known."""
    yield from _wrong(side, "", config, TOP)


def verifier_values(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Sizes of the verifier: present where they are needed, and of the right kind."""
    part = text_part(config)
    prefix = "" if part is config else "text_config."
    for key in NEEDED:
        if part.get(key) is None:
            said = {f"verifier config.json: {prefix}{key}": "absent"}
            yield finding("size-missing", f"verifier config.json lacks {prefix}{key}; nothing stands in for it", said)
    yield from _wrong("verifier", prefix, part, VERIFIER_SIZES)
    yield from _rope("verifier", prefix, part)


def draft_values(dialect: Dialect) -> Iterator[Finding]:
    """Sizes of the draft's layer, where its family writes them."""
    prefix = dialect.family.config_prefix
    section = look(dialect.config, prefix.rstrip(".")).value if prefix else dialect.config
    yield from _wrong("draft", prefix, section, SIZES)
    said = {key: dialect.flag(key) for key in DRAFT_ONLY}
    for key, found in said.items():
        if found.key is not None and not DRAFT_ONLY[key][0](found.value):
            yield _finding("draft", found.key, found.value, DRAFT_ONLY[key][1])
    heads, kv_heads = section.get("num_attention_heads"), section.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        yield _finding("draft", f"{prefix}num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    yield from _rope("draft", prefix, section)


def _wrong(side: str, prefix: str, section: Mapping[str, Any], tests: Mapping[str, Test]) -> Iterator[Finding]:
    for key, (fits, expected) in tests.items():
        value = section.get(key)
        if value is not None and not fits(value):
            yield _finding(side, prefix + key, value, expected)


def _rope(side: str, prefix: str, section: Mapping[str, Any]) -> Iterator[Finding]:
    for name in ("rope_parameters", "rope_scaling"):
        scaling = section.get(name)
        if not isinstance(scaling, dict):
            continue
        yield from _wrong(side, f"{prefix}{name}.", scaling, {"rope_theta": NUMBER})
        kind = scaling.get("rope_type") or scaling.get("type")
        needed = SCALINGS.get(kind, ()) if isinstance(kind, str) else ()
        for key in needed:
            value = scaling.get(key)
            if not _number(value):
                yield _finding(
                    side, f"{prefix}{name}.{key}", "absent" if value is None else value, f"a positive number, which {kind!r} needs"
                )


def _finding(side: str, key: str, value: Any, expected: str) -> Finding:
    sentence = f"{side} config.json: {shown(key)} is {shown(value)}; {expected} is expected"
    return finding("config-value", sentence, {f"{side} config.json: {key}": value})

"""Draft and verifier dialects: how each spells its settings.

What enters: config.json of a checkpoint. What leaves: values by canonical name, each with the key that it came from. It does not know policies, the other
half of the pair, or weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

VERIFIER_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Found:
    """A value and the key path that it was read from ("transformer_layer_config.rope_theta"); key is None where the file is silent."""

    value: Any
    key: str | None


def look(config: dict[str, Any], *paths: str) -> Found:
    """The first of dotted `paths` that `config` has with a value other than null."""
    for path in paths:
        value: Any = config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return Found(value, path)
    return Found(None, None)


def draft_prefix(config: dict[str, Any], source: str) -> str:
    """Where a draft's layer sizes sit: "transformer_layer_config." in the speculators format.

    Raises:
        ConfigError: a dialect without a reader.
    """
    method = config.get("speculators_model_type")
    if method == "eagle3" and isinstance(config.get("transformer_layer_config"), dict):
        return "transformer_layer_config."
    raise ConfigError(
        f"{source}: no known EAGLE-3 dialect (speculators_model_type {method!r}, architectures {config.get('architectures')!r}); "
        "known: speculators (speculators_model_type 'eagle3' with transformer_layer_config)"
    )


def rope_theta(config: dict[str, Any], prefix: str, source: str) -> Found:
    """Rotary base from `rope_parameters` (transformers 5) or `rope_theta`; 10000 where neither is set, as every reader does.

    Raises:
        ConfigError: the two disagree, or a scaling without a reader.
    """
    new, old = look(config, f"{prefix}rope_parameters.rope_theta"), look(config, f"{prefix}rope_theta")
    if new.key and old.key and float(new.value) != float(old.value):
        raise ConfigError(f"{source}: {new.key} is {new.value}, {old.key} is {old.value}; correct one of them")
    kind = look(
        config, f"{prefix}rope_parameters.rope_type", f"{prefix}rope_scaling.rope_type", f"{prefix}rope_scaling.type"
    )
    if kind.value not in (None, "default"):
        raise ConfigError(f"{source}: {kind.key} is {kind.value!r}; readable: 'default'")
    found = new if new.key else old
    return found if found.key else Found(10000.0, None)

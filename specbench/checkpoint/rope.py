"""Rotary settings: both config layouts read into one value.

What enters: a config dictionary. What leaves: a `Rope`. It does not know which model rotates, nor positions beyond its own table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

# What transformers computes for these (modeling_rope_utils); "mrope" of text-only drafts is the default: all its sections share one
# position.
KINDS = ("default", "linear", "llama3", "yarn")
PLAIN_KINDS = ("default", "mrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: base. kind: one of `KINDS`. parameters: the scaling's other keys, sorted. max_positions: of the config, which some scalings
    read.
    """

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    max_positions: int = 2048

    def __str__(self) -> str:
        scaling = "" if self.kind == "default" else f" {self.kind} " + " ".join(f"{k}={v}" for k, v in self.parameters)
        return f"theta {self.theta:g}{scaling}"


def read_rope(config: Mapping[str, Any], where: str, max_positions: int) -> tuple[Rope, str]:
    """Rotary settings from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Returns:
        the settings and the keys they came from. Without any base, 10000: the default that EAGLE, vLLM, SGLang and speculators share.

    Raises:
        ConfigError: the two layouts disagree, the kind is unknown, or only a part of the head would rotate.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    new, old = dict(new) if isinstance(new, dict) else {}, dict(old) if isinstance(old, dict) else {}
    theta, keys = _agreed(new.pop("rope_theta", None), config.get("rope_theta"), "rope_theta", where)
    old.pop("rope_theta", None)
    kinds = [_kind(section) for section in (new, old) if section]
    if len(set(kinds)) > 1:
        raise _conflict(
            f"{where}: rope_parameters says {kinds[0]!r} and rope_scaling {kinds[1]!r}; correct one of them", "rope_type", *kinds
        )
    kind = kinds[0] if kinds else "default"
    parameters = {k: v for k, v in {**old, **new}.items() if v is not None}
    clash = [k for k in old if k in new and old[k] != new[k]]
    if clash:
        both = new[clash[0]], old[clash[0]]
        raise _conflict(
            f"{where}: {clash[0]} is {both[0]} in rope_parameters and {both[1]} in rope_scaling; correct one of them", clash[0], *both
        )
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        said = {"config.json: partial_rotary_factor": partial}
        raise ConfigError(
            f"{where}: partial_rotary_factor is {partial}; whole heads (1.0) are supported", code="rope-unsupported", evidence=said
        )
    if kind in PLAIN_KINDS:
        kind, parameters = "default", {}
    if kind not in KINDS:
        raise ConfigError(
            f"{where}: rope type is {kind!r}; supported: {', '.join((*KINDS, 'mrope'))}",
            code="rope-unsupported",
            evidence={"config.json: rope_type": kind},
        )
    if kinds:
        keys = f"{keys}, {'rope_parameters' if new else 'rope_scaling'}" if keys else "rope_parameters" if new else "rope_scaling"
    rope = Rope(10000.0 if theta is None else theta, kind, tuple(sorted(parameters.items())), max_positions)
    return rope, keys or "default 10000: no rope_theta"


def _conflict(text: str, key: str, new: Any, old: Any) -> ConfigError:
    said = {f"config.json: rope_parameters.{key}": new, f"config.json: {key}": old}
    return ConfigError(text, code="rope-conflict", evidence=said)


def _kind(section: dict[str, Any]) -> str:
    values = {key: section.pop(key) for key in ("rope_type", "type") if key in section}
    return str(values.get("rope_type") or values.get("type") or "default")


def _agreed(new: Any, old: Any, key: str, where: str) -> tuple[float | None, str]:
    if new is not None and old is not None and float(new) != float(old):
        said = f"{where}: {key} is {new} in rope_parameters and {old} at the top level; correct one of them, or override {key}"
        raise _conflict(said, key, new, old)
    if new is not None:
        return float(new), f"rope_parameters.{key}"
    return (None, "") if old is None else (float(old), key)

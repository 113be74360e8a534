"""What a checkpoint's quantization section says about each of its modules.

What enters: a config dictionary (`quantization_config`) and module names. What leaves: a `Scheme` per module, or None
for a plain one. It does not know tensors, files, or whether the modules belong to a verifier or a draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one module are stored.

    method: the on-disk format ("pack-quantized" of compressed-tensors). bits: width of one weight. group_size: input
    columns that share a scale. symmetric: whether zero points are stored (False) or implied (True).
    """

    method: str
    bits: int
    group_size: int
    symmetric: bool

    def __str__(self) -> str:
        return f"W{self.bits}A16 {self.method} g{self.group_size} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """A parsed quantization section: which modules are quantized, and how.

    targets: class names ("Linear"), exact names or `re:` patterns of the group. ignore: the same, exempt.
    """

    scheme: Scheme
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def for_module(self, name: str) -> Scheme | None:
        """The scheme of the linear module `name` (its name in the checkpoint), or None if it is plain.

        Matching follows compressed-tensors 0.20 (`match_name`: exact, or a regular expression behind `re:`); the class name
        "Linear" matches every linear module, `lm_head` included unless ignored.
        """
        if any(match_name(name, pattern) or pattern == "Linear" for pattern in self.ignore):
            return None
        if any(match_name(name, pattern) or pattern == "Linear" for pattern in self.targets):
            return self.scheme
        return None


def parse_quantization(section: dict[str, Any] | None, source: str) -> Quantization | None:
    """Read a `quantization_config` section.

    Args:
        section: the section, or None where the config has none.
        source: file and key, for messages.

    Raises:
        ConfigError: a method, format or layout that has no reader here.
    """
    if not section:
        return None
    method = section.get("quant_method")
    if method != "compressed-tensors":
        raise ConfigError(f"{source}: quant_method is {method!r}; readable here: 'compressed-tensors'")
    config = QuantizationConfig.model_validate({k: v for k, v in section.items() if k != "version"})
    if config.format != "pack-quantized":
        raise ConfigError(f"{source}: format is {config.format!r}; readable here: 'pack-quantized'")
    groups = config.config_groups
    if len(groups) != 1:
        raise ConfigError(f"{source}: {len(groups)} config groups ({sorted(groups)}); readable here: one")
    (group,) = groups.values()
    weights = group.weights
    if weights is None or weights.num_bits != 4 or weights.group_size is None or weights.actorder is not None:
        raise ConfigError(f"{source}: weights are {weights}; readable here: 4 bits in groups, without actorder")
    if group.input_activations is not None:
        raise ConfigError(f"{source}: input_activations is set; readable here: weight-only schemes")
    return Quantization(
        scheme=Scheme("pack-quantized", weights.num_bits, weights.group_size, bool(weights.symmetric)),
        targets=tuple(group.targets),
        ignore=tuple(config.ignore or ()),
    )

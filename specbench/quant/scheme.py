"""What a checkpoint's quantization section says about each of its modules.

What enters: a quantization section (`quantization_config`, hf_quant_config.json) and module names. What leaves: a `Scheme` per module, or
None for a plain one. It does not know tensors, files, or whether the modules belong to a verifier or a draft.

Matching follows each method's own reader: compressed-tensors' `match_name` (exact, or a regular expression behind `re:`), transformers'
substring rule for `modules_to_not_convert` of AWQ, GPTQ and fp8, ModelOpt's shell patterns for `exclude_modules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from operator import eq
from typing import Any

from ..errors import ConfigError

# Class names of compressed-tensors targets that mean any linear layer.
LINEAR_CLASSES = ("Linear", "ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear")


@dataclass(frozen=True, slots=True)
class Activations:
    """How inputs are quantized before the product. kind: "int8", "fp8", "nvfp4". dynamic: scales computed per call, else stored.

    group_size: columns that share a scale, or None. A dynamic scale is one a row, also where a config asks for one a tensor: vLLM does so
    where its kernels can, and with a scale over all rows a token's logits would depend on its neighbours: speculation would change the
    output.
    """

    kind: str
    dynamic: bool
    symmetric: bool = True
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one module are stored.

    format: the on-disk layout, a key of `formats.FORMATS`. bits: width of one weight. strategy: what shares a scale ("tensor", "channel",
    "group", "block").
    group_size: input columns that share a scale, None for all. block: rows and columns of a block. symmetric: zero points are implied
    (True) or stored. actorder: columns are grouped by a stored index (g_idx). activations: None for weight-only schemes.
    """

    format: str
    bits: int
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    actorder: bool = False
    activations: Activations | None = None

    def __str__(self) -> str:
        width = f"W{self.bits}A{16 if self.activations is None else 4 if self.activations.kind == 'nvfp4' else 8}"
        share = {"group": f"g{self.group_size}", "block": f"block {self.block}"}.get(self.strategy, self.strategy)
        return f"{width} {self.format} {share}{'' if self.symmetric else ' asym'}{' actorder' if self.actorder else ''}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose name `matches` are stored as `scheme`."""

    matches: Callable[[str], bool]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """A parsed section: the first rule that matches decides, unless `ignored`."""

    rules: tuple[Rule, ...]
    ignored: Callable[[str], bool] = field(repr=False)

    def for_module(self, name: str) -> Scheme | None:
        """The scheme of the linear module `name` (its checkpoint name), or None if it is plain."""
        return self.for_any((name,))

    def for_any(self, names: Sequence[str]) -> Scheme | None:
        """The same for a module that goes by several names; it is ignored if one of them is."""
        if any(self.ignored(name) for name in names):
            return None
        return next((rule.scheme for rule in self.rules if any(rule.matches(name) for name in names)), None)


def parse_quantization(section: dict[str, Any] | None, source: str) -> Quantization | None:
    """Read a quantization section.

    Args:
        section: the section, or None where there is none.
        source: file and key, for messages.

    Raises:
        ConfigError: a method, format or layout without a reader, named.
    """
    if not section:
        return None
    method = str(section.get("quant_method") or ("awq" if "w_bit" in section else ""))
    reader = READERS.get(method)
    if reader is None:
        raise ConfigError(f"{source}: quant_method is {method!r}; readable: {', '.join(READERS)}")
    try:
        return reader(section, source)
    except (TypeError, ValueError, AttributeError, LookupError, re.error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{source}: {method} section cannot be read ({type(error).__name__}: {error}); a value is of another kind"
        ) from None


def _compressed_tensors(section: dict[str, Any], source: str) -> Quantization:
    from compressed_tensors.quantization import QuantizationConfig
    from pydantic import ValidationError

    section, reordered = _without_actorder(section)
    try:
        config = QuantizationConfig.model_validate(
            {k: v for k, v in section.items() if k not in ("version", "sparsity_config", "transform_config")}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{source}: compressed-tensors cannot read {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except TypeError as error:  # its own comparisons come before its checks of types
        raise ConfigError(f"{source}: compressed-tensors cannot read it ({error}); group_size and num_bits are numbers") from None
    online = online_transforms(section)
    if online:
        raise ConfigError(
            f"{source}: transform_config applies {online[0]} while running; only transforms that are folded into weights are readable"
        )
    sparsity = (section.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ConfigError(f"{source}: sparsity format {sparsity!r} has no reader here; 'dense' is readable")
    if not config.config_groups:
        raise ConfigError(f"{source}: 0 config groups; at least one is expected")
    rules = []
    for name, group in config.config_groups.items():
        if group.output_activations is not None:
            raise ConfigError(f"{source}: {name}: output_activations is set; no kernel here quantizes outputs")
        layout = getattr(group, "format", None) or config.format
        if group.weights is not None:
            scheme = _ct_scheme(group, _text(layout), f"{source}: {name}", name in reordered)
            rules.append(Rule(_ct_matcher(tuple(group.targets), targets=True), scheme))
    return Quantization(tuple(rules), _ct_matcher(tuple(config.ignore or ()), targets=False))


def _without_actorder(section: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The section without actorder "group", which compressed-tensors 0.20 no longer accepts, and the groups that had it: older files
    store g_idx.
    """
    groups = section.get("config_groups")
    reordered: set[str] = set()
    if not isinstance(groups, dict):
        return section, reordered
    cleaned = {}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("actorder") in ("group", True):
            reordered.add(name)
            group = {**group, "weights": {**weights, "actorder": None}}
        cleaned[name] = group
    return {**section, "config_groups": cleaned}, reordered


def _ct_scheme(group: Any, layout: str, source: str, actorder: bool) -> Scheme:
    weights, inputs = group.weights, group.input_activations
    readable = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
    if layout not in readable:
        raise ConfigError(f"{source}: format is {layout!r}; readable: {', '.join(readable)}")
    wanted = "float" if layout in ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized") else "int"
    if layout != "naive-quantized" and (_text(weights.type) != wanted or weights.num_bits not in (4, 8)):
        raise ConfigError(
            f"{source}: format {layout!r} with type {_text(weights.type)!r} and num_bits {weights.num_bits}; {wanted!r} of 4 or 8 bits "
            f"is expected"
        )
    strategy = {"tensor_group": "group"}.get(_text(weights.strategy), _text(weights.strategy))
    activations = None
    if inputs is not None and layout not in ("pack-quantized", "mxfp4-pack-quantized"):
        kind = "nvfp4" if layout == "nvfp4-pack-quantized" else "int8" if _text(inputs.type) == "int" else "fp8"
        dynamic = inputs.dynamic is True or inputs.dynamic == "local"
        activations = Activations(kind, dynamic, bool(inputs.symmetric), inputs.group_size)
    if layout == "naive-quantized":
        layout = "int-quantized" if _text(weights.type) == "int" else "float-quantized"
    block = tuple(weights.block_structure) if weights.block_structure else None
    if actorder and layout != "pack-quantized":
        raise ConfigError(f"{source}: actorder 'group' with format {layout!r}; 'pack-quantized' stores the order of columns")
    group_size = weights.group_size if strategy == "group" else None
    return Scheme(layout, weights.num_bits, strategy, group_size, block, bool(weights.symmetric), actorder, activations)


def _ct_matcher(patterns: tuple[str, ...], targets: bool) -> Callable[[str], bool]:
    from compressed_tensors.utils.match import match_name

    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    parts = {part: whole for whole, members in fused.items() for part in members}
    for pattern in patterns:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")

    def matches(name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        spellings = [name, f"{parent}.{parts[leaf]}"] if leaf in parts else [name]
        return any(pattern in LINEAR_CLASSES or any(match_name(s, pattern) for s in spellings) for pattern in patterns)

    return matches


def _awq(section: dict[str, Any], source: str) -> Quantization:
    bits, group = section.get("bits", section.get("w_bit")), section.get("group_size", section.get("q_group_size"))
    version = str(section.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ConfigError(f"{source}: AWQ with bits {bits!r} and version {version!r}; readable: 4 bits, 'gemm'")
    scheme = Scheme("awq", 4, "group", _group(group, source), symmetric=False)
    return Quantization((Rule(_body, scheme),), _substrings(section.get("modules_to_not_convert")))


def _gptq(section: dict[str, Any], source: str) -> Quantization:
    bits, layout = section.get("bits"), section.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
        raise ConfigError(f"{source}: GPTQ with bits {bits!r} and checkpoint_format {layout!r}; readable: 4 or 8 bits, 'gptq' or 'gptq_v2'")
    group = section.get("group_size")
    scheme = Scheme(
        layout, bits, "group", None if group == -1 else _group(group, source), symmetric=False, actorder=bool(section.get("desc_act"))
    )
    everything = bool(section.get("lm_head"))
    return Quantization(
        (Rule((lambda _: True) if everything else _body, scheme),), _substrings(section.get("modules_in_block_to_not_quantize"))
    )


def _fp8(section: dict[str, Any], source: str) -> Quantization:
    block, mode = section.get("weight_block_size"), section.get("activation_scheme", "dynamic")
    if mode not in ("dynamic", "static"):
        raise ConfigError(f"{source}: activation_scheme is {mode!r}; 'dynamic' or 'static' is expected")
    if block is not None:
        scheme = Scheme(
            "fp8-block", 8, "block", None, (int(block[0]), int(block[1])), activations=Activations("fp8", True, group_size=int(block[1]))
        )
    else:
        scheme = Scheme("fp8", 8, "tensor", activations=Activations("fp8", mode == "dynamic"))
    ignored = section.get("ignored_layers") or section.get("modules_to_not_convert")
    return Quantization((Rule(_body, scheme),), _substrings(ignored))


def _fbgemm(section: dict[str, Any], source: str) -> Quantization:
    scheme = Scheme("fbgemm-fp8", 8, "channel", activations=Activations("fp8", True))
    return Quantization((Rule(_body, scheme),), _substrings(section.get("modules_to_not_convert")))


def _modelopt(section: dict[str, Any], source: str) -> Quantization:
    algorithm = section.get("quant_algo")
    patterns = tuple(map(str, section.get("exclude_modules") or section.get("ignore") or ()))

    def ignored(name: str) -> bool:
        return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)

    if algorithm == "MIXED_PRECISION":
        entries = section.get("quantized_layers") or {}
        schemes = {name: _modelopt_scheme(entry.get("quant_algo"), entry, f"{source}: {name}") for name, entry in entries.items()}
        return Quantization(tuple(Rule(partial(eq, name), scheme) for name, scheme in schemes.items()), ignored)
    return Quantization((Rule(lambda _: True, _modelopt_scheme(algorithm, section, source)),), ignored)


def _modelopt_scheme(algorithm: Any, section: dict[str, Any], source: str) -> Scheme:
    if algorithm == "FP8":
        return Scheme("modelopt-fp8", 8, "tensor", activations=Activations("fp8", False))
    if algorithm == "NVFP4":
        group = _group(section.get("group_size", 16), source)
        return Scheme("modelopt-nvfp4", 4, "group", group, activations=Activations("nvfp4", True, group_size=group))
    raise ConfigError(f"{source}: quant_algo is {algorithm!r}; readable: 'FP8', 'NVFP4', 'MIXED_PRECISION'")


def _bitsandbytes(section: dict[str, Any], source: str) -> Quantization:
    ignored = _substrings(section.get("llm_int8_skip_modules"))
    name = "bnb-int8" if section.get("load_in_8bit") else f"bnb-{section.get('bnb_4bit_quant_type', 'fp4')}"
    scheme = Scheme(name, 8 if name == "bnb-int8" else 4, "channel" if name == "bnb-int8" else "group", 64 if name != "bnb-int8" else None)
    return Quantization((Rule(_body, scheme),), ignored)


def _mxfp4(section: dict[str, Any], source: str) -> Quantization:
    return Quantization((Rule(_body, Scheme("mxfp4", 4, "group", 32)),), _substrings(section.get("modules_to_not_convert")))


READERS: dict[str, Callable[[dict[str, Any], str], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}


def _body(name: str) -> bool:
    """Everything but the head: what AWQ, GPTQ and fp8 files quantize unless they say otherwise."""
    return name.rpartition(".")[2] != "lm_head"


def _substrings(names: Any) -> Callable[[str], bool]:
    listed = tuple(str(n) for n in names or ())
    return lambda name: any(part in name for part in listed)


def online_transforms(section: dict[str, Any]) -> list[str]:
    """Transforms (QuaRot, SpinQuant) of a compressed-tensors section that act on activations, as "name at location"."""
    groups = (section.get("transform_config") or {}).get("config_groups") or {}
    places = [(name, arg.get("location")) for name, group in groups.items() for arg in group.get("apply") or ()]
    return [f"{name} at {place}" for name, place in places if place not in ("weight_input", "weight_output")]


def _text(value: Any) -> str:
    """compressed-tensors keeps some settings as enumerations and some as plain strings."""
    return str(getattr(value, "value", value))


def _group(value: Any, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{source}: group_size is {value!r}; a positive number of columns is expected")
    return value

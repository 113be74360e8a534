"""Draft dialects: how each family names its tensors and spells its settings. Adding a family is one entry in `FAMILIES`.

What enters: config.json and tensor headers of a draft. What leaves: a `Dialect`: the family, its tensors by canonical name, and lookups of
settings by canonical key, each with the place it came from. It does not know policies, the verifier, or weights.

Canonical names are those of the speculators format: fc, layers.{i}.*, norm, lm_head, embed_tokens, d2t, t2d, input_norm, fc_norm.{i}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError
from .files import TensorInfo

Convention = Literal["input", "output"]

EAGLE3_NEEDS = (
    "an EAGLE-3 draft holds fc.weight [hidden, K x verifier hidden], one or more decoder layers (midlayer.* or layers.0.*) whose q_proj "
    "reads 2 x hidden, norm.weight and mostly lm_head.weight and d2t"
)


@dataclass(frozen=True, slots=True)
class Family:
    """One dialect.

    architectures: strings that it writes. config_prefix: where layer sizes sit in config.json. renames: (stored prefix, canonical prefix),
    tried in order, on whole dotted prefixes. ids_key: where auxiliary layer ids sit. ids_convention: what an id means ("input": the
    residual stream entering that layer; "output": leaving it; None: undecided, see `plan`). norm_before_residual: the value its readers
    take where the config is silent.
    """

    name: str
    made_by: str
    architectures: tuple[str, ...]
    config_prefix: str
    renames: tuple[tuple[str, str], ...]
    ids_convention: Convention | None
    norm_before_residual: bool


# facts: EAGLE eagle/model/cnets.py; SpecForge export/to_sglang.py; speculators models/eagle3/config.py; ModelOpt
# export/plugins/hf_spec_export.py; # AngelSlim train/configs; NeMo AutoModel eagle3_llama; vLLM 0.32
# model_executor/models/{llama,qwen3}_eagle3.py
FAMILIES: tuple[Family, ...] = (
    Family(
        name="speculators",
        made_by="vllm-project/speculators, converted and trained drafts (RedHatAI, nm-testing)",
        architectures=("Eagle3DraftModel", "Eagle3Speculator", "Eagle3Qwen3ForCausalLM"),
        config_prefix="transformer_layer_config.",
        renames=(),
        ids_convention="input",
        norm_before_residual=True,
    ),
    Family(
        name="nemo",
        made_by="NVIDIA NeMo AutoModel",
        architectures=("LlamaEagle3DraftModel", "LlamaForCausalLMEagle3"),
        config_prefix="",
        renames=(("model.midlayer.", "layers.0."), ("model.", "")),
        ids_convention=None,
        norm_before_residual=False,
    ),
    Family(
        name="modelopt",
        made_by="NVIDIA ModelOpt exports (nvidia/*-Eagle3)",
        architectures=("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"),
        config_prefix="",
        renames=(),
        ids_convention=None,
        norm_before_residual=False,
    ),
    Family(
        name="specforge",
        made_by="SGLang SpecForge exports (lmsys, AQ-MedAI, Tengyunw)",
        architectures=("LlamaForCausalLMEagle3",),
        config_prefix="",
        renames=(("midlayer.", "layers.0."),),
        ids_convention=None,
        norm_before_residual=False,
    ),
    Family(
        name="angelslim",
        made_by="Tencent AngelSlim",
        architectures=("Eagle3LlamaForCausalLM",),
        config_prefix="",
        renames=(("midlayer.", "layers.0."),),
        ids_convention=None,
        norm_before_residual=False,
    ),
    Family(
        name="safeailab",
        made_by="SafeAILab EAGLE originals (yuhuili/EAGLE3-*)",
        architectures=("LlamaForCausalLM",),
        config_prefix="",
        renames=(("midlayer.", "layers.0."),),
        ids_convention=None,
        norm_before_residual=False,
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
KNOWN_ARCHITECTURES = tuple(dict.fromkeys(a for family in FAMILIES for a in family.architectures)) + ("EagleLlamaForCausalLM",)

# Relatives that share keys or tensors with EAGLE-3 and are refused by name: (what, how it shows in names, how it shows in config.json).
OTHER_METHODS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("P-EAGLE (parallel drafting)", ("mask_hidden",), ("peagle", "PEagle", "Peagle")),
    ("an MLA draft (DeepSeek attention)", ("q_a_proj", "kv_a_proj_with_mqa"), ("Eagle3Deepseek",)),
    ("DFlash", (), ("dflash", "DFlash")),
    ("DSpark", (), ("dspark", "DSpark")),
    ("Medusa", ("medusa_head",), ("medusa", "Medusa")),
    ("an MTP module", ("mtp",), ("mtp",)),
)
PLAIN = ("F64", "F32", "F16", "BF16")  # safetensors' names of dtypes in which a weight is stored as it is
# Saved by some trainers, read by nobody at inference.
IGNORED_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, slots=True)
class Found:
    """A value and the key path that it was read from ("transformer_layer_config.rope_theta"); key is None where the file is silent."""

    value: Any
    key: str | None


@dataclass(frozen=True, slots=True)
class Dialect:
    """A draft as its family spells it. tensors: headers by canonical name. ignored: stored names that nothing reads. notes: oddities of
    its own.
    """

    family: Family
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

    def size(self, name: str) -> Found:
        """A size of the decoder layer, by its transformers name."""
        return look(self.config, self.family.config_prefix + name)

    def flag(self, name: str) -> Found:
        """A switch: at the top, among the layer's sizes, or nested in eagle_config."""
        paths = dict.fromkeys((name, self.family.config_prefix + name, f"eagle_config.{name}"))
        return look(self.config, *paths)


def look(config: dict[str, Any], *paths: str) -> Found:
    """The first of dotted `paths` that `config` has with a value other than null."""
    for path in paths:
        value: Any = config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return Found(value, path)
    return Found(None, None)


def recognise(config: dict[str, Any], tensors: Mapping[str, TensorInfo], where: str) -> Dialect:
    """Tell the family of a draft, from its tensors first and its config second.

    Raises:
        ConfigError: another drafting method (named), or no EAGLE-3 draft at all.
    """
    architectures = [str(a) for a in config.get("architectures") or ()]
    _refuse_other_methods(config, tensors, architectures, where)
    family = _family(config, tensors, architectures)
    canonical: dict[str, TensorInfo] = {}
    ignored = []
    for name, info in tensors.items():
        if name in IGNORED_TENSORS or name.endswith("rotary_emb.inv_freq"):
            ignored.append(name)
            continue
        renamed = rename(name, family)
        if renamed in canonical:
            both = {f"draft tensors: {stored}": "stored" for stored in (canonical[renamed].name, name)}
            raise ConfigError(
                f"{where}: {canonical[renamed].name!r} and {name!r} are both {renamed!r}; keep one", code="stored-twice", evidence=both
            )
        canonical[renamed] = info
    _refuse_other_models(canonical, architectures, where)
    notes = []
    if not set(architectures) & set(family.architectures):
        known = "a known EAGLE-3 name" if set(architectures) & set(KNOWN_ARCHITECTURES) else f"known: {', '.join(KNOWN_ARCHITECTURES)}"
        notes.append(f"architectures is {architectures or 'absent'}, the tensors are EAGLE-3 in the {family.name} layout ({known})")
    return Dialect(family, config, canonical, tuple(ignored), tuple(notes))


def rename(name: str, family: Family) -> str:
    """Canonical name of a stored tensor: exact prefixes of the family's table, nothing else."""
    for stored, canonical in family.renames:
        if name.startswith(stored):
            return canonical + name.removeprefix(stored)
    return name


def _family(config: dict[str, Any], tensors: Mapping[str, TensorInfo], architectures: list[str]) -> Family:
    if isinstance(config.get("transformer_layer_config"), dict):
        # a speculators config around another exporter's names: sizes nested, tensors as they are
        return BY_NAME["speculators"]
    if any(name.startswith("model.") for name in tensors):
        return BY_NAME["nemo"]
    if any(name.startswith("midlayer.") for name in tensors):
        for family in (BY_NAME["specforge"], BY_NAME["angelslim"]):
            if set(architectures) & set(family.architectures):
                return family
        return BY_NAME["safeailab"]
    return BY_NAME["modelopt"]


def _refuse_other_methods(config: dict[str, Any], tensors: Mapping[str, TensorInfo], architectures: list[str], where: str) -> None:
    method = str(config.get("speculators_model_type") or "")
    spellings = [*architectures, method, *(key for key in config if key.endswith("_config"))]
    parts = {part for name in tensors for part in name.split(".")}
    for what, in_names, in_config in OTHER_METHODS:
        hit = next((p for p in in_names if p in parts), None) or next((s for s in spellings for c in in_config if c in s), None)
        if hit is not None:
            raise _other_method(where, f"this is {what} (seen: {hit!r}), which is not supported", hit, what)
    if method and method != "eagle3":
        raise _other_method(where, f"speculators_model_type is {method!r}; 'eagle3' is supported", "speculators_model_type", method)
    if config.get("parallel_drafting") or look(config, "eagle_config.parallel_draft_step").value not in (None, 0, 1):
        raise _other_method(where, "this draft was trained for parallel drafting, which is not supported", "parallel drafting", "asked for")


def _other_method(where: str, what: str, seen: str, value: str) -> ConfigError:
    return ConfigError(f"{where}: {what}; {EAGLE3_NEEDS}", code="other-method", evidence={f"draft: {seen}": value})


def _refuse_other_models(tensors: Mapping[str, TensorInfo], architectures: list[str], where: str) -> None:
    """A first layer that reads 2 x hidden is what every EAGLE-3 draft has and no other model."""
    first = [name for name in tensors if name.startswith("layers.0.self_attn.q_proj.")]
    fused = any(name.startswith("fc.") for name in tensors)
    if not first or (not fused and not _reads_two_streams(tensors)):
        shown = ", ".join(sorted(tensors)[:4]) or "no tensor"
        raise ConfigError(
            f"{where}: not an EAGLE-3 draft (architectures {architectures or 'absent'}; holds {shown} ...); {EAGLE3_NEEDS}. Known "
            f"architectures: "
            f"{', '.join(KNOWN_ARCHITECTURES)}",
            code="not-eagle3",
            evidence={
                "draft config.json: architectures": architectures or "absent",
                "draft tensors: fc.weight": "stored" if fused else "absent",
            },
        )
    if fused and _reads_one_stream(tensors):
        q = tensors["layers.0.self_attn.q_proj.weight"].shape
        raise _other_method(
            where,
            f"this is EAGLE-1 or EAGLE-2: fc is stored, but its first layer reads one stream (q_proj {list(q)}), which is not supported",
            "layers.0.self_attn.q_proj.weight",
            str(list(q)),
        )


def _reads_one_stream(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether q_proj is as wide as what fc gives: EAGLE-1's layer reads the fused state alone."""
    q, fc = tensors.get("layers.0.self_attn.q_proj.weight"), tensors.get("fc.weight")
    if q is None or fc is None or q.dtype not in PLAIN or len(q.shape) != 2 or len(fc.shape) != 2:
        return False
    return q.shape[1] == fc.shape[0]


def _reads_two_streams(tensors: Mapping[str, TensorInfo]) -> bool:
    q, norm = tensors.get("layers.0.self_attn.q_proj.weight"), tensors.get("layers.0.input_layernorm.weight")
    if q is None or norm is None or not q.shape or not norm.shape:
        return False
    return q.shape[-1] == 2 * norm.shape[0]

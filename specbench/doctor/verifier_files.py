"""The verifier by itself: whether its tensors are those that its config and its quantization section speak of.

What enters: a verifier's files. What leaves: findings. It does not know drafts. Rules about names hold for decoder layers and the head of
the language model; what else a checkpoint holds (vision towers, experts) is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..checkpoint.files import TensorInfo
from ..errors import ConfigError
from ..pair import Checkpoint, text_part
from ..quant.scheme import Scheme, parse_quantization
from ..settings import QUANTIZED_LEAVES
from .findings import Finding
from .subject import PLAIN_DTYPES, finding

LAYER = re.compile(r"(?:model\.|model\.language_model\.|language_model\.model\.|language_model\.)layers\.(\d{1,6})\.(.+)")
OTHER_EXPERTS = re.compile(r"\.experts\.(?!0\.)\d+\.")  # stored as the first one, and there may be ten thousand
HEADS = ("lm_head", "language_model.lm_head")
RIDERS = ("mtp.", "model.mtp.", "midlayer.", "eagle.", "draft.", "medusa_head.")  # draft tensors in a verifier's file
# Model types whose layers hold exactly these, whose head is not tied unless the config says so.
NATIVE = ("llama", "mistral", "qwen2", "qwen3")
PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
NORMS = ("input_layernorm", "post_attention_layernorm")
UNCHECKED = ("mxfp4", "bitsandbytes")  # expert tensors, or names that transformers makes up while it loads
WEIGHTS = ("weight", "weight_packed", "qweight")
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer of the verifier as it is stored: leaf names, and the dtype of its weight where its header was read."""

    name: str
    leaves: frozenset[str]
    dtype: str | None

    @property
    def packed(self) -> bool:
        return bool(self.leaves & set(QUANTIZED_LEAVES)) or (self.dtype is not None and self.dtype not in PLAIN_DTYPES)

    def __str__(self) -> str:
        return f"{', '.join(sorted(self.leaves))}{f' ({self.dtype})' if self.dtype else ''}"


def verifier_findings(verifier: Checkpoint, whole: bool) -> Iterator[Finding]:
    """whole: all headers are at hand; else only names are looked at."""
    config = text_part(verifier.config)
    yield from _layers(verifier, config)
    yield from _head(verifier, config)
    riders = [name for name in verifier.tensors if name.startswith(RIDERS)]
    if riders:
        sentence = f"{len(riders)} tensors of a draft lie in the verifier's own files; they are judged by what is stored, not by its config"
        yield finding("foreign-tensors", sentence, {f"verifier tensors: {name}": "stored" for name in riders[:SHOWN]})
    yield from _quantization(verifier, _modules(verifier, whole))


def _layers(verifier: Checkpoint, config: Mapping[str, Any]) -> Iterator[Finding]:
    claimed = config["num_hidden_layers"]
    stored: dict[int, set[str]] = {}
    for name in verifier.tensors:
        if found := LAYER.fullmatch(name):
            stored.setdefault(int(found[1]), set()).add(found[2].rpartition(".")[0])
    said = {"verifier config.json: num_hidden_layers": claimed, "verifier tensors: layers": len(stored)}
    if stored and any(index not in stored for index in range(claimed)):
        lost = [index for index in range(claimed) if index not in stored]
        yield finding("verifier-layers", f"the verifier's config says {claimed} layers, but layers {lost[:SHOWN]} are not stored", said)
    elif len(stored) > claimed:
        sentence = f"the verifier stores {len(stored)} layers, its config says {claimed}: the rest is taken for an MTP module"
        yield finding("verifier-layers", sentence, said, severity="info")
    if config.get("model_type") in NATIVE:
        lost_modules = [
            f"layers.{index}.{module}" for index, found_here in sorted(stored.items()) if index < claimed
            for module in (*PROJECTIONS, *NORMS) if module not in found_here
        ]  # fmt: skip
        if lost_modules:
            sentence = f"{len(lost_modules)} modules of the verifier have no stored tensor: {', '.join(lost_modules[:SHOWN])}"
            yield finding("tensors-missing", sentence, {f"verifier tensors: {name}": "absent" for name in lost_modules[:SHOWN]})


def _head(verifier: Checkpoint, config: Mapping[str, Any]) -> Iterator[Finding]:
    tied = config.get("tie_word_embeddings", verifier.config.get("tie_word_embeddings"))
    heads = [name for name in verifier.tensors if name.rpartition(".")[0] in HEADS]
    said = {
        "verifier config.json: tie_word_embeddings": "absent" if tied is None else tied,
        "verifier tensors: lm_head": heads[0] if heads else "absent",
    }
    if tied and heads:
        yield finding("tied-flag", "the verifier's tie_word_embeddings is true, but a head is stored; the stored head is used", said)
    elif tied:
        yield finding("head-tied", "the verifier's head is its embedding (tied)", said)
    elif not heads and (tied is False or config.get("model_type") in NATIVE):
        yield finding(
            "verifier-head-missing", "the verifier has no lm_head, and its tie_word_embeddings does not say that the embedding is one", said
        )
    packed = [name for name in heads if name.rpartition(".")[2] in QUANTIZED_LEAVES]
    if packed:
        sentence = "the verifier's head is stored quantized; a draft that borrows it, or takes rows of it, has to expand it first"
        yield finding("verifier-head-quantized", sentence, {f"verifier tensors: {packed[0]}": "stored"})


def _modules(verifier: Checkpoint, whole: bool) -> list[Module]:
    leaves: dict[str, set[str]] = {}
    for name in verifier.tensors:
        module, _, leaf = name.rpartition(".")
        if (module.endswith("_proj") and LAYER.fullmatch(name) and not OTHER_EXPERTS.search(name)) or module in HEADS:
            leaves.setdefault(module, set()).add(leaf)
    return [Module(name, frozenset(found), _dtype(verifier, name, found) if whole else None) for name, found in leaves.items()]


def _dtype(verifier: Checkpoint, module: str, leaves: set[str]) -> str | None:
    leaf = next((leaf for leaf in WEIGHTS if leaf in leaves), None)
    info: TensorInfo | None = None if leaf is None else verifier.tensors[f"{module}.{leaf}"]
    return info.dtype if info else None


def _quantization(verifier: Checkpoint, modules: list[Module]) -> Iterator[Finding]:
    section, packed = verifier.quantization, [module for module in modules if module.packed]
    if section is None:
        if packed:
            sentence = (
                f"the verifier declares no quantization, but {len(packed)} modules hold packed or scaled tensors that nothing would read; "
                f"its quantization_config is missing"
            )
            said = {"verifier config.json: quantization_config": "absent", f"verifier tensors: {packed[0].name}": str(packed[0])}
            yield finding("quantization-undeclared", sentence, said)
        return
    where = f"verifier {verifier.quantization_source}"
    try:
        declared = parse_quantization(section, where)
    except ConfigError as error:
        method = str(section.get("quant_method"))
        yield finding("quantization-unknown", str(error), {f"{where}: quant_method": method})
        return
    if declared is None or section.get("quant_method") in UNCHECKED or section.get("dynamic"):
        return
    # Names inside a section may lack the prefix of the wrapping model, or have another.
    schemes = {module.name: declared.for_any((module.name, module.name.replace("language_model.", "", 1))) for module in modules}
    kinds = {str(scheme) for scheme in schemes.values() if scheme is not None}
    if len(kinds) > 1:
        yield finding(
            "quantization-mixed", f"the verifier mixes {len(kinds)} schemes: {', '.join(sorted(kinds))}", {where: "; ".join(sorted(kinds))}
        )
    wrong = [(module, schemes[module.name], _clash(module, schemes[module.name])) for module in modules]
    clashes = [(module, scheme, text) for module, scheme, text in wrong if text]
    if clashes:
        module, scheme, text = clashes[0]
        said = {f"{where}: {module.name}": str(scheme or "plain"), f"verifier tensors: {module.name}": str(module)}
        listed = ", ".join(m.name for m, _, _ in clashes[:SHOWN])
        yield finding("quantization-contradicted", f"{len(clashes)} modules are not stored as declared ({text}): {listed}", said)
    strays = [m.name for m in modules if "g_idx" in m.leaves and not section.get("desc_act") and section.get("quant_method") == "gptq"]
    if strays and len(strays) < len(modules):
        sentence = (
            f"{len(strays)} modules store g_idx although desc_act is false; an order that is trivial changes nothing, another is used"
        )
        yield finding("order-stored", sentence, {f"{where}: desc_act": False, f"verifier tensors: {strays[0]}.g_idx": "stored"})


def _clash(module: Module, scheme: Scheme | None) -> str:
    if scheme is None:
        return f"declared plain, stored {module}" if module.packed else ""
    slots = _slots(scheme)
    missing = [leaf for leaf in slots if leaf not in module.leaves and not leaf.startswith("input_") and not slots[leaf].optional]
    if missing:
        return f"declared {scheme}, which needs {', '.join(missing)}; stored {module}"
    leaf = next((leaf for leaf in WEIGHTS if leaf in slots), None)
    expected = _stored_as(slots[leaf].dtype) if leaf else None
    if module.dtype is not None and expected is not None and module.dtype != expected:
        return f"declared {scheme}, whose {leaf} is {expected}; stored {module}"
    return ""


@cache
def _slots(scheme: Scheme) -> dict[str, Any]:
    import torch

    from ..quant.formats import layout

    side = 1 << 7
    for factor in (scheme.group_size, *(scheme.block or ())):
        side *= factor or 1
    return layout(scheme, side, side, torch.bfloat16, "a module")


def _stored_as(dtype: Any) -> str | None:
    from ..checkpoint.files import DTYPES

    return next((name for name, value in DTYPES.items() if value == dtype and name != "F8_E8M0"), None)

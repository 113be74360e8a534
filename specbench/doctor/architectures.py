"""What engines make of a draft's `architectures`: the name that they look up, and the class behind it.

What enters: a subject and a policy. What leaves: what that engine does with the name, where it is established. It does not know tensors
beyond q/k norms, which decide whether a class fits.

Sources: vLLM transformers_utils/configs/eagle.py (for method eagle3, a name that neither begins nor ends with "Eagle3" gets that prefix),
transformers_utils/configs/speculators/algos.py (drafts in the speculators format are renamed), model_executor/models/registry.py as read in
the wheels of 0.11.0, 0.11.1, 0.12.0, 0.28.0 and in the sources of 0.32.0; SGLang models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..policies import POLICIES, Policy
from .findings import Affected
from .subject import Subject, engine_name

LLAMA, QWEN3 = "llama_eagle3.py", "qwen3_eagle3.py"
EARLY = {"Eagle3LlamaForCausalLM": LLAMA, "LlamaForCausalLMEagle3": LLAMA}
LATE = EARLY | {
    "Eagle3MiniMaxM2ForCausalLM": LLAMA, "Eagle3Qwen2_5vlForCausalLM": LLAMA, "Eagle3Qwen3vlForCausalLM": LLAMA, "PEagleDraftModel": LLAMA,
    "PeagleLlamaForCausalLM": LLAMA, "Eagle3Qwen3ForCausalLM": QWEN3, "PeagleQwen3ForCausalLM": QWEN3,
    "Eagle3DeepseekV2ForCausalLM": "deepseek_eagle3.py", "Eagle3DeepseekV3ForCausalLM": "deepseek_eagle3.py",
}  # fmt: skip
# Releases whose registry was read; others are not judged by names.
REGISTRIES = {"vllm-0.11.0": EARLY, "vllm-0.11.1": EARLY | {"Eagle3Qwen2_5vlForCausalLM": LLAMA}} | dict.fromkeys(
    ("vllm-0.28.0", "vllm-0.30.0", "vllm-0.30.0-mrv2", "vllm-0.31.0", "vllm-0.32.0", "vllm-0.32.0-mrv2"), LATE
)
# Releases that size the draft's rotary table by its own max_position_embeddings (issue 48894; raised to the verifier's from 0.28.0 on).
TABLE_ENDS = ("vllm-0.10.2", "vllm-0.11.0", "vllm-0.11.1", "vllm-0.17.0")
SGLANG = ("LlamaForCausalLMEagle3",)


@dataclass(frozen=True, slots=True)
class Lookup:
    """What becomes of a draft's architecture in one engine. asked: the name it looks up. problem: what goes wrong, "" if nothing does."""

    asked: str
    problem: str = ""
    outcome: str = ""
    code: str = ""


def look_up(subject: Subject, policy: Policy) -> Lookup | None:
    """The lookup under `policy`; None where it is not established."""
    names = subject.pair.draft.config.get("architectures") or []
    nested = subject.dialect.family.name == "speculators"
    if policy.name == "sglang":
        if nested:
            return Lookup(
                names[0] if names else "",
                "sizes lie in transformer_layer_config, where this engine does not look",
                "refused",
                "nested-config",
            )
        return _sglang(names)
    if policy.name not in REGISTRIES:
        return None
    registry = REGISTRIES[policy.name]
    asked = _speculators(subject, registry) if nested else _prefixed(names[0]) if names else ""
    if asked not in registry:
        problem = f"ValueError: model architectures [{asked!r}] are not supported" if asked else "no architecture to look up"
        return Lookup(asked, problem, "refused", "architecture-unregistered")
    norms = any(name.endswith((".self_attn.q_norm.weight", ".self_attn.k_norm.weight")) for name in subject.dialect.tensors)
    if norms and registry[asked] == LLAMA:
        return Lookup(asked, f"built by {LLAMA}, which has no place for q_norm and k_norm: KeyError", "KeyError", "qk-norms-unread")
    if not norms and registry[asked] == QWEN3:
        return Lookup(asked, f"built by {QWEN3}, whose q_norm and k_norm no tensor fills: no error", "silent", "architecture-rewritten")
    return Lookup(asked)


def _prefixed(name: str) -> str:
    return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


def _speculators(subject: Subject, registry: dict[str, str]) -> str:
    kind = subject.dialect.size("model_type").value
    return "Eagle3Qwen3ForCausalLM" if kind == "qwen3" and "Eagle3Qwen3ForCausalLM" in registry else "Eagle3LlamaForCausalLM"


def _sglang(names: list[str]) -> Lookup:
    if names and names[0] in SGLANG:
        return Lookup(names[0])
    asked = names[0] if names else ""
    problem = (
        f"{asked or 'an absent architecture'} is not {SGLANG[0]}: an ordinary decoder is built, or none, and its parameters do not match"
    )
    return Lookup(asked, problem, "refused", "architecture-unregistered")


def table_ends() -> Iterator[Affected]:
    """Who reads past the end of the draft's rotary table."""
    sees = "past the draft's max_position_embeddings a crash, or reads out of bounds"
    why = "issue 48894: the wheels up to 0.17.0 do not raise the draft's max_position_embeddings, 0.28.0 does"
    for name in TABLE_ENDS:
        yield Affected(engine_name(POLICIES[name]), name, "ignored", sees, why)

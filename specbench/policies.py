"""Policies: where each draft setting is taken from, as data.

What enters: a policy name. What leaves: a `Policy`, whose fields the plan's rules read. It does not know any pair, and holds no code: an
engine's behaviour is a row here, each field with the evidence for it. A field that nobody has established for a release is None: the plan
then shows what `draft` would do, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Policy:
    """Where a reader takes each draft setting from, and what it checks.

    layer_quantization: whose quantization section the draft's decoder layers are built from ("none": always plain).
    edge_quantization: the same for `fc` and `lm_head`.
    layer_count: "tensors" counts stored layers, "one" builds one, "config" believes num_hidden_layers.
    aux_layers: how `eagle_aux_hidden_state_layer_ids` is read: "draft" in its family's convention; "config-unshifted" as layer inputs
    whoever wrote it; "top-level-unshifted" the same but not where it is nested; "first-is-1" only where it is nested, as layer outputs
    exactly if the first id is 1;
    "default" not at all. Without ids: (2, n // 2, n - 3).
    embed_tokens: "draft" prefers the draft's own embedding and borrows the verifier's only where it has none; "verifier-if-same-shape"
    takes the verifier's whenever the shapes agree, even over a trained one; "verifier-unless-target-hidden-size" looks at that config key
    alone.
    norm_before_residual: "draft" reads the flag, "false" never does.
    load_config: whose load config the draft's weights are read with: "draft-else-verifier" is the draft's own, and the verifier's where
    that is unset; "verifier" is the verifier's even where the draft has one.
    checks: "strict" compares missing, unexpected, shape and dtype kind before a weight is read; "unexpected" only looks parameters up by
    name, in file order, and copies with conversion; "none" also skips tensors that find no parameter.
    evidence: field name -> where the behaviour was read or observed.
    """

    name: str
    summary: str
    layer_quantization: Literal["draft", "verifier", "none"] | None
    edge_quantization: Literal["draft", "none"] | None
    layer_count: Literal["tensors", "one", "config"] | None
    aux_layers: Literal["draft", "config-unshifted", "top-level-unshifted", "first-is-1", "default"] | None
    embed_tokens: Literal["draft", "verifier-if-same-shape", "verifier-unless-target-hidden-size"] | None
    norm_before_residual: Literal["draft", "false"] | None
    load_config: Literal["draft-else-verifier", "verifier"] | None
    checks: Literal["strict", "unexpected", "none"] | None
    evidence: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Fields that are not established for this release."""
        return tuple(name for name in RULES if getattr(self, name) is None)

    def rule(self, name: str) -> Any:
        """The value of field `name`; `draft`'s own where it is not established."""
        value = getattr(self, name)
        return getattr(DRAFT, name) if value is None else value


RULES = (
    "layer_quantization", "edge_quantization", "layer_count", "aux_layers", "embed_tokens", "norm_before_residual", "load_config", "checks",
)  # fmt: skip

DRAFT = Policy(
    name="draft",
    summary="the draft's own files decide; what they lack is borrowed by name and reported",
    layer_quantization="draft",
    edge_quantization="draft",
    layer_count="tensors",
    aux_layers="draft",
    embed_tokens="draft",
    norm_before_residual="draft",
    load_config="draft-else-verifier",
    checks="strict",
)

VLLM_0_11_0 = Policy(
    name="vllm-0.11.0",
    summary="decoder layers are built from the verifier's quantization; nothing checks for missing tensors",
    layer_quantization="verifier",
    edge_quantization="none",
    layer_count="one",
    aux_layers="default",
    embed_tokens="verifier-if-same-shape",
    norm_before_residual="draft",
    load_config="verifier",
    checks="unexpected",
    evidence={
        "layer_quantization": "model_executor/models/llama_eagle3.py takes vllm_config.quant_config; fixed by PR 25883 in 0.11.1",
        "edge_quantization": "llama_eagle3.py: fc is torch.nn.Linear, lm_head gets no quant_config",
        "layer_count": "llama_eagle3.py builds one decoder layer; more came with PR 26164 in 0.11.1",
        "aux_layers": "v1/worker/gpu_model_runner.py uses the model's default layers; ids of the config are read from 0.11.1 (PR 25961)",
        "embed_tokens": "v1/spec_decode/eagle.py shares embed_tokens whenever the shapes match",
        "norm_before_residual": "llama_eagle3.py reads the flag; transformers_utils/configs/speculators/algos.py defaults it to True",
        "load_config": "config/speculative.py has no draft_load_config; the field came with 0.17.0 (PR 34022)",
        "checks": "llama_eagle3.py load_weights: params_dict[name] on every tensor, in file order; no check for missing ones",
    },
)

VLLM_0_10_2 = replace(
    VLLM_0_11_0,
    name="vllm-0.10.2",
    summary="decoder layers are always plain: a quantized draft cannot load",
    layer_quantization="none",
    embed_tokens=None,
    norm_before_residual=None,
    checks="unexpected",
    evidence={
        "layer_quantization": "wheel of 0.10.2: layers have quant_config None; the verifier's came on 27 Sep 2025 (a5354b3ed)",
        "edge_quantization": "as 0.11.0: fc became quantizable with PR 28435 in 0.11.1",
        "layer_count": "one layer; more came with PR 26164 in 0.11.1",
        "aux_layers": "ids of the config are read from 0.11.1 (PR 25961)",
        "load_config": "the field came with 0.17.0 (PR 34022)",
        "checks": "a quantized draft's weight_packed is unexpected: KeyError",
    },
)

VLLM_0_11_1 = replace(
    VLLM_0_11_0,
    name="vllm-0.11.1",
    summary="the draft's own quantization section is asked; auxiliary layer ids are read at the top level",
    layer_quantization="draft",
    edge_quantization="draft",
    layer_count="config",
    aux_layers="top-level-unshifted",
    embed_tokens=None,
    norm_before_residual=None,
    checks=None,
    evidence={
        "layer_quantization": "llama_eagle3.py get_quant_config answers from the draft's config (PR 25883)",
        "edge_quantization": "fc is a ReplicatedLinear with the draft's quant_config (PR 28435)",
        "layer_count": "multi-layer drafts (PR 26164)",
        "aux_layers": "PR 25961 reads the top-level key only, also in 0.12.0",
        "load_config": "the field came with 0.17.0 (PR 34022)",
    },
)

VLLM_0_17_0 = replace(
    VLLM_0_11_1,
    name="vllm-0.17.0",
    summary="draft_load_config exists, and the V1 proposer uses it",
    aux_layers=None,
    load_config="draft-else-verifier",
    evidence={
        **{
            k: f"{v}; since 0.11.1"
            for k, v in VLLM_0_11_1.evidence.items()
            if k in ("layer_quantization", "edge_quantization", "layer_count")
        },
        "load_config": "the field came with this release (PR 34022), the V1 proposer passes it to the loader at once",
    },
)

# What was read in the sources of 0.32.0, and which fields hold for a runner from when on.
V32_EVIDENCE = {
    "layer_quantization": "get_draft_quant_config: the draft's own section (since 0.11.1)",
    "edge_quantization": "get_draft_quant_config for fc, lm_head and KV scales (since 0.11.1)",
    "layer_count": "num_hidden_layers of the draft's config; no count of tensors",
    "embed_tokens": "v1/spec_decode/llm_base_proposer.py: shared if absent, or stored and equal to the verifier's",
    "norm_before_residual": "flat configs default to False, the speculators format to True (configs/speculators/algos.py)",
    "checks": "a tensor without a parameter is refused (ValueError there), missing ones are silent",
}
_V1_LOAD = "v1/spec_decode: the proposer passes draft_load_config to the loader; unset, the target's object"
_MRV2_AUX = "Model Runner V2 reads top-level ids, never eagle_config, and never shifts (wheels 0.28.0 to 0.32.0)"

VLLM_0_32_0 = Policy(
    name="vllm-0.32.0",
    summary="Model Runner V1 (CPU wheels): the draft's settings are its own; nested auxiliary ids are read, and never shifted",
    layer_quantization="draft",
    edge_quantization="draft",
    layer_count="config",
    aux_layers="config-unshifted",
    embed_tokens="draft",
    norm_before_residual="draft",
    load_config="draft-else-verifier",
    checks="unexpected",
    evidence={
        **V32_EVIDENCE,
        "aux_layers": "the V1 runner reads top-level ids, else eagle_config's; ids are never shifted (PR 43671 open)",
        "load_config": _V1_LOAD,
    },
)

VLLM_0_32_0_MRV2 = replace(
    VLLM_0_32_0,
    name="vllm-0.32.0-mrv2",
    summary="Model Runner V2 (the default runner with Triton): as V1, but nested auxiliary ids are not read",
    aux_layers="top-level-unshifted",
    evidence={
        **V32_EVIDENCE,
        "embed_tokens": "v1/worker/gpu/spec_decode/eagle/utils.py: shared if absent, or equal; no check of widths",
        "aux_layers": _MRV2_AUX,
        "load_config": "get_draft_load_config replaces vllm_config.load_config before the draft is built (PR 55337, since 0.31.0)",
    },
)


def _between(base: Policy, name: str, summary: str, **changes: Any) -> Policy:
    """A release whose quantization and load config were read in its wheel; what only 0.32.0's sources show is not established for it."""
    evidence = {k: f"{base.evidence[k]} (as 0.32.0)" for k in ("layer_quantization", "edge_quantization")}
    evidence |= changes.pop("evidence")
    unset: dict[str, Any] = dict.fromkeys(("layer_count", "aux_layers", "embed_tokens", "norm_before_residual", "checks"))
    return replace(base, name=name, summary=summary, evidence=evidence, **{**unset, **changes})


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        DRAFT,
        VLLM_0_10_2,
        VLLM_0_11_0,
        VLLM_0_11_1,
        VLLM_0_17_0,
        _between(
            VLLM_0_32_0, "vllm-0.28.0", "Model Runner V1, the default for most architectures: draft_load_config is honoured",
            evidence={"load_config": _V1_LOAD},
        ),
        _between(
            VLLM_0_32_0, "vllm-0.30.0", "Model Runner V1: draft_load_config is honoured", evidence={"load_config": _V1_LOAD},
        ),
        _between(
            VLLM_0_32_0_MRV2, "vllm-0.30.0-mrv2",
            "Model Runner V2: the draft is loaded with the verifier's load config, whatever draft_load_config says",
            load_config="verifier", aux_layers="top-level-unshifted", checks="unexpected",
            evidence={
                "load_config": "v1/worker/gpu/spec_decode/eagle/utils.py calls get_model without draft_load_config (PR 55337)",
                "aux_layers": _MRV2_AUX,
                "checks": "as the loader of 0.32.0, whose code it shares: unexpected tensors are refused, missing ones silent",
            },
        ),
        _between(
            VLLM_0_32_0_MRV2, "vllm-0.31.0", "Model Runner V2, the default runner: draft_load_config is honoured",
            aux_layers="top-level-unshifted", checks="unexpected",
            evidence={
                "load_config": "get_draft_load_config replaces vllm_config.load_config before the draft is built (PR 55337)",
                "aux_layers": _MRV2_AUX,
                "checks": "as the loader of 0.32.0, whose code it shares: unexpected tensors are refused, missing ones silent",
            },
        ),
        VLLM_0_32_0,
        VLLM_0_32_0_MRV2,
        Policy(
            name="sglang",
            summary="SGLang of mid-2026: layer ids shift exactly if the first is 1; tensors without a parameter are skipped",
            layer_quantization="draft",
            edge_quantization=None,
            layer_count=None,
            aux_layers="first-is-1",
            embed_tokens=None,
            norm_before_residual="false",
            load_config=None,
            checks="none",
            evidence={
                "layer_quantization": "server_args: the draft's section wins over a copied --quantization; detected ones are not copied",
                "aux_layers": "llama_eagle3.py reads eagle_config's ids alone; PR 25454 (May 2026): +1 only if the first is 1",
                "norm_before_residual": "llama_eagle3.py of the versions read ignores the key",
                "checks": "llama_eagle3.py load_weights skips names without a parameter, and misses missing ones",
            },
        ),
        Policy(
            name="eagle",
            summary="the original EAGLE code: one plain layer, default layers, strict=False",
            layer_quantization="none",
            edge_quantization="none",
            layer_count="one",
            aux_layers="default",
            embed_tokens="verifier-unless-target-hidden-size",
            norm_before_residual="false",
            load_config=None,
            checks="none",
            evidence={
                "layer_quantization": "eagle/model/cnets.py builds torch.nn.Linear throughout",
                "edge_quantization": "eagle/model/cnets.py builds torch.nn.Linear throughout",
                "layer_count": "cnets.py has one midlayer whatever num_hidden_layers says",
                "aux_layers": "modeling_llama_kv.py appends before layers 2, n // 2 and n - 3",
                "embed_tokens": "cnets.py Model.__init__ takes the target's file unless the config has target_hidden_size",
                "norm_before_residual": "cnets.py adds the raw state",
                "checks": "ea_model.py load_state_dict(strict=False)",
            },
        ),
    )
}  # fmt: skip


def get_policy(policy: str | Policy) -> Policy:
    """A policy by name (or itself).

    Raises:
        ConfigError: unknown name; the message lists the known ones.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    return POLICIES[policy]

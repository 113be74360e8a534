"""Policies: where each draft setting is taken from, as data.

What enters: a policy name. What leaves: a `Policy`, whose fields `resolve` reads. It does not know any pair, and holds no code: an engine's
behaviour is a row here, each field with the evidence for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Policy:
    """Where a reader takes each draft setting from, and what it checks.

    layer_quantization: whose quantization section the draft's decoder layers are built from.
    edge_quantization: the same for `fc` and `lm_head` ("none": always plain).
    aux_layers: "draft" reads `eagle_aux_hidden_state_layer_ids` in its family's convention, "config-unshifted" reads it as layer inputs
    whoever wrote
        it, "top-level-unshifted" the same but not where it is nested; "default" never reads it. Without ids: (2, n // 2, n - 3).
    embed_tokens: "draft" prefers the draft's own embedding and borrows the verifier's only where it has none; "verifier-if-same-shape"
    takes
        the verifier's whenever the shapes agree, even over a trained one.
    load_config: whose load config the draft's weights are read with: "draft-else-verifier" is the draft's own, and the verifier's where
        that is unset; "verifier" is the verifier's even where the draft has one.
    checks: "strict" compares missing, unexpected, shape and dtype kind before a weight is read; "unexpected" only looks parameters up by
    name,
        in file order, and copies with conversion.
    evidence: field name -> where the behaviour was read or observed.
    """

    name: str
    summary: str
    layer_quantization: Literal["draft", "verifier"]
    edge_quantization: Literal["draft", "none"]
    aux_layers: Literal["draft", "config-unshifted", "top-level-unshifted", "default"]
    embed_tokens: Literal["draft", "verifier-if-same-shape"]
    load_config: Literal["draft-else-verifier", "verifier"]
    checks: Literal["strict", "unexpected"]
    evidence: dict[str, str] = field(default_factory=dict, repr=False)


# Shared by the releases of Model Runner V2 below.
MRV2_EVIDENCE = {
    "layer_quantization": "vLLM 0.11.1 and later: llama_eagle3.py get_quant_config, the draft's own section (PR 25883)",
    "edge_quantization": "vLLM 0.11.1 and later: get_draft_quant_config for fc, lm_head and KV scales (PR 28435)",
    "aux_layers": "vLLM 0.28.0 to 0.32.0 Model Runner V2 reads top-level ids, never eagle_config, and never shifts",
    "embed_tokens": "vLLM 0.32.0 v1/worker/gpu/spec_decode/eagle/utils.py shares if absent or equal; unknown for this very release",
    "checks": "vLLM 0.32.0 refuses a tensor without a parameter (a ValueError there) and misses missing ones; unknown for this very release",
}

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            name="draft",
            summary="the draft's own files decide; what they lack is borrowed by name and reported",
            layer_quantization="draft",
            edge_quantization="draft",
            aux_layers="draft",
            embed_tokens="draft",
            load_config="draft-else-verifier",
            checks="strict",
        ),
        Policy(
            name="vllm-0.11.0",
            summary="decoder layers are built from the verifier's quantization; nothing checks for missing tensors",
            layer_quantization="verifier",
            edge_quantization="none",
            aux_layers="default",
            embed_tokens="verifier-if-same-shape",
            load_config="verifier",
            checks="unexpected",
            evidence={
                "layer_quantization": "vLLM 0.11.0 model_executor/models/llama_eagle3.py takes vllm_config.quant_config; fixed by PR 25883 in 0.11.1",
                "edge_quantization": "vLLM 0.11.0 llama_eagle3.py: fc is torch.nn.Linear, lm_head gets no quant_config",
                "aux_layers": "vLLM 0.11.0 v1/worker/gpu_model_runner.py uses the model's default layers; config ids read from 0.11.1 (PR 25961)",
                "embed_tokens": "vLLM 0.11.0 v1/spec_decode/eagle.py shares embed_tokens whenever the shapes match",
                "load_config": "vLLM 0.11.0 config/speculative.py has no draft_load_config; the field came with 0.17.0 (PR 34022)",
                "checks": "vLLM 0.11.0 llama_eagle3.py load_weights: params_dict[name] on every tensor, in file order; no check for missing ones",
            },
        ),
        Policy(
            name="vllm-0.30.0-mrv2",
            summary="Model Runner V2: the draft is loaded with the verifier's load config, whatever draft_load_config says",
            layer_quantization="draft",
            edge_quantization="draft",
            aux_layers="top-level-unshifted",
            embed_tokens="draft",
            load_config="verifier",
            checks="unexpected",
            evidence={
                "load_config": "vLLM 0.30.0 v1/worker/gpu/spec_decode/eagle/utils.py calls get_model without draft_load_config (PR 55337)",
                **MRV2_EVIDENCE,
            },
        ),
        Policy(
            name="vllm-0.31.0",
            summary="Model Runner V2, the default runner: draft_load_config is honoured",
            layer_quantization="draft",
            edge_quantization="draft",
            aux_layers="top-level-unshifted",
            embed_tokens="draft",
            load_config="draft-else-verifier",
            checks="unexpected",
            evidence={
                "load_config": "vLLM 0.31.0: get_draft_load_config replaces vllm_config.load_config before the draft is built (PR 55337)",
                **MRV2_EVIDENCE,
            },
        ),
    )
}


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

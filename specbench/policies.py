"""Policies: where each draft setting is taken from, as data.

What enters: a policy name. What leaves: a `Policy`, whose fields `resolve` reads. It does not know any pair, and holds no code: an engine's behaviour
is a row here, each field with the evidence for it.
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
    aux_layers: "draft" reads `eagle_aux_hidden_state_layer_ids` in its family's convention, "config-unshifted" reads it as layer inputs whoever wrote
        it, "top-level-unshifted" the same but not where it is nested; "default" never reads it. Without ids: (2, n // 2, n - 3).
    embed_tokens: "draft" prefers the draft's own embedding and borrows the verifier's only where it has none; "verifier-if-same-shape" takes
        the verifier's whenever the shapes agree, even over a trained one.
    checks: "strict" compares missing, unexpected, shape and dtype kind before a weight is read; "unexpected" only looks parameters up by name,
        in file order, and copies with conversion.
    evidence: field name -> where the behaviour was read or observed.
    """

    name: str
    summary: str
    layer_quantization: Literal["draft", "verifier"]
    edge_quantization: Literal["draft", "none"]
    aux_layers: Literal["draft", "config-unshifted", "top-level-unshifted", "default"]
    embed_tokens: Literal["draft", "verifier-if-same-shape"]
    checks: Literal["strict", "unexpected"]
    evidence: dict[str, str] = field(default_factory=dict, repr=False)


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
            checks="strict",
        ),
        Policy(
            name="vllm-0.11.0",
            summary="decoder layers are built from the verifier's quantization; nothing checks for missing tensors",
            layer_quantization="verifier",
            edge_quantization="none",
            aux_layers="default",
            embed_tokens="verifier-if-same-shape",
            checks="unexpected",
            evidence={
                "layer_quantization": "vLLM 0.11.0 model_executor/models/llama_eagle3.py takes vllm_config.quant_config; fixed by PR 25883 in 0.11.1",
                "edge_quantization": "vLLM 0.11.0 llama_eagle3.py: fc is torch.nn.Linear, lm_head gets no quant_config",
                "aux_layers": "vLLM 0.11.0 v1/worker/gpu_model_runner.py uses the model's default layers; config ids read from 0.11.1 (PR 25961)",
                "embed_tokens": "vLLM 0.11.0 v1/spec_decode/eagle.py shares embed_tokens whenever the shapes match",
                "checks": "vLLM 0.11.0 llama_eagle3.py load_weights: params_dict[name] on every tensor, in file order; no check for missing ones",
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

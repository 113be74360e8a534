"""The failure atlas: what loading a draft does beside every verifier format, under every engine's policy.

What enters: a pair whose verifier is plain, formats, policies. What leaves: one row per (verifier format, draft format, policy), with the
acceptance that is left where nothing complained. It does not know any outcome beforehand: every row is a real load under that policy, and a
real decode.

A format is a quantization section put in place of the verifier's own: draft settings depend on what the verifier declares, not on its
weights, so the plain verifier decodes beside the draft that each load left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .pair import Pair
from .policies import Policy, get_policy

if TYPE_CHECKING:
    import pandas as pd

    from .models.decoder import Decoder
    from .models.eagle3 import Eagle3

OUTCOMES = ("loads right", "silent corruption", "KeyError", "shape error", "refused")


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _ints(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


def _floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


# The formats of facts that were observed on vLLM 0.11.0 itself (November 2026), in the order of that table.
VERIFIER_FORMATS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True},
    "W4A16": _compressed("pack-quantized", _ints(4, "group", group_size=64)),
    "W4A16 asym": _compressed("pack-quantized", _ints(4, "group", group_size=64) | {"symmetric": False}),
    "W8A16": _compressed("pack-quantized", _ints(8, "channel")),
    "NVFP4": _compressed(
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    ),
    "W8A8 dynamic": _compressed("int-quantized", _ints(8, "channel"), _ints(8, "token", dynamic=True)),
    "W8A8 static": _compressed("int-quantized", _ints(8, "channel"), _ints(8, "tensor", dynamic=False)),
    "FP8 channel": _compressed("float-quantized", _floats("channel"), _floats("token", dynamic=True)),
    "FP8 tensor": _compressed("float-quantized", _floats("tensor"), _floats("tensor", dynamic=False)),
    "fp8 dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "ModelOpt FP8": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "bnb int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bnb nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "mxfp4": {"quant_method": "mxfp4"},
}


def atlas(
    pair: Pair,
    *,
    drafts: Mapping[str, Pair] | None = None,
    formats: Sequence[str] | None = None,
    policies: Sequence[str | Policy] = ("draft", "vllm-0.11.0"),
    prompts: Sequence[Any] | None = None,
    num_speculative_tokens: int = 3,
    max_new_tokens: int = 48,
    device: str = "auto",
    progress: bool = False,
) -> pd.DataFrame:
    """Load the draft beside every verifier format under every policy.

    Args:
        pair: a plain verifier and its draft.
        drafts: more drafts by name (a quantized copy), each as a pair with the same verifier; `pair`'s own is "plain".
        formats: names of `VERIFIER_FORMATS`; None takes all.
        prompts: texts or token ids on which acceptance is measured; None measures none.

    Returns:
        columns verifier_format | draft_format | policy | outcome (one of `OUTCOMES`) | key | detail | mean_acceptance_length (where a draft
        was loaded and prompts were given; over rounds, the bonus token counted) | mean_acceptance_length_draft (under policy "draft").

    Raises:
        ConfigError: an unknown format or policy, or a draft that does not load under "draft" beside the plain verifier.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    from .errors import ConfigError
    from .load import load_draft
    from .verifier import load_verifier

    names = list(formats) if formats is not None else list(VERIFIER_FORMATS)
    unknown = [name for name in names if name not in VERIFIER_FORMATS]
    if unknown:
        raise ConfigError(f"unknown verifier format {unknown[0]!r}; known: {', '.join(VERIFIER_FORMATS)}")
    chosen = [get_policy(policy) for policy in policies]
    verifier = load_verifier(pair, device=device)
    rows = []
    pairs = {"plain": pair, **(drafts or {})}
    bar = tqdm(total=len(names) * len(pairs) * len(chosen), desc="loads", disable=not progress)
    for draft_format, drafted in pairs.items():
        right = load_draft(drafted, "draft", device=device, verifier=verifier)
        reference, measured = fingerprint(right), acceptance(verifier, right, prompts, num_speculative_tokens, max_new_tokens)
        for name in names:
            section = VERIFIER_FORMATS[name]
            declared = replace(drafted, verifier=replace(drafted.verifier, quantization=section, quantization_source=f"format {name}"))
            for policy in chosen:
                outcome, key, detail, left = _attempt(declared, policy, verifier, device, reference)
                if outcome == "loads right":
                    tau = measured  # it computes what the reference computes
                else:
                    tau = None if left is None else acceptance(verifier, left, prompts, num_speculative_tokens, max_new_tokens)
                rows.append((name, draft_format, policy.name, outcome, key, detail, tau, measured))
                bar.update()
    columns = [
        "verifier_format",
        "draft_format",
        "policy",
        "outcome",
        "key",
        "detail",
        "mean_acceptance_length",
        "mean_acceptance_length_draft",
    ]
    return pd.DataFrame(rows, columns=columns)


def _attempt(pair: Pair, policy: Policy, verifier: Decoder, device: str, reference: Any) -> tuple[str, str, str, Eagle3 | None]:
    from .errors import SpecbenchError
    from .load import load_draft

    try:
        draft = load_draft(pair, policy, device=device, verifier=verifier)
    except SpecbenchError as error:
        kind = "KeyError" if isinstance(error, KeyError) else "shape error" if isinstance(error, AssertionError) else "refused"
        return kind, str(error) if kind == "KeyError" else "", str(error).splitlines()[0], None
    same = agree(reference, fingerprint(draft))
    detail = "" if same else "nothing complained; the draft computes something else"
    return ("loads right" if same else "silent corruption"), "", detail, draft


def fingerprint(draft: Eagle3) -> Any:
    """Logits of eight seeded pairs: what the loaded weights compute."""
    import torch

    c = draft.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, c.vocab_size, (1, 8), generator=generator).to(draft.device)
    aux = torch.randn(1, 8, c.num_aux_layers * c.target_hidden_size, generator=generator).to(draft.device, draft.dtype)
    with torch.inference_mode():
        positions = torch.arange(8, device=draft.device)[None]
        return draft.logits(draft(tokens, draft.fuse(aux), draft.step(positions, 8), draft.new_cache(8))).float()


def agree(a: Any, b: Any) -> bool:
    """Equal up to the rounding of one kernel against another (1 % of the range in bf16)."""
    return bool((a - b).abs().max() <= 0.01 * a.abs().max())  # False where b holds NaN


def acceptance(verifier: Decoder, draft: Eagle3, prompts: Sequence[Any] | None, k: int, max_new_tokens: int) -> float | None:
    from .text import generate

    if prompts is None:
        return None
    return generate(verifier, draft, prompts, num_speculative_tokens=k, max_new_tokens=max_new_tokens).mean_acceptance_length

"""Execute a plan: build a draft or a verifier for its settings and fill it from its files.

What enters: a pair and a policy. What leaves: loaded models. It decides nothing; every choice is in the plan. Parameters are created on the meta
device, then filled straight from the files, shard by shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .checkpoint.families import VERIFIER_MODEL_TYPES, look, rope_theta
from .checkpoint.files import TensorInfo, read_into, read_tensor
from .checkpoint.fill import check, fill, first_part
from .errors import CheckpointError, ConfigError
from .models.decoder import Decoder, DecoderConfig
from .models.eagle3 import Eagle3, Eagle3Config
from .pair import Pair
from .plan import Plan, resolve
from .policies import Policy
from .quant.linear import Linear
from .quant.scheme import Scheme, parse_quantization

def load_draft(
    pair: Pair,
    policy: str | Policy = "draft",
    *,
    device: str = "auto",
    dtype: str = "auto",
    verifier: Decoder | None = None,
    packed: bool = True,
) -> Eagle3:
    """Load the draft of `pair` under `policy`.

    Args:
        device: "auto" is CUDA where there is one, else the CPU.
        dtype: "auto" is the plan's (the verifier's own), else a torch dtype name.
        verifier: a loaded verifier whose embedding the draft may share; without it the verifier's embedding is read again.
        packed: keep 4-bit weights packed where a kernel exists; False multiplies dequantized weights.

    Raises:
        ConfigError: the plan cannot be resolved.
        CheckpointError: under a strict policy, tensors that are missing, unexpected, or of another shape or kind of dtype.
        CheckpointKeyError: under an engine's policy, a tensor that finds no parameter (a KeyError, as there).
    """
    plan = resolve(pair, policy)
    model = build_draft(plan, _dtype(dtype, plan["dtype"]))
    tensors = {name: info for name, info in pair.draft.tensors.items() if name != "t2d"}
    borrowed = plan["embed_tokens"] == "verifier"
    optional = {"embed_tokens.weight"} if borrowed else set()
    if "d2t" not in tensors and model.config.draft_vocab_size == model.config.vocab_size:
        optional.add("d2t")
    where = f"draft {pair.draft.name}"
    strict = plan["checks"] == "strict"
    if strict:
        check(model, tensors, where, optional)
    if borrowed:
        tensors.pop("embed_tokens.weight", None)
    target = _device(device)
    _materialize(model, target, skip="embed_tokens." if borrowed and verifier is not None else None)
    if "d2t" in optional:
        model.d2t.data.zero_()
    fill(model, tensors.items(), where, strict)
    if borrowed:
        if verifier is not None:
            model.embed_tokens = verifier.embed_tokens
        else:
            read_into(pair.verifier.tensors["model.embed_tokens.weight"], model.embed_tokens.weight.data)
    if strict:
        _check_map(model, pair.draft.tensors.get("t2d"), where)
    _finish(model, packed)
    return model.eval()


def build_draft(plan: Plan, dtype: torch.dtype) -> Eagle3:
    """The empty draft (meta device) that a plan describes: which parameters exist depends on the plan's quantization."""
    config = Eagle3Config(
        num_aux_layers=len(plan["aux_layers"]),
        **{name: plan[name] for name in Eagle3Config.__dataclass_fields__ if name != "num_aux_layers"},
    )
    own = plan.policy.layer_quantization == "draft"
    layers = parse_quantization(plan["quantization"], plan.settings["quantization"].source)
    edges = parse_quantization(plan["edge_quantization"], plan.settings["edge_quantization"].source)
    # An engine that applies the verifier's section asks it about a layer after the verifier's last one.
    first = 0 if own else int(plan.pair.verifier.config["num_hidden_layers"])
    prefix = "layers" if own else "model.layers"

    def layer_scheme(index: int, module: str) -> Scheme | None:
        return None if layers is None else layers.for_module(f"{prefix}.{first + index}.{first_part(module)}")

    model = Eagle3(config, layer_scheme, lambda name: None if edges is None else edges.for_module(name), dtype)
    model.aux_layers = plan["aux_layers"]
    return model


def load_verifier(pair: Pair, *, device: str = "auto", dtype: str = "auto", packed: bool = True) -> Decoder:
    """Load the verifier of `pair` (Llama, Mistral, Qwen2 or Qwen3 dense), strictly.

    Args: see `load_draft`. `packed=False` multiplies dequantized weights, the reference.

    Raises:
        ConfigError: another architecture, or a config that contradicts itself.
        CheckpointError: tensors missing, unexpected, or of another shape or kind of dtype.
    """
    checkpoint = pair.verifier
    where = f"verifier {checkpoint.name}"
    config = decoder_config(checkpoint.config, f"{where}/config.json")
    quantization = parse_quantization(checkpoint.quantization, f"{where}/config.json: quantization_config")
    named = look(checkpoint.config, "dtype", "torch_dtype").value
    model = Decoder(config, quantization.for_module if quantization else lambda _: None, _dtype(dtype, named))
    tensors = {name.removeprefix("model."): info for name, info in checkpoint.tensors.items()}
    tied = config.tie_word_embeddings and "lm_head.weight" not in tensors
    check(model, tensors, where, {"lm_head.weight"} if tied else set())
    _materialize(model, _device(device), skip="lm_head." if tied else None)
    fill(model, tensors.items(), where, strict=True)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    _finish(model, packed)
    eos = look(checkpoint.config, "eos_token_id").value
    model.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
    model.folder = checkpoint.path
    return model.eval()


def decoder_config(config: dict[str, Any], where: str) -> DecoderConfig:
    """A `DecoderConfig` from a transformers config.json.

    Raises:
        ConfigError: an architecture, activation or attention that the native decoder does not compute.
    """
    kind = config.get("model_type")
    if kind not in VERIFIER_MODEL_TYPES:
        raise ConfigError(f"{where}: model_type is {kind!r}; the native decoder computes {', '.join(VERIFIER_MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {config['hidden_act']!r}; the native decoder computes 'silu'")
    window = config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None
    if window is not None:
        raise ConfigError(f"{where}: sliding_window is {window}; the native decoder attends to everything")
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope_theta(config, "", where).value),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def _materialize(module: nn.Module, device: torch.device, skip: str | None) -> None:
    for name, parameter in list(module.named_parameters()):
        if skip is None or not name.startswith(skip):
            owner = module.get_submodule(name.rpartition(".")[0])
            owner._parameters[name.rpartition(".")[2]] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)


def _finish(module: nn.Module, packed: bool) -> None:
    for child in module.modules():
        if isinstance(child, Linear):
            child.finish(packed)


def _check_map(draft: Eagle3, t2d: TensorInfo | None, where: str) -> None:
    """d2t must lead each draft id to a distinct verifier id inside the vocabulary, and t2d must mark exactly those."""
    target = torch.arange(len(draft.d2t)) + draft.d2t.cpu()
    vocab = draft.config.vocab_size
    if len(target) and not (int(target.min()) >= 0 and int(target.max()) < vocab and len(target.unique()) == len(target)):
        raise CheckpointError(
            f"{where}: draft id + d2t[draft id] must be distinct ids in 0..{vocab - 1}, found {int(target.min())}..{int(target.max())} with "
            f"{len(target.unique())} distinct of {len(target)}; d2t holds offsets, not ids"
        )
    if t2d is not None:
        mask = read_tensor(t2d).bool()
        if int(mask.sum()) != len(target) or not bool(mask[target].all()):
            raise CheckpointError(f"{where}: t2d marks {int(mask.sum())} ids, d2t leads to {len(target)}; they must be the same ids")


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _dtype(requested: str, planned: str | None) -> torch.dtype:
    name = planned if requested == "auto" else requested
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ConfigError(f"dtype is {name!r} ({'from config.json' if requested == 'auto' else 'requested'}); a floating dtype such as bfloat16 is expected")
    return value

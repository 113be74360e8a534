"""Load a verifier: its own config decides everything, and every tensor must find its place.

What enters: a pair. What leaves: a `Decoder`, or whatever transformers loads as `HFVerifier`. It does not know drafts or policies.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .building import allocate, finish, open_weights, pick_cache_dtype, pick_device, pick_dtype, progress_of
from .checkpoint.families import look
from .checkpoint.files import TensorInfo, read_json
from .checkpoint.fill import check, drop_left_out, fill, is_cache_scale
from .checkpoint.hub import materialize
from .checkpoint.load_config import LoadConfig
from .checkpoint.load_formats import fill_dummy
from .checkpoint.rope import read_rope
from .errors import ConfigError
from .models.decoder import Decoder, DecoderConfig
from .pair import Checkpoint, Pair, read_with
from .quant.scheme import parse_quantization
from .through_transformers import METHODS, causal_model, expanded

if TYPE_CHECKING:
    from .models.hf import HFVerifier

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


@overload
def load_verifier(
    pair: Pair, *, device: str = ..., dtype: str = ..., packed: bool = ..., kv_cache_dtype: str = ..., backend: Literal["native"] = ...
) -> Decoder: ...


@overload
def load_verifier(
    pair: Pair, *, device: str = ..., dtype: str = ..., packed: bool = ..., kv_cache_dtype: str = ..., backend: Literal["transformers"]
) -> HFVerifier: ...


@torch.inference_mode(False)  # inference tensors could not be filled from other threads
def load_verifier(
    pair: Pair,
    *,
    device: str = "auto",
    dtype: str = "auto",
    packed: bool = True,
    kv_cache_dtype: str = "auto",
    backend: Literal["native", "transformers"] = "native",
) -> Decoder | HFVerifier:
    """Load the verifier of `pair`, strictly.

    Args: see `load_draft`. `packed=False` multiplies dequantized weights, the reference; `kv_cache_dtype="fp8"` rounds keys and values
    to e4m3. `backend` is "native" for Llama, Mistral, Qwen2 or Qwen3 dense in every format that specbench reads, or "transformers" for any
    causal LM that transformers loads, with its own quantizers (see `models.hf`).

    Raises:
        ConfigError: an architecture that the backend does not compute, or a config that contradicts itself.
        CheckpointError: tensors missing, unexpected, or of another shape or kind of dtype.
    """
    if backend == "transformers":
        return _load_hf(pair, device, dtype, packed, kv_cache_dtype)
    if backend != "native":
        raise ConfigError(f"backend is {backend!r}; expected 'native' or 'transformers'")
    load_config = pair.verifier_load
    checkpoint = read_with(pair.verifier, load_config)
    where = f"verifier {checkpoint.name}"
    tensors = {name.removeprefix("model."): info for name, info in checkpoint.tensors.items() if not _foreign(name)}
    config = _with_stored_biases(decoder_config(checkpoint.config, f"{where}/config.json"), tensors)
    if (checkpoint.quantization or {}).get("quant_method") in METHODS:
        return _through_transformers(checkpoint, config, device, dtype, kv_cache_dtype)
    quantization = parse_quantization(checkpoint.quantization, f"{where}/config.json: quantization_config")
    named = look(checkpoint.config, "dtype", "torch_dtype").value
    model = Decoder(config, quantization.for_module if quantization else lambda _: None, pick_dtype(dtype, named))
    has_head = any(name.startswith("lm_head.") for name in tensors)
    if has_head and config.tie_word_embeddings:
        warnings.warn(f"{where}: tie_word_embeddings is true, but lm_head is stored; the stored head is used", stacklevel=2)
    tied = config.tie_word_embeddings and not has_head
    check(model, tensors, where, {"lm_head.weight"} if tied else set())
    drop_left_out(model, tensors)
    materialize(checkpoint, [], tokenizer=True)
    source = open_weights(checkpoint, load_config)
    allocate(model, pick_device(device, load_config), skip={"lm_head"} if tied else set())
    if source.dummy:
        fill_dummy(model)
    else:
        items = ((name.removeprefix("model."), item) for name, item in source.stored() if not _foreign(name))
        fill(model, items, where, "strict", threads=source.threads, progress=progress_of(load_config, tensors))
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    finish(model, packed)
    return _described(model, checkpoint, kv_cache_dtype)


def _through_transformers(checkpoint: Checkpoint, config: DecoderConfig, device: str, dtype: str, kv_cache_dtype: str) -> Decoder:
    """A decoder with the plain weights that transformers' own quantizer expands."""
    materialize(checkpoint, tokenizer=True)
    model = Decoder(config, lambda _: None, pick_dtype(dtype, look(checkpoint.config, "dtype", "torch_dtype").value))
    tensors = {name.removeprefix("model."): tensor for name, tensor in expanded(checkpoint.path, model.dtype).items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    allocate(model, pick_device(device, LoadConfig()), skip={"lm_head"} if config.tie_word_embeddings else set())
    fill(model, tensors.items(), f"verifier {checkpoint.name}", "strict")
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return _described(model, checkpoint, kv_cache_dtype)


def _load_hf(pair: Pair, device: str, dtype: str, packed: bool, kv_cache_dtype: str) -> HFVerifier:
    """What transformers makes of the folder; of the load config only where the folder lies and the device count."""
    from .models.hf import HFVerifier

    load_config = pair.verifier_load
    if not packed or load_config.load_format == "dummy":
        raise ConfigError(
            "packed=False and load_format 'dummy' are the native backend's; transformers multiplies its quantizer's own weights"
        )
    checkpoint = read_with(pair.verifier, load_config)
    materialize(checkpoint, tokenizer=True)
    chosen = None if dtype == "auto" else pick_dtype(dtype, None)
    where = f"verifier {checkpoint.name}"
    model = causal_model(checkpoint.path, where, pick_device(device, load_config), chosen, _foreign)
    return HFVerifier(model, folder=checkpoint.path, kv_cache_dtype=pick_cache_dtype(kv_cache_dtype))


def _described(model: Decoder, checkpoint: Checkpoint, kv_cache_dtype: str) -> Decoder:
    model.eos_ids = _end_ids(checkpoint)
    model.folder = checkpoint.path
    model.kv_cache_dtype = pick_cache_dtype(kv_cache_dtype)
    return model.eval()


def _end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Ids that end an answer, found where transformers' generate finds them: Llama 3 names the end of a turn only there."""
    path = checkpoint.path / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    eos = checkpoint.config.get("eos_token_id") if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or ())


def _foreign(name: str) -> bool:
    """Tensors of a multi-token-prediction module that rides along, old rotary buffers, and scales of an FP8 cache: none is the decoder's
    own.
    """
    return name.removeprefix("model.").startswith("mtp.") or name.endswith("rotary_emb.inv_freq") or is_cache_scale(name)


def _with_stored_biases(config: DecoderConfig, tensors: Mapping[str, TensorInfo]) -> DecoderConfig:
    """GPTQ files often store biases that config.json does not mention; a stored one is added."""
    stored = {"qkv_bias": "self_attn.q_proj.bias", "o_bias": "self_attn.o_proj.bias", "mlp_bias": "mlp.down_proj.bias"}
    found: dict[str, Any] = {flag: getattr(config, flag) or f"layers.0.{name}" in tensors for flag, name in stored.items()}
    return replace(config, **found)


def decoder_config(config: dict[str, Any], where: str) -> DecoderConfig:
    """A `DecoderConfig` from a transformers config.json.

    Raises:
        ConfigError: an architecture, activation or attention that the native decoder does not compute.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(f"{where}: model_type is {kind!r}; the native decoder computes {', '.join(MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act is {config['hidden_act']!r}; the native decoder computes 'silu'")
    lacking = [key for key in NEEDED if config.get(key) is None]
    if lacking:
        raise ConfigError(f"{where} lacks {', '.join(lacking)}; nothing stands in for it")
    # An absent key is 4096 to MistralConfig; null is none.
    default = 4096 if kind == "mistral" else None
    window = config.get("sliding_window", default) if config.get("use_sliding_window", kind == "mistral") else None
    if window is not None and window < config["max_position_embeddings"]:
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
        rope=read_rope(config, where, config["max_position_embeddings"])[0],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )

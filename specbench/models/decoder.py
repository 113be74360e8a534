"""The native verifier: a Llama-type decoder over static caches (Llama, Mistral, Qwen2, Qwen3 dense).

What enters: token ids with their positions, and a cache. What leaves: normed hidden states for the head, and the auxiliary hidden states
that an EAGLE-3 draft reads. It does not know text, files, drafts or acceptance. Quantized weights stay packed inside their `Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoint.rope import Rope
from ..errors import ConfigError
from ..quant.linear import Linear
from ..quant.scheme import Scheme
from .blocks import MLP, Attention, Placed, RMSNorm
from .cache import Cache, Step
from .traced import Tracer

SchemeOf = Callable[[str], Scheme | None]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a Llama-type decoder, as its config.json gives them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class Layer(nn.Module):
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(self, config: DecoderConfig, name: str, scheme_of: SchemeOf, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        q, kv = config.num_attention_heads * width, config.num_key_value_heads * width

        def linear(module: str, shards: tuple[str, ...], inputs: int, outputs: tuple[int, ...], bias: bool) -> Linear:
            schemes = {scheme_of(f"{name}.{shard}") for shard in shards}
            return Linear(f"{name}.{module}", inputs, outputs, _one_scheme(schemes, f"{name}.{module}", shards), dtype, bias)

        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.self_attn = Attention(
            linear(
                "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), hidden, (q, kv, kv), config.qkv_bias
            ),
            linear("self_attn.o_proj", ("self_attn.o_proj",), q, (hidden,), config.o_bias),
            config.num_attention_heads,
            config.num_key_value_heads,
            width,
            (RMSNorm(width, config.rms_norm_eps, dtype), RMSNorm(width, config.rms_norm_eps, dtype)) if config.qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        inner = config.intermediate_size
        self.mlp = MLP(
            linear("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), hidden, (inner, inner), config.mlp_bias),
            linear("mlp.down_proj", ("mlp.down_proj",), inner, (hidden,), config.mlp_bias),
        )

    def forward(self, x: Tensor, step: Step, cache: Cache, index: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step, cache.layers[index])
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(Placed):
    """Embedding, layers, final norm and head.

    Args:
        config: sizes.
        scheme_of: quantization scheme of each linear module, by its checkpoint name.
        dtype: activations, plain weights and cache.
    """

    def __init__(self, config: DecoderConfig, scheme_of: SchemeOf, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.config = config
        # from_pretrained: drawing initial values, even on the meta device, would import torch.compile (seconds)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size, device="meta", dtype=dtype))
        self.layers = nn.ModuleList(Layer(config, f"model.layers.{i}", scheme_of, dtype) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = Linear("lm_head", config.hidden_size, (config.vocab_size,), scheme_of("lm_head"), dtype)
        self.tracer = Tracer([None], config.num_attention_heads // config.num_key_value_heads)
        self.eos_ids: frozenset[int] = frozenset()
        self.folder: Path | None = None  # where it was loaded from; a tokenizer may lie there

    def forward(self, tokens: Tensor, step: Step, cache: Cache, aux_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run `tokens` [B, n] and write their keys and values.

        Args:
            aux_layers: ascending ids; id i is the residual stream that enters layer i, id n (the layer count) what leaves
                the last layer before the final norm, id n + 1 the same after it.

        Returns:
            hidden: [B, n, hidden], after the final norm. aux: [B, n, len(aux_layers) * hidden], or None without ids.
        """
        hidden, *aux = self.tracer.run(partial(self._rows, aux_layers), [tokens], step, cache, aux_layers)
        batch, n = tokens.shape
        return hidden.view(batch, n, -1), aux[0].view(batch, n, -1) if aux else None

    def _rows(self, aux_layers: tuple[int, ...], tensors: Sequence[Tensor], step: Step, cache: Cache) -> tuple[Tensor, ...]:
        """The pass itself, over rows [b * n, hidden]."""
        x = self.embed_tokens(tensors[0].reshape(-1))
        aux = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                aux.append(x)
            x = layer(x, step, cache, i)
        if len(self.layers) in aux_layers:
            aux.append(x)
        hidden = self.norm(x)
        if len(self.layers) + 1 in aux_layers:
            aux.append(hidden)
        return (hidden, torch.cat(aux, -1)) if aux else (hidden,)


def _one_scheme(schemes: set[Scheme | None], fused: str, shards: tuple[str, ...]) -> Scheme | None:
    if len(schemes) != 1:
        raise ConfigError(
            f"{fused}: its parts {shards} have different schemes {[str(s) for s in schemes]}; they are stored as one layer here"
        )
    return next(iter(schemes))

"""The EAGLE-3 draft: fuse auxiliary states, run its decoder layers, score its own vocabulary.

What enters: token ids paired with hidden states (the verifier's fused ones, or the draft's own from the step before), positions, a cache.
What leaves: hidden states to feed back, and logits over the draft vocabulary. It does not know files, quantization formats, acceptance, or
which verifier it serves. The embedding may be the verifier's own module.

Arithmetic (EAGLE-3 paper; EAGLE, vLLM, SGLang and speculators agree): e = input_layernorm(embed(token)); h' = hidden_norm(h); attention over
cat(e, h'); residual is h' if `norm_before_residual` else h; SwiGLU MLP; the state fed back is taken before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..quant.linear import Linear
from ..quant.scheme import Scheme
from .blocks import MLP, Attention, RMSNorm, rotary_table
from .cache import Cache, Step, visible


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes and switches of a draft.

    num_aux_layers: K, the verifier states that `fc` reads. target_hidden_size: their width. vocab_size: of the embedding (the
    verifier's ids). draft_vocab_size: of `lm_head`.
    """

    hidden_size: int
    target_hidden_size: int
    num_aux_layers: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    norm_before_residual: bool


class Eagle3Layer(nn.Module):
    """The decoder layer that reads embedding and hidden state side by side."""

    def __init__(self, config: Eagle3Config, index: int, scheme: Callable[[str], Scheme | None], dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width, inner, eps = config.hidden_size, config.head_dim, config.intermediate_size, config.rms_norm_eps
        q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
        name = f"layers.{index}"

        def linear(module: str, inputs: int, outputs: tuple[int, ...]) -> Linear:
            return Linear(f"{name}.{module}", inputs, outputs, scheme(module), dtype)

        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.hidden_norm = RMSNorm(hidden, eps, dtype)
        self.self_attn = Attention(
            linear("self_attn.qkv_proj", 2 * hidden, (q, kv, kv)),
            linear("self_attn.o_proj", q, (hidden,)),
            config.num_attention_heads,
            config.num_key_value_heads,
            width,
            None,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(linear("mlp.gate_up_proj", hidden, (inner, inner)), linear("mlp.down_proj", inner, (hidden,)))

    def forward(self, embedded: Tensor, hidden: Tensor, step: Step, cache: Cache, index: int) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(torch.cat((self.input_layernorm(embedded), normed), -1), step, cache.layers[index])
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """An EAGLE-3 draft.

    Args:
        config: sizes.
        layer_scheme: scheme of each linear module of a decoder layer, by its name inside the layer.
        edge_scheme: the same for "fc" and "lm_head".
        dtype: activations, plain weights and cache.
    """

    def __init__(
        self,
        config: Eagle3Config,
        layer_scheme: Callable[[int, str], Scheme | None],
        edge_scheme: Callable[[str], Scheme | None],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if config.num_hidden_layers != 1:
            raise NotImplementedError(f"{config.num_hidden_layers} draft layers; one is supported")
        self.config, self.dtype = config, dtype
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, device="meta", dtype=dtype).requires_grad_(False)
        self.fc = Linear("fc", config.num_aux_layers * config.target_hidden_size, (hidden,), edge_scheme("fc"), dtype)
        self.layers = nn.ModuleList([Eagle3Layer(config, 0, lambda module: layer_scheme(0, module), dtype)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.lm_head = Linear("lm_head", hidden, (config.draft_vocab_size,), edge_scheme("lm_head"), dtype)
        self.d2t = nn.Parameter(torch.empty(config.draft_vocab_size, dtype=torch.int64, device="meta"), requires_grad=False)
        self.aux_layers: tuple[int, ...] = ()  # which verifier states it reads; set by the plan
        self.rotary: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def new_cache(self, length: int, batch: int = 1) -> Cache:
        """A cache of `length` slots for `batch` sequences, in the draft's dtype."""
        c = self.config
        return Cache(c.num_hidden_layers, batch, length, c.num_key_value_heads, c.head_dim, self.dtype, self.device)

    def step(self, positions: Tensor, limit: int, rows: Tensor | None = None, masked: bool = True) -> Step:
        """Place of the next pairs (see `Decoder.step`). The table reaches past the draft's own max_position_embeddings, as vLLM 0.28 does."""
        if self.rotary is None or self.rotary.shape[1] < limit:
            length = max(limit, self.config.max_position_embeddings)
            self.rotary = rotary_table(self.config.head_dim, self.config.rope_theta, length, self.dtype, self.device)
        return Step(positions, rows, limit, visible(positions, limit) if masked else None, self.rotary[:, positions][..., None, :])

    def fuse(self, aux: Tensor) -> Tensor:
        """Auxiliary states [B, n, K * target_hidden] of the verifier to [B, n, hidden]."""
        out: Tensor = self.fc(aux)
        return out

    def forward(self, tokens: Tensor, hidden: Tensor, step: Step, cache: Cache) -> Tensor:
        """Run pairs of (token i + 1, state i). tokens: [B, n] verifier ids; hidden: [B, n, hidden]. Returns states [B, n, hidden]."""
        x: Tensor = self.layers[0](self.embed_tokens(tokens), hidden, step, cache, 0)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [B, n, draft_vocab] of the token after each pair's."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids to verifier ids: id + d2t[id] (d2t holds offsets)."""
        return draft_ids + self.d2t[draft_ids]

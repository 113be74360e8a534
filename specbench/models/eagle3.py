"""The EAGLE-3 draft: fuse auxiliary states, run its decoder layers, score its own vocabulary.

What enters: token ids paired with hidden states (the verifier's fused ones, or the draft's own from the step before), positions, a cache.
What leaves: hidden states to feed back, and logits over the draft vocabulary. It does not know files, quantization formats, acceptance, or
which verifier it serves. The embedding may be the verifier's own module.

Arithmetic (EAGLE-3 paper; EAGLE, vLLM, SGLang and speculators agree): e = input_layernorm(embed(token)); h' = hidden_norm(h); attention
over cat(e, h'); residual is h' if `norm_before_residual` else h; SwiGLU MLP. Layers after the first are ordinary pre-norm layers. The state
fed back is taken before the final norm, after it with `norm_output` (EAGLE 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..checkpoint.rope import Rope
from ..quant.linear import Linear
from ..quant.scheme import Scheme
from .blocks import MLP, Attention, Placed, RMSNorm
from .cache import Cache, Step
from .traced import Tracer


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes and switches of a draft.

    num_aux_layers: K, the verifier states that it reads. target_hidden_size: their width. use_fc: whether `fc` fuses them (else K is 1 and
    the state is used as it is). use_hidden_norm: whether the first layer norms it. fc_input_norm: "none", "joint" (one norm over K *
    target_hidden, `norm_before_fc`) or "each" (one per state, `fc_norm`). vocab_size: of the embedding (the verifier's ids).
    draft_vocab_size: of `lm_head`. windows: sliding window of each layer, None for full attention.
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
    rope: Rope
    norm_before_residual: bool
    use_fc: bool = True
    use_hidden_norm: bool = True
    fc_input_norm: str = "none"
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    windows: tuple[int | None, ...] = (None,)


class Eagle3Layer(nn.Module):
    """A decoder layer; the first one reads embedding and hidden state side by side."""

    def __init__(self, config: Eagle3Config, index: int, scheme: Callable[[str], Scheme | None], dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width, inner, eps = config.hidden_size, config.head_dim, config.intermediate_size, config.rms_norm_eps
        q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
        name = f"layers.{index}"

        def linear(module: str, inputs: int, outputs: tuple[int, ...], bias: bool) -> Linear:
            return Linear(f"{name}.{module}", inputs, outputs, scheme(module), dtype, bias)

        self.first = index == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.hidden_norm = RMSNorm(hidden, eps, dtype) if self.first and config.use_hidden_norm else None
        self.self_attn = Attention(
            linear("self_attn.qkv_proj", 2 * hidden if self.first else hidden, (q, kv, kv), config.attention_bias),
            linear("self_attn.o_proj", q, (hidden,), config.o_bias),
            config.num_attention_heads,
            config.num_key_value_heads,
            width,
            (RMSNorm(width, eps, dtype), RMSNorm(width, eps, dtype)) if config.qk_norm else None,
            config.windows[index],
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.mlp = MLP(
            linear("mlp.gate_up_proj", hidden, (inner, inner), config.mlp_bias), linear("mlp.down_proj", inner, (hidden,), config.mlp_bias)
        )

    def forward(self, embedded: Tensor, hidden: Tensor, step: Step, cache: Cache, index: int) -> Tensor:
        if self.first:
            normed = hidden if self.hidden_norm is None else self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat((self.input_layernorm(embedded), normed), -1)
        else:
            residual, inputs = hidden, self.input_layernorm(hidden)
        x = residual + self.self_attn(inputs, step, cache.layers[index])
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(Placed):
    """An EAGLE-3 draft.

    Args:
        config: sizes and switches.
        layer_scheme: scheme of each linear module of a decoder layer, by layer index and its name inside the layer.
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
        super().__init__(dtype)
        self.config = config
        hidden, fused = config.hidden_size, config.num_aux_layers * config.target_hidden_size
        eps = config.rms_norm_eps
        # from_pretrained: drawing initial values, even on the meta device, would import torch.compile (seconds)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, hidden, device="meta", dtype=dtype))
        self.input_norm = RMSNorm(fused, eps, dtype) if config.fc_input_norm == "joint" else None
        norms = [RMSNorm(config.target_hidden_size, eps, dtype) for _ in range(config.num_aux_layers)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_input_norm == "each" else None
        self.fc = Linear("fc", fused, (hidden,), edge_scheme("fc"), dtype, config.fc_bias) if config.use_fc else None
        self.layers = nn.ModuleList(Eagle3Layer(config, i, partial(layer_scheme, i), dtype) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps, dtype)
        self.lm_head: nn.Module = Linear("lm_head", hidden, (config.draft_vocab_size,), edge_scheme("lm_head"), dtype)
        self.d2t = nn.Parameter(torch.empty(config.draft_vocab_size, dtype=torch.int64, device="meta"), requires_grad=False)
        self.tracer = Tracer(config.windows, config.num_attention_heads // config.num_key_value_heads)
        self.unproposable: Tensor | None = None  # bool [draft_vocab]: ids that the verifier's tokenizer does not have
        self.aux_layers: tuple[int, ...] = ()  # which verifier states it reads; set by the plan

    def fuse(self, aux: Tensor) -> Tensor:
        """Auxiliary states [B, n, K * target_hidden] of the verifier to [B, n, hidden]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            chunks = aux.chunk(len(self.fc_norm), -1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return aux if self.fc is None else self.fc(aux)

    def forward(self, tokens: Tensor, hidden: Tensor, step: Step, cache: Cache) -> Tensor:
        """Run pairs of (token i + 1, state i). tokens: [B, n] verifier ids; hidden: [B, n, hidden]. Returns states [B, n, hidden]."""
        batch, n = tokens.shape
        (out,) = self.tracer.run(self._rows, [tokens, hidden], step, cache, None)
        return out.view(batch, n, -1)

    def _rows(self, tensors: Sequence[Tensor], step: Step, cache: Cache) -> tuple[Tensor]:
        """The pass itself, over rows [b * n, hidden]."""
        tokens, hidden = tensors
        embedded, hidden = self.embed_tokens(tokens.reshape(-1)), hidden.flatten(0, 1)
        for i, layer in enumerate(self.layers):
            hidden = layer(embedded, hidden, step, cache, i)
        return (self.norm(hidden) if self.config.norm_output else hidden,)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [B, n, draft_vocab] of the token after each pair's, from the states that `forward` returned."""
        scores: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return scores if self.unproposable is None else scores.masked_fill(self.unproposable, float("-inf"))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids to verifier ids: id + d2t[id] (d2t holds offsets)."""
        return draft_ids + self.d2t[draft_ids]

    def expand(self, scores: Tensor) -> Tensor:
        """Scores [..., draft_vocab] over the verifier's vocabulary [..., vocab], -inf where the draft has no token."""
        full = scores.new_full((*scores.shape[:-1], self.config.vocab_size), float("-inf"))
        target = self.to_target(torch.arange(self.config.draft_vocab_size, device=scores.device))
        return full.index_copy_(-1, target, scores)

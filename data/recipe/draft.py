"""The EAGLE-3 draft as it is trained: a decoder layer or two, unrolled over the steps that it will draft.

What enters: embeddings of the next tokens and the verifier's auxiliary states. What leaves: the draft's states at every unrolled
step, and the loss against the verifier's own distribution. It does not know text, files, optimizers or quantization.
Parameter names are those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 256  # rows of logits held at once on a CPU
CUDA_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Sizes and constants of the draft; `aux_states` verifier states of `hidden_size` each feed `fc`."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    draft_vocab_size: int
    aux_states: int = 3
    norm_before_residual: bool = True
    num_hidden_layers: int = 1


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Projections: the first layer's over [embedding | state], both `hidden_size` wide, the embedding first; others' over the state."""

    def __init__(self, c: DraftConfig, first: bool) -> None:
        super().__init__()
        inputs = (2 if first else 1) * c.hidden_size
        self.q_proj = _linear(inputs, c.num_attention_heads * c.head_dim)
        self.k_proj = _linear(inputs, c.num_key_value_heads * c.head_dim)
        self.v_proj = _linear(inputs, c.num_key_value_heads * c.head_dim)
        self.o_proj = _linear(c.num_attention_heads * c.head_dim, c.hidden_size)

    @property
    def qkv(self) -> Tensor:
        """The three weights as one, [(heads + 2 kv_heads) * d, inputs]."""
        return torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))


class MLP(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(c.hidden_size, c.intermediate_size)
        self.up_proj = _linear(c.hidden_size, c.intermediate_size)
        self.down_proj = _linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: DraftConfig, first: bool) -> None:
        super().__init__()
        self.self_attn = Attention(c, first)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if first:
            self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Draft(nn.Module):
    """The trainable draft, fp32 parameters."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = c = config
        self.fc = _linear(c.aux_states * c.hidden_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i == 0) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = _linear(c.hidden_size, c.draft_vocab_size)

    @property
    def layer(self) -> Layer:
        return cast(Layer, self.layers[0])

    def forward(self, embedded: Tensor, aux: Tensor, first: int = 0, steps: int = 3) -> list[Tensor]:
        """Training-time test: what each drafting step computes when it starts at any column, all columns at once.

        Column t pairs the embedding of token t + 1 with the state at t. Step 0 reads verifier states. Step j > 0 reads the state
        that step j - 1 left at column t - 1, and attends to the step-0 keys of columns <= t - j (those with verifier states when
        drafting began), and then to the one key that each step 1..j made on the way to t.

        Args:
            embedded: [B, T, hidden], embeddings of the tokens after each column.
            aux: [B, T, aux_states * hidden].
            first: step j is computed for columns [first + j, T); step-0 keys exist for all.
            steps: number of unrolled steps.

        Returns:
            For each step j, states before the final norm, [B, T - first - j, hidden].
        """
        c, layer = self.config, self.layer
        weight = layer.self_attn.qkv
        of_embedding, of_state = weight[:, : c.hidden_size], weight[:, c.hidden_size :]
        length = embedded.shape[1]
        own = F.linear(layer.input_layernorm(embedded), of_embedding)  # the same at every step
        rotary = rotary_table(c, length, embedded.device)
        kept: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.layers]  # keys and values of every step
        hidden, starts, outputs = self.fc(aux), [], []
        for j in range(steps):
            start = first + j if j else 0
            starts.append(start)
            normed = layer.hidden_norm(hidden)
            x = normed if c.norm_before_residual else hidden
            qkv = own[:, start:] + F.linear(normed, of_state)
            for i, (each, (keys, values)) in enumerate(zip(cast(list[Layer], list(self.layers)), kept, strict=True)):
                if i:
                    qkv = F.linear(each.input_layernorm(x), each.self_attn.qkv)
                query, key, value = self._heads(qkv, rotary[:, start:])
                keys.append(key)
                values.append(value)
                attended = self._attend(query, keys, values, starts)
                x = x + each.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
                x = x + each.mlp(each.post_attention_layernorm(x))
            outputs.append(x if j else x[:, first:])
            hidden = outputs[-1][:, :-1]
        return outputs

    def _attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor], starts: list[int]) -> Tensor:
        """Attention of the last step's queries [B, heads, n, d] over the first step's keys and over one key of each later step.

        Outside autocast: softmax over bf16 scores, as its output is wanted in bf16.
        """
        j, start, scale = len(keys) - 1, starts[-1], self.config.head_dim**-0.5
        columns = torch.arange(keys[0].shape[2], device=query.device)
        hidden = torch.zeros(len(columns) - start, len(columns), dtype=query.dtype, device=query.device)
        hidden.masked_fill_(columns > columns[start:, None] - j, float("-inf"))
        with torch.autocast(query.device.type, enabled=False):
            flat = [x.flatten(0, 1) for x in (query, keys[0], values[0])]
            scores = torch.baddbmm(hidden, flat[0], flat[1].mT, alpha=scale).view(*query.shape[:3], -1)
            begins = [start - (j - m) - starts[m] for m in range(1, j + 1)]  # where step m's column t - (j - m) lies for the first t
            chain = [keys[m + 1][:, :, b : b + query.shape[2]] for m, b in enumerate(begins)]
            scores = torch.cat([scores] + [(query * key).sum(-1, keepdim=True) * scale for key in chain], -1)
            shares = scores.softmax(-1)
            attended = (shares[..., : len(columns)].flatten(0, 1) @ flat[2]).view(query.shape)
            for m, b in enumerate(begins):
                share = shares[..., len(columns) + m, None]
                attended = attended + share * values[m + 1][:, :, b : b + query.shape[2]]
        return attended

    def _heads(self, qkv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, n, (heads + 2 kv_heads) * d] to rotated queries, keys, and values, each [B, heads, n, d]."""
        c = self.config
        q, kv = c.num_attention_heads, c.num_key_value_heads
        qkv = qkv.unflatten(-1, (q + 2 * kv, c.head_dim)).transpose(1, 2)
        half = c.head_dim // 2
        qk = qkv[:, : q + kv].float()
        turned = torch.cat((-qk[..., half:], qk[..., :half]), -1)
        qk = (qk * rotary[0] + turned * rotary[1]).to(qkv.dtype)
        key, value = qk[:, q:], qkv[:, q + kv :]
        return qk[:, :q], key.repeat_interleave(q // kv, 1), value.repeat_interleave(q // kv, 1)


def rotary_table(c: DraftConfig, length: int, device: torch.device) -> Tensor:
    """[2, length, head_dim]: cosines, sines."""
    inverse = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64, device=device) / c.head_dim)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * inverse
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin())).float()


@torch.no_grad()
def warm_start(
    draft: Draft, last_layer: Mapping[str, Tensor], norm: Tensor, head: Tensor, state_scale: float, embedding_scale: float
) -> None:
    """Begin as the verifier's last layer on its last auxiliary state, with the verifier's final norm and head rows.

    The residual stream is brought to unit scale on the way: `fc` divides by `state_scale`, and so do the matrices that write into
    the stream; the norm in front of the attention moves into its matrices. Every norm that reads the stream undoes the scale.

    Args:
        last_layer: the layer's tensors, named from `self_attn.` / `mlp.` / the two norms on.
        norm: [hidden]. head: [draft_vocab_size, hidden].
        state_scale: root mean square of the last auxiliary state.
        embedding_scale: standard deviation of the q, k, v columns that read the embedding; the verifier has none.
    """
    layer, hidden = draft.layer, draft.config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -hidden:] = torch.eye(hidden) / state_scale
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :hidden].normal_(0.0, embedding_scale)
        weight[:, hidden:] = last_layer[f"self_attn.{name}.weight"] * last_layer["input_layernorm.weight"]
    layer.self_attn.o_proj.weight.copy_(last_layer["self_attn.o_proj.weight"] / state_scale)
    for name in ("gate_proj", "up_proj"):
        getattr(layer.mlp, name).weight.copy_(last_layer[f"mlp.{name}.weight"] * last_layer["post_attention_layernorm.weight"])
    layer.mlp.down_proj.weight.copy_(last_layer["mlp.down_proj.weight"] / state_scale)
    draft.norm.weight.copy_(norm)
    draft.lm_head.weight.copy_(head)
    for further in list(draft.layers)[1:]:
        still_layer(cast(Layer, further), last_layer)


@torch.no_grad()
def still_layer(layer: Layer, last_layer: Mapping[str, Tensor]) -> None:
    """Begin a further layer as one that reads as the verifier's last does, and adds nothing yet."""
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight.copy_(last_layer[f"self_attn.{name}.weight"] * last_layer["input_layernorm.weight"])
    for name in ("gate_proj", "up_proj"):
        getattr(layer.mlp, name).weight.copy_(last_layer[f"mlp.{name}.weight"] * last_layer["post_attention_layernorm.weight"])
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of all steps against the verifier's distribution over the draft vocabulary, in chunks.

    Logits and their gradients never exist for more than `CHUNK` rows, and the verifier's distribution is computed once for all steps.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor, head: Tensor, final: Tensor, rows: Tensor) -> Tensor:
        """states [J, N, H] normed draft states; weights [J, N]; head [Vd, H]; final [N, H] verifier's; rows [Vd, H] its head rows."""
        dtype, steps = rows.dtype, states.shape[0]
        states, half = states.to(dtype), head.to(dtype)
        of_states, of_head = torch.empty_like(states), torch.zeros_like(head)
        loss = torch.zeros((), device=states.device)
        chunk = CUDA_CHUNK if states.is_cuda else CHUNK
        for begin in range(0, final.shape[0], chunk):
            part = slice(begin, begin + chunk)
            target = F.linear(final[part], rows).softmax(-1)
            q = torch.empty(steps, *target.shape, dtype=dtype, device=target.device)
            for j in range(steps):
                logits = F.linear(states[j, part], half)
                torch.softmax(logits, -1, out=q[j])
                log_sum = logits.amax(-1).float() - q[j].amax(-1).float().log()
                loss += ((log_sum - torch.linalg.vecdot(logits, target).float()) * weights[j, part]).sum()
            q.sub_(target)
            weight = weights[:, part, None].to(dtype)
            of_states[:, part] = (q @ half) * weight
            of_head += q.flatten(0, 1).T @ (states[:, part] * weight).flatten(0, 1)
        ctx.save_for_backward(of_states, of_head)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_head = ctx.saved_tensors
        return of_states.float() * outer[0], None, of_head * outer[0], None, None

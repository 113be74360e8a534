"""Any transformers causal LM as verifier: the same passes as the native decoder's, over static caches.

What enters: a loaded model; then token ids with their positions, and a cache. What leaves: normed hidden states for the head, and the
auxiliary hidden states that an EAGLE-3 draft reads, caught by hooks. It does not know text, files, drafts or acceptance.

The model's own code computes everything; it is given positions, a cache that writes at slots (`hf_cache`), and masks, which say what each
query sees: ragged batches, draft trees and rejected tokens need nothing else. What keeps more than keys and values (recurrent, convolution
or linear-attention states) cannot forget a rejected token that way and is refused, as is every model whose logits over this cache differ
from those of a plain call: see `HFVerifier`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .cache import Step
from .hf_cache import SlotCache

KINDS = ("full_attention", "sliding_attention")  # of layers, in `config.layer_types`
LOOK = 12  # tokens that are read before anything else, to compare
# Mean deviation of logits, as a share of their standard deviation. Wrong positions or masks give tenths, rounding far less.
ALIKE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class HFConfig:
    """What the decode loop asks of a model's config. max_position_embeddings: tokens a sequence may come to. num_key_value_heads, head_dim:
    the most of any layer, as its cache is laid out."""

    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int
    hidden_size: int
    num_key_value_heads: int = 0
    head_dim: int = 0


class Head(nn.Module):
    """Scores from normed hidden states, with the scaling and softcapping that a model's forward applies after its output embeddings."""

    def __init__(self, linear: nn.Module, config: Any) -> None:
        super().__init__()
        self.linear = linear
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and its kin
        self.factor: float | None = getattr(config, "logit_scale", None)  # Cohere
        self.divisor: float | None = getattr(config, "logits_scaling", None)  # Granite

    @property
    def weight(self) -> Tensor:
        return self.linear.weight  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden]; returns [..., vocab]."""
        scores: Tensor = self.linear(hidden)
        if self.factor is not None:
            scores = scores * self.factor
        if self.divisor is not None:
            scores = scores / self.divisor
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap


class HFVerifier:
    """A transformers causal LM with the methods of `models.decoder.Decoder`.

    Args:
        model: from AutoModelForCausalLM, with attn_implementation "eager" or "sdpa"; put into eval mode, otherwise left as it is.
        folder: where it was loaded from; a tokenizer may lie there.
        kv_cache_dtype: what keys and values are rounded to; None keeps them.

    Before anything else the model reads a dozen tokens, once plainly and once in pieces over our cache, with a rejected block and a tree.

    Raises:
        ConfigError: the model keeps states besides keys and values, is an encoder-decoder, or has attention that takes no mask or no
            positions; or its logits in pieces are not its plain ones.
    """

    captures = False  # CUDA graphs: only where asked for, because experts and quantizers may look at the data

    def __init__(self, model: Any, *, folder: Path | None = None, kv_cache_dtype: torch.dtype | None = None) -> None:
        self.model = model.eval()
        self.name = f"{type(model).__name__} ({model.config.model_type})"
        text = model.config.get_text_config(decoder=True)
        _refuse_states(self.name, model, text)
        self.decoder = model.get_decoder()
        self.folder, self.kv_cache_dtype = folder, kv_cache_dtype
        self.eos_ids = _end_ids(model)
        accepted = inspect.signature(self.decoder.forward).parameters
        if "position_ids" not in accepted:
            raise ConfigError(f"{self.name}: its forward takes no position_ids; the decode loop places tokens by them")
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"  # its name in earlier releases of transformers 5
        if text._attn_implementation not in ("eager", "sdpa"):
            raise ConfigError(
                f"{self.name}: attn_implementation is {text._attn_implementation!r}; load it with 'sdpa' or 'eager', which take any mask"
            )
        self.windows = _windows(self.name, self.decoder, text)
        self.layers = _layers(self.name, self.decoder, text.num_hidden_layers)
        embedding = model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype  # quantizers leave embeddings plain, a head not always
        # a plain one: what a draft borrows are the rows, without the factor that Gemma's own module applies
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.detach())
        self.lm_head = Head(model.get_output_embeddings(), text)
        self.config = HFConfig(text.vocab_size, _context(self.name, text), text.num_hidden_layers, text.hidden_size)
        self._compare()

    def new_cache(self, length: int, batch: int = 1) -> SlotCache:
        """A cache of `length` slots for `batch` sequences, which takes its memory in the first pass."""
        return SlotCache(batch, length, self.kv_cache_dtype)

    def step(
        self,
        positions: Tensor,
        limit: int,
        *,
        row: int = 0,
        masked: bool = True,
        causal: bool = False,
        slots: Tensor | None = None,
        seen: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Step:
        """Place of the next tokens (see `Step`); positions int64 [b, n], and slots where they differ.

        `masked` is not used: a model that is given no mask would make one up.
        """
        none = torch.empty(0, dtype=self.dtype, device=self.device)  # models rotate by their own tables; masks take its dtype
        return Step(positions, positions if slots is None else slots, row, limit, (none, none), True, causal, seen, key_positions)

    def __call__(self, tokens: Tensor, step: Step, cache: SlotCache, aux_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run `tokens` int64 [b, n] and write their keys and values.

        Args:
            aux_layers: ascending ids; id i is the residual stream that enters layer i, id n (the layer count) what leaves
                the last layer before the final norm, id n + 1 the same after it.

        Returns:
            hidden: [b, n, hidden], after the final norm. aux: [b, n, len(aux_layers) * hidden] in `dtype`, or None without ids.
        """
        cache.step = step
        # proposals beyond the context are never accepted, but learned positions have no row for them
        positions = step.positions.clamp(max=self.config.max_position_embeddings - 1)
        given: dict[str, Any] = {"position_ids": positions, "attention_mask": self._masks(step), self.cache_argument: cache}
        with self._caught(aux_layers) as states:
            hidden: Tensor = self.decoder(input_ids=tokens, use_cache=True, **given)[0]
        if not aux_layers:
            return hidden, None
        states[len(self.layers) + 1] = hidden
        return hidden, torch.cat([states[i].to(self.device, self.dtype) for i in aux_layers], -1)

    def _masks(self, step: Step) -> Tensor | dict[str, Tensor | None] | None:
        """One mask, or one per kind of layer. A prompt pass is what models know: they make their own."""
        if step.causal:
            return None
        masks = {kind: step.mask(window) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @contextmanager
    def _caught(self, aux_layers: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Hooks for the length of one pass: states by id, as they come."""
        states: dict[int, Tensor] = {}

        def entering(i: int) -> Any:
            return lambda _, args, kwargs: states.__setitem__(i, args[0] if args else kwargs["hidden_states"])

        def leaving(_: Any, __: Any, output: Any) -> None:
            states[len(self.layers)] = output[0] if isinstance(output, tuple) else output

        n = len(self.layers)
        hooks = [self.layers[i].register_forward_pre_hook(entering(i), with_kwargs=True) for i in aux_layers if i < n]
        if n in aux_layers:
            hooks.append(self.layers[-1].register_forward_hook(leaving))
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _compare(self) -> None:
        """A dozen tokens, plainly and in pieces; sizes of the caches are taken from what the pieces left there."""
        vocab, n = self.config.vocab_size, self.config.num_hidden_layers
        tokens = (torch.arange(1, LOOK + 1, device=self.device) * 7919 % vocab)[None]
        cache = self.new_cache(LOOK)
        try:
            plain = self.model(input_ids=tokens, use_cache=False).logits.float()
            pieces = self._in_pieces(tokens, cache, (0, n // 2, n))
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name} does not run over a cache of keys and values by slot: {type(error).__name__}: {error}"
            ) from error
        deviation = float((plain - pieces.to(plain.device)).abs().mean() / plain.std()) if plain.shape == pieces.shape else float("inf")
        bound = ALIKE.get(self.dtype, 0.1) if self.kv_cache_dtype is None else 0.2
        if not deviation <= bound:
            raise ConfigError(
                f"{self.name}: {LOOK} tokens in pieces over a cache, one of them taken back, give other logits than one plain pass: they "
                f"deviate by {deviation:.2g} standard deviations, {bound:g} is rounding. Speculation over it would not be lossless"
            )
        heads, width = (max(sizes) for sizes in zip(*cache.sizes(), strict=True))
        c = self.config
        self.config = HFConfig(c.vocab_size, c.max_position_embeddings, n, c.hidden_size, heads, width)

    def _in_pieces(self, tokens: Tensor, cache: SlotCache, aux_layers: tuple[int, ...]) -> Tensor:
        """Logits [1, LOOK, vocab]: a prompt, a block that is rejected, the block that is right, and a tree in slots that run backwards."""
        positions = torch.arange(LOOK, device=self.device)[None]
        hidden, aux = self(tokens[:, :5], self.step(positions[:, :5], 5, causal=True), cache, aux_layers)
        if aux is None or aux.shape != (1, 5, len(aux_layers) * self.config.hidden_size):
            raise ConfigError(f"{self.name}: what runs between its layers is not one residual stream of {self.config.hidden_size}")
        self(tokens[:, :3], self.step(positions[:, 5:8], 8), cache)
        block = self(tokens[:, 5:9], self.step(positions[:, 5:9], 9), cache)[0]
        slots = torch.cat((positions[:, :9], positions[:, 9:].flip(1)), 1)
        step = self.step(
            positions[:, 9:], LOOK, slots=slots[:, 9:], seen=slots[:, None] <= positions[:, 9:, None], key_positions=slots
        )  # fmt: skip
        tree = self(tokens[:, 9:], step, cache)[0]
        return self.lm_head(torch.cat((hidden, block, tree), 1)).float()


def _refuse_states(name: str, model: Any, text: Any) -> None:
    """Refuse what keeps more than keys and values."""
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder-decoder; a verifier is a decoder alone")
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - set(KINDS))
    if odd:
        raise ConfigError(
            f"{name} has layers of kind {', '.join(odd)}; {' and '.join(KINDS)} are handled. Others keep states that cannot be rolled back "
            f"after a rejected token, or see by rules that have no mask here"
        )
    if getattr(model, "_is_stateful", False):
        raise ConfigError(f"{name} keeps a recurrent state, which cannot be rolled back after a rejected token")
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{name} has no output embeddings; load it with AutoModelForCausalLM")


def _windows(name: str, decoder: Any, text: Any) -> dict[str, int | None]:
    """How far back each kind of layer sees; one kind where all see alike."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        # these configs name a window whether or not the model's code slides; code that does imports what makes such masks
        slides = hasattr(sys.modules[type(decoder).__module__], "create_sliding_window_causal_mask")
        return {"full_attention": window if slides else None}
    if "sliding_attention" in kinds and not isinstance(window, int):
        raise ConfigError(f"{name}: layer_types has sliding_attention, and sliding_window is {window!r}; a number of tokens is expected")
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}


def _layers(name: str, decoder: Any, count: int) -> nn.ModuleList:
    """The decoder's layers, whatever the list is called."""
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if not lists:
        raise ConfigError(f"{name}: {type(decoder).__name__} has no list of {count} layers to take auxiliary states from")
    return lists[0]


def _context(name: str, text: Any) -> int:
    """Tokens that a sequence may come to."""
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ConfigError(f"{name}: max_position_embeddings is {context!r}; a number of tokens is expected")
    rope = getattr(text, "rope_parameters", None) or {}
    sections = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for all layers, or one for each kind
    # beyond the original length every rotation of longrope changes, also of keys that are cached
    ends = [part.get("original_max_position_embeddings") for part in sections if part.get("rope_type") == "longrope"]
    return min([context, *(end for end in ends if end)])


def _end_ids(model: Any) -> frozenset[int]:
    """Ids that end an answer, where `generate` finds them."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None) if eos is None else eos
    return frozenset([eos] if isinstance(eos, int) else eos or ())

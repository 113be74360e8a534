"""Execute a plan: build the draft for its settings and fill it from its files.

What enters: a pair and a policy. What leaves: a loaded draft. It decides nothing; every choice is in the plan. Parameters are created on
the meta device, then filled straight from the files, shard by shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .building import allocate, finish, open_weights, pick_cache_dtype, pick_device, pick_dtype, progress_of
from .checkpoint.files import TensorInfo, read_into
from .checkpoint.fill import check, drop_left_out, fill, finite, first_part, is_cache_scale
from .checkpoint.hub import materialize
from .checkpoint.load_formats import WeightSource, dummy_, fill_dummy, weights
from .errors import CheckpointError, ConfigError
from .load_settings import draft_load_config
from .models.decoder import Decoder
from .models.eagle3 import Eagle3, Eagle3Config
from .pair import Pair, read_with
from .plan import Plan, resolve
from .policies import Policy, get_policy
from .quant.scheme import Scheme, parse_quantization

if TYPE_CHECKING:
    from .models.hf import HFVerifier

ALIKE = 0.5  # mean cosine of embedding rows below which a draft's embedding is warned of; trained copies stay near 1, random ones near 0


@torch.inference_mode(False)  # inference tensors could not be filled from other threads
def load_draft(
    pair: Pair,
    policy: str | Policy = "draft",
    *,
    device: str = "auto",
    dtype: str = "auto",
    verifier: Decoder | HFVerifier | None = None,
    packed: bool = True,
    kv_cache_dtype: str = "auto",
    overrides: Mapping[str, Any] | None = None,
) -> Eagle3:
    """Load the draft of `pair` under `policy`.

    Args:
        device: "auto" is the load config's, else CUDA where there is one, else the CPU.
        dtype: "auto" is the plan's (the verifier's own), else a torch dtype name.
        verifier: a loaded verifier whose embedding (and head) the draft may share; without it the verifier's embedding is read again.
        packed: keep 4-bit weights packed where a kernel exists; False multiplies dequantized weights.
        kv_cache_dtype: "auto" keeps keys and values in the compute dtype, whatever the verifier's cache holds; "fp8" rounds them to e4m3.
        overrides: see `resolve`.

    Raises:
        ConfigError: the plan cannot be resolved.
        CheckpointError: under a strict policy, tensors that are missing, unexpected, or of another shape or kind of dtype.
        CheckpointKeyError: under an engine's policy, a tensor that finds no parameter (a KeyError, as there).
    """
    prepared = prepare(pair, policy, dtype, overrides)
    plan, model, tensors, borrowed, computed = prepared.plan, prepared.model, prepared.tensors, prepared.borrowed, prepared.computed
    pair, load_config = plan.pair, plan["load_config"]
    model.kv_cache_dtype = pick_cache_dtype(kv_cache_dtype)
    where, strict = f"draft {pair.draft.name}", plan["checks"] == "strict"
    if strict:
        check(model, tensors, where, borrowed | computed)
    drop_left_out(model, tensors)
    source = open_weights(pair.draft, load_config)
    allocate(model, pick_device(device, load_config), skip={name.rpartition(".")[0] for name in borrowed}, zero=not strict)
    if source.dummy:
        fill_dummy(model)
    else:
        if computed:
            model.d2t.data.copy_(_computed_map(plan, source))
        canonical = {info.name: name for name, info in tensors.items()}
        items = ((canonical[name], item) for name, item in source.stored() if name in canonical)
        fill(model, items, where, plan["checks"], threads=source.threads, progress=progress_of(load_config, tensors))
    _borrow(model, pair, plan, verifier)
    if strict and not source.dummy:
        _check_map(model, plan.dialect.tensors.get("t2d"), source, where)
    finish(model, packed, strict)
    _forbid_unknown_ids(model, pair, plan)
    return model.eval()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A draft before its weights: what is known from headers alone.

    plan: over the very files that will be read. model: on the meta device. tensors: by canonical name, those that are to fill it. borrowed,
    computed: parameters that the verifier, or nothing stored, fills.
    """

    plan: Plan
    model: Eagle3
    tensors: dict[str, TensorInfo]
    borrowed: set[str]
    computed: set[str]


def prepare(pair: Pair, policy: str | Policy = "draft", dtype: str = "auto", overrides: Mapping[str, Any] | None = None) -> Prepared:
    """Everything of `load_draft` that comes before the first weight byte; arguments and errors as there."""
    policy = get_policy(policy)
    # Resolved over the very files that will be read, which may be others than those that were opened.
    pair = replace(pair, draft=read_with(pair.draft, draft_load_config(pair, policy)))
    plan = resolve(pair, policy, overrides)
    model = build_draft(plan, pick_dtype(dtype, plan["dtype"]))
    borrowed = {f"{name}.weight" for name in ("embed_tokens", "lm_head") if plan[name] == "verifier"}
    computed = {"d2t"} if plan["d2t"] != "draft" else set()
    left_out = {"t2d", *borrowed, *computed}
    tensors = {name: info for name, info in plan.dialect.tensors.items() if name not in left_out and not is_cache_scale(name)}
    return Prepared(plan, model, tensors, borrowed, computed)


def build_draft(plan: Plan, dtype: torch.dtype) -> Eagle3:
    """The empty draft (meta device) that a plan describes: which parameters exist depends on the plan's quantization."""
    planned = {name: plan[name] for name in Eagle3Config.__dataclass_fields__ if name != "num_aux_layers"}
    config = Eagle3Config(num_aux_layers=len(plan["aux_layers"]), **planned)
    own = plan.policy.rule("layer_quantization") == "draft"
    layers = parse_quantization(plan["quantization"], plan.settings["quantization"].source)
    edges = parse_quantization(plan["edge_quantization"], plan.settings["edge_quantization"].source)

    def layer_scheme(index: int, module: str) -> Scheme | None:
        part = first_part(module)
        if layers is None:
            return None
        if own:  # ignore lists of drafts carry the prefix of whichever model wrote them
            return layers.for_any([f"{prefix}{part}" for prefix in _layer_prefixes(plan, index)])
        # An engine that applies the verifier's section asks it about a layer after the verifier's last one.
        return layers.for_module(f"model.layers.{int(plan.pair.verifier.config['num_hidden_layers']) + index}.{part}")

    model = Eagle3(config, layer_scheme, lambda name: None if edges is None else edges.for_any((name, f"model.{name}")), dtype)
    model.aux_layers = plan["aux_layers"]
    return model


def _layer_prefixes(plan: Plan, index: int) -> list[str]:
    """Every prefix under which a quantization section may speak of draft layer `index`."""
    return [f"layers.{index}.", f"model.layers.{index}.", *(["midlayer."] if index == 0 else [])]


def _borrow(model: Eagle3, pair: Pair, plan: Plan, verifier: Decoder | HFVerifier | None) -> None:
    """Take the verifier's embedding and head where the plan says so: the loaded modules themselves, else read from its file."""
    if plan["embed_tokens"] == "draft" and verifier is not None:
        _compare_embeddings(model, verifier, pair)
    if plan["embed_tokens"] == "verifier":
        if verifier is not None:
            model.embed_tokens = verifier.embed_tokens
        else:
            weight = torch.empty(model.config.vocab_size, model.config.hidden_size, dtype=model.dtype, device=model.device)
            _read_verifier(pair, "embed_tokens.weight", weight)
            if plan["checks"] == "strict" and not finite(weight):
                raise CheckpointError(
                    f"verifier {pair.verifier.name}: embed_tokens.weight holds values that are not finite; the file is damaged"
                )
            model.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
    if plan["lm_head"] == "verifier":
        if verifier is None:
            raise ConfigError(f"draft {pair.draft.name} has no lm_head and borrows the verifier's; pass the loaded verifier (verifier=...)")
        model.lm_head = verifier.lm_head


def _compare_embeddings(model: Eagle3, verifier: Decoder | HFVerifier, pair: Pair) -> None:
    """Warn of an embedding that has little to do with the verifier's: an exporter that rebuilt it may have saved random values."""
    own, other = model.embed_tokens.weight, verifier.embed_tokens.weight
    if own.shape != other.shape:
        return
    rows = torch.linspace(0, own.shape[0] - 1, min(512, own.shape[0]), device=own.device).long()
    cosine = float(torch.nn.functional.cosine_similarity(own[rows].float(), other[rows].to(own.device).float(), dim=-1).mean())
    if cosine < ALIKE:
        warnings.warn(
            f"draft {pair.draft.name}: rows of its embed_tokens have a mean cosine of {cosine:.2f} with the verifier's; untrained? "
            "The verifier's is taken with overrides={'embed_tokens': 'verifier'}",
            stacklevel=3,
        )


def _read_verifier(pair: Pair, name: str, out: torch.Tensor) -> None:
    verifier = read_with(pair.verifier, pair.verifier_load)
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        if prefix + name in verifier.tensors:
            if pair.verifier_load.load_format == "dummy":
                dummy_(out)
                return
            materialize(verifier, [prefix + name])  # the other files of a hub checkpoint may stay away
            info = verifier.tensors[prefix + name]
            if info.pickled:
                out.copy_(weights(verifier.path, pair.verifier_load).read(info.name))
            else:
                read_into(info, out)
            return
    raise CheckpointError(f"verifier {verifier.name} has no {name} to borrow")


def _computed_map(plan: Plan, source: WeightSource) -> torch.Tensor:
    """d2t where the file has none: zeros for a full vocabulary, or what t2d marks."""
    if plan["d2t"] == "identity":
        return torch.zeros(plan["draft_vocab_size"], dtype=torch.int64)
    target = source.read(plan.dialect.tensors["t2d"].name).bool().nonzero()[:, 0]
    if len(target) != plan["draft_vocab_size"]:
        raise CheckpointError(
            f"draft {plan.pair.draft.name}: t2d marks {len(target)} ids, the draft vocabulary is {plan['draft_vocab_size']}"
        )
    return target - torch.arange(len(target))


def _forbid_unknown_ids(model: Eagle3, pair: Pair, plan: Plan) -> None:
    """Padding ids, which the verifier's tokenizer does not have, are never proposed; only looked at where the vocabularies are padded
    differently.
    """
    if not plan.settings["vocab_size"].note:
        return
    materialize(pair.verifier, [], tokenizer=True)
    if not (pair.verifier.path / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(pair.verifier.path / "tokenizer.json")).get_vocab_size()
    if known > min(plan["vocab_size"], plan.dialect.size("vocab_size").value):
        raise ConfigError(
            f"the tokenizer of {pair.verifier.name} has {known} entries, draft {pair.draft.name} only "
            f"{plan.dialect.size('vocab_size').value}: it belongs to another verifier"
        )
    unknown = model.to_target(torch.arange(model.config.draft_vocab_size, device=model.device)) >= known
    model.unproposable = unknown if bool(unknown.any()) else None


def _check_map(draft: Eagle3, t2d: TensorInfo | None, source: WeightSource, where: str) -> None:
    """d2t must lead each draft id to a distinct verifier id inside the vocabulary, and t2d must mark exactly those."""
    target = torch.arange(len(draft.d2t)) + draft.d2t.cpu()
    vocab = draft.config.vocab_size
    if len(target) and not (int(target.min()) >= 0 and int(target.max()) < vocab and len(target.unique()) == len(target)):
        raise CheckpointError(
            f"{where}: draft id + d2t[draft id] must be distinct ids in 0..{vocab - 1}, found {int(target.min())}..{int(target.max())} "
            f"with "
            f"{len(target.unique())} distinct of {len(target)}; d2t holds offsets, not ids"
        )
    if t2d is not None:
        mask = source.read(t2d.name).bool()
        if int(mask.sum()) != len(target) or not bool(mask[target].all()):
            raise CheckpointError(f"{where}: t2d marks {int(mask.sum())} ids, d2t leads to {len(target)}; they must be the same ids")

"""The ways of decoding that a benchmark compares, each ready to decode a batch of prompts.

What enters: loaded models, or a checkpoint for transformers; k, trees, batch sizes, temperatures. What leaves: `Arm`s. It does not know
prompts as text, repeats or records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..decode.request import Sampling
from ..pair import Checkpoint
from ..quant.scheme import Scheme, parse_quantization
from .speed import ADAPTIVE, LIMITS, PENALTIES

PLAIN_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
DraftSampling = Literal["greedy", "probabilistic"]
TreeShape = tuple[int, int, int]  # depth, top_k, nodes: see `decode.tree.Tree`


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding that is measured.

    facts: the `Row` fields that all of its rows share. batch_size: prompts that `decode` takes at most. context: positions that the
    verifier has. decode: (prompts' token ids, limit of new tokens, a seed for each) -> for each the `Row` fields that it measured.
    """

    facts: dict[str, Any]
    batch_size: int
    context: int
    decode: Callable[[list[list[int]], int, list[int]], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Variants:
    """What specbench's own loop is varied over. k: chains, 0 is plain. adaptive: chains of at most so many, chosen per round. trees: draft
    trees beside them. The arms are every combination. sampling: limits and penalties of all; its temperature and seed are not read."""

    k: tuple[int, ...] = (0, 3)
    adaptive: tuple[int, ...] = ()
    trees: tuple[TreeShape, ...] = ()
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    sampling: Sampling = Sampling()
    draft_sampling: DraftSampling = "greedy"
    p_min: tuple[float, ...] = (0.0,)

    def shapes(self) -> list[Shape]:
        """Every chain with every `p_min`, plain decoding and trees once."""
        chains = [Shape(k, p_min=p) for k in self.k for p in (self.p_min if k else (0.0,))]
        chains += [Shape(k, adaptive=True, p_min=p) for k in self.adaptive for p in self.p_min]
        return [*chains, *(Shape(tree[0], tree) for tree in self.trees)]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a round proposes."""

    k: int
    tree: TreeShape | None = None
    adaptive: bool = False
    p_min: float = 0.0

    def __str__(self) -> str:
        if self.tree is not None:
            return "tree depth {} top_k {} nodes {}".format(*self.tree)
        return ADAPTIVE if self.adaptive else "chain"


def specbench_arms(verifier: Any, draft: Any, tokenizer: Any, facts: dict[str, Any], variants: Variants) -> list[Arm]:
    """An arm per combination: temperatures and batch sizes outside, shapes inside, so that a k=0 is near what it is the base of."""
    return [
        _specbench_arm(verifier, draft, tokenizer, facts, variants, replace(variants.sampling, temperature=temperature), batch_size, shape)
        for temperature in variants.temperatures
        for batch_size in variants.batch_sizes
        for shape in variants.shapes()
    ]


def _specbench_arm(
    verifier: Any, draft: Any, tokenizer: Any, facts: dict[str, Any], v: Variants, sampling: Sampling, batch: int, shape: Shape
) -> Arm:
    from ..text import generate

    k, sampled = shape.k, sampling.temperature > 0

    def decode(prompts: list[list[int]], max_new_tokens: int, seeds: list[int]) -> list[dict[str, Any]]:
        found = generate(
            verifier, draft if k else None, prompts, num_speculative_tokens=k, max_new_tokens=max_new_tokens, tokenizer=tokenizer,
            batch_size=batch, sampling=[replace(sampling, seed=seed) for seed in seeds], tree=shape.tree, adaptive=shape.adaptive,
            draft_p_min=shape.p_min, draft_sampling=v.draft_sampling,
        )  # fmt: skip
        return [_measured(one, sampled) for one in found]

    own = {
        "k": k, "proposer": "eagle3" if k else "", "draft_shape": str(shape), "batch_size": batch, "temperature": sampling.temperature,
        "draft_sampling": v.draft_sampling if sampled and k else "greedy", "draft_p_min": shape.p_min or None,
    }  # fmt: skip
    return Arm({**facts, **own, **used(sampling)}, batch, verifier.config.max_position_embeddings, decode)


def used(sampling: Sampling) -> dict[str, float]:
    """Limits and penalties that change something, by name; limits do not when greedy."""
    names = (*LIMITS, *PENALTIES) if sampling.temperature > 0 else PENALTIES
    given = {name: getattr(sampling, name) for name in names}
    return {name: value for name, value in given.items() if value != getattr(Sampling(), name) and (name, value) != ("top_k", -1)}


def _measured(one: Any, sampled: bool) -> dict[str, Any]:
    """The fields of a row that a `Generation` knows."""
    names = ("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "other_s", "decode_s", "total_s")
    return {
        "accepted_per_round": one.accepted_per_round, "proposed_per_round": one.proposed_per_round, "nodes_per_round": one.nodes_per_round,
        "emitted_at_s": one.emitted_at_s, "token_ids": one.token_ids, "finish_reason": one.finish_reason,
        "seed": one.seed if sampled else None, **{name: getattr(one.timing, name) for name in names},
    }  # fmt: skip


def transformers_arms(checkpoint: Checkpoint, device: str, dtype: str, prompt_lookup: int) -> list[Arm]:
    """transformers' own greedy loop, plain and, where asked for, with prompt lookup, on one model."""
    from .baseline import TransformersLoop

    loop = TransformersLoop(checkpoint, device, dtype)
    facts = {"engine": "transformers", "verifier": checkpoint.name, **model_facts(checkpoint, loop.model)}
    loops: list[tuple[Any, dict[str, Any]]] = [(loop, {"k": 0})]
    if prompt_lookup:
        assisted = TransformersLoop(checkpoint, device, dtype, model=loop.model, prompt_lookup=prompt_lookup)
        loops.append((assisted, {"k": prompt_lookup, "proposer": "prompt lookup"}))
    return [Arm({**facts, **own}, 1, one.context, _one_by_one(one)) for one, own in loops]


def _one_by_one(loop: Any) -> Callable[[list[list[int]], int, list[int]], list[dict[str, Any]]]:
    def decode(prompts: list[list[int]], max_new_tokens: int, _: list[int]) -> list[dict[str, Any]]:
        return [loop.decode(ids, max_new_tokens) for ids in prompts]

    return decode


def model_facts(checkpoint: Checkpoint, model: Any) -> dict[str, Any]:
    """verifier_format, dtype, device and threads of a loaded model."""
    import torch

    dtype = str(model.dtype).removeprefix("torch.")
    place = {"device": str(model.device), "threads": torch.get_num_threads()}
    return {"verifier_format": format_name(checkpoint, dtype), "dtype": dtype, **place}


def format_name(checkpoint: Checkpoint, dtype: str) -> str:
    """Short name of a weight format as loaded: "bf16", "fp32" for plain weights; "w4a16", "w4a16-asym", "awq-w4a16", "w8a8", "fp8" ..."""
    quantization = parse_quantization(checkpoint.quantization, f"{checkpoint.name}/{checkpoint.quantization_source}")
    names = {_scheme_name(rule.scheme) for rule in quantization.rules} if quantization else set()
    return "+".join(sorted(names)) or PLAIN_FORMATS.get(dtype, dtype)


def _scheme_name(scheme: Scheme) -> str:
    width = "a16" if scheme.activations is None else ""
    for kind in ("nvfp4", "mxfp4"):
        if kind in scheme.format:
            return kind + width
    if "float" in scheme.format or "fp8" in scheme.format:
        return "fp8" + width
    method = next((f"{kind}-" for kind in ("awq", "gptq", "bnb") if kind in scheme.format), "")
    return f"{method}w{scheme.bits}{width or 'a8'}{'' if scheme.symmetric or method else '-asym'}"


def distinct(value: Any, name: str, kind: type, least: float) -> tuple[Any, ...]:
    """One value or several as a tuple.

    Raises:
        DataError: none, equal ones, or one that is no `kind` from `least`.
    """
    from ..errors import DataError

    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    kinds = (int, float) if kind is float else (kind,)
    good = all(isinstance(one, kinds) and not isinstance(one, bool) and float(one) >= least for one in values)  # type: ignore[arg-type]
    if not values or not good or len(set(values)) != len(values):
        what = "whole numbers" if kind is int else "numbers"
        raise DataError(f"{name} is {value!r}; expected distinct {what} from {least:g}, one or several")
    return values

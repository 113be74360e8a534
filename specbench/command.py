"""The command that starts a serving engine on the same pair, with the settings of a plan.

What enters: a plan, or a pair to be resolved, and perhaps a `speculative_config`. What leaves: text to paste, a shell command (vLLM and
SGLang) or Python (TensorRT-LLM), below comment lines that say where the engine cannot express a setting or takes another than the plan has.
It starts no engine and does not know whether one is installed: an engine is a row of `ENGINES`, from its sources and documentation.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .checkpoint.families import look
from .errors import ConfigError
from .pair import Checkpoint, Pair
from .plan import Plan, brief, resolve
from .policies import POLICIES
from .speculative import METHOD, PLAIN, SpeculativeConfig, check_speculative_config, parse_speculative_config

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
EVIDENCE = {"quantization": "layer_quantization"}  # a plan's setting -> the policy's field for it, where they differ


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be written: a plan, what was said in vLLM's words, and k, the proposals a round."""

    plan: Plan
    config: SpeculativeConfig
    k: int

    @property
    def draft(self) -> Checkpoint:
        return self.plan.pair.draft

    @property
    def verifier(self) -> Checkpoint:
        return self.plan.pair.verifier

    @property
    def load_config(self) -> dict[str, Any]:
        return {} if self.config.draft_load_config is None else self.config.draft_load_config.changed()


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine at one version.

    keys: what of a `speculative_config` its options carry, or what may only say what holds there anyway; a comment names the rest. notes:
    each looks at a job and returns a comment, or "". policies: names of `POLICIES` that say what this version does with a draft; a comment
    says where they differ from the plan.
    """

    title: str
    version: str
    write: Callable[[Job, frozenset[str]], str]
    keys: frozenset[str]
    notes: tuple[Callable[[Job], str], ...]
    policies: tuple[str, ...] = ()


def command(
    plan: Plan | Pair,
    engine: str = "vllm",
    num_speculative_tokens: int | None = None,
    *,
    speculative_config: SpeculativeConfig | dict[str, Any] | str | None = None,
) -> str:
    """How `engine` is started on the same pair.

    Args:
        plan: a plan; a pair is resolved under the policy "draft".
        engine: a name in `ENGINES`.
        num_speculative_tokens: k, proposals a round, as a chain; None takes the config's, else 3.
        speculative_config: vLLM's dict, from which settings that concern serving engines only are carried over.

    Raises:
        ConfigError: an unknown engine, k below 1 or said twice differently, or what `parse_speculative_config` and `resolve` raise.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    config = parse_speculative_config(speculative_config)
    if isinstance(plan, Pair):
        plan = resolve(plan, overrides=config.plan_overrides())
    elif config.quantization is not None:
        resolve(plan.pair, overrides=config.plan_overrides())  # raises where the draft's files contradict it
    check_speculative_config(config, plan.pair)
    row, job = ENGINES[engine], Job(plan, config, _tokens(num_speculative_tokens, config.num_speculative_tokens))
    notes = [*_other_than_files(job, row), *_other_than_engine(job, row), *(make(job) for make in row.notes)]
    left = {key: value for key, value in config.to_dict().items() if key not in row.keys}
    notes += [f"speculative_config.{key} {json.dumps(value)} has no equal here: left out" for key, value in left.items()]
    # Notes quote config files; joined to one line they cannot end the comment.
    comments = [f"# note: {' '.join(note.split())}" for note in notes if note]
    return "\n".join([f"# {row.title} {row.version}", *comments, row.write(job, row.keys)])


def _tokens(given: int | None, said: int | None) -> int:
    if given is not None and said not in (None, given):
        raise ConfigError(f"num_speculative_tokens is {given}, speculative_config.num_speculative_tokens is {said}; give one of them")
    k = given if given is not None else said or 3
    if k < 1:
        raise ConfigError(f"num_speculative_tokens is {k}; an engine that speculates takes 1 or more")
    return k


def _vllm(job: Job, keys: frozenset[str]) -> str:
    said: dict[str, Any] = {"method": METHOD, "model": job.draft.name, "num_speculative_tokens": job.k}
    if job.draft.revision:
        said["revision"] = job.draft.revision
    plain = ("quantization", PLAIN[0])  # vLLM has no word for it
    said |= {key: value for key, value in job.config.to_dict().items() if key in keys - set(said) and (key, value) != plain}
    options = [*_option("--revision", job.verifier.revision), *_option("--dtype", job.plan["dtype"])]
    return _shell(["vllm", "serve", job.verifier.name], *options, ["--speculative-config", json.dumps(said)])


def _sglang(job: Job, keys: frozenset[str]) -> str:
    return _shell(
        ["python", "-m", "sglang.launch_server"],
        ["--model-path", job.verifier.name],
        *_option("--revision", job.verifier.revision),
        *_option("--dtype", job.plan["dtype"]),
        ["--speculative-algorithm", "EAGLE3"],
        ["--speculative-draft-model-path", job.draft.name],
        *_option("--speculative-draft-model-revision", job.draft.revision),
        *_option("--speculative-draft-model-quantization", _sglang_quantization(job)),
        *_option("--speculative-draft-load-format", job.load_config.get("load_format")),
        ["--speculative-num-steps", str(job.k)],
        ["--speculative-eagle-topk", "1"],
        ["--speculative-num-draft-tokens", str(job.k + 1)],
    )


def _sglang_quantization(job: Job) -> str | None:
    """Unset would be a copy of --quantization, so a plain draft beside a quantized verifier is said to be plain."""
    if job.draft.quantization is None:
        return PLAIN[1] if job.verifier.quantization else None
    return None if job.config.quantization == PLAIN[0] else job.config.quantization


def _trtllm(job: Job, keys: frozenset[str]) -> str:
    inner = [f"max_draft_len={job.k}", f"speculative_model={job.draft.name!r}"]
    if captured := _captured(job):
        inner.append(f"eagle3_layers_to_capture={{{', '.join(map(str, captured))}}}")
    if job.load_config.get("load_format") == "dummy":
        inner.append("load_format='dummy'")
    outer = [f"model={job.verifier.name!r}"]
    outer += [f"{key}={value!r}" for key, value in (("revision", job.verifier.revision), ("dtype", job.plan["dtype"])) if value]
    lines = ["from tensorrt_llm import LLM", "from tensorrt_llm.llmapi import Eagle3DecodingConfig", "", "llm = LLM("]
    lines += [f"    {item}," for item in outer]
    lines += ["    speculative_config=Eagle3DecodingConfig(", *(f"        {item}," for item in inner), "    ),", ")"]
    return "\n".join(lines)


def _captured(job: Job) -> list[int]:
    """The plan's layers as TensorRT-LLM counts them: what enters layer i has left layer i - 1; -1 is the last state after its norm."""
    last = int(_text(job.verifier)["num_hidden_layers"]) + 1
    layers = list(job.plan["aux_layers"])
    return [] if 0 in layers else [-1 if layer == last else layer - 1 for layer in layers]


def _text(verifier: Checkpoint) -> dict[str, Any]:
    nested = verifier.config.get("text_config")
    return nested if isinstance(nested, dict) else verifier.config


def _option(name: str, value: Any) -> list[list[str]]:
    return [[name, str(value)]] if value else []


def _shell(*groups: list[str]) -> str:
    return " \\\n    ".join(shlex.join(group) for group in groups)


def _other_than_files(job: Job, row: Engine) -> Iterator[str]:
    """What the plan has by override or policy; an engine reads the draft's files."""
    if job.plan.policy.name in row.policies:
        return
    try:
        files = resolve(job.plan.pair)
    except ConfigError as error:
        yield f"without the plan's overrides the files leave open what to do: {error}"
        return
    for name, setting in job.plan.settings.items():
        other = files.settings.get(name)
        if name not in ("checks", "aux_layers", "edge_quantization") and other is not None and other.value != setting.value:
            yield f"no option for {name} {brief(setting.value)} ({setting.source}); the files say {brief(other.value)}"


def _other_than_engine(job: Job, row: Engine) -> Iterator[str]:
    for name in row.policies:
        try:
            theirs = resolve(job.plan.pair, name)
        except ConfigError as error:
            yield f"{row.title} {row.version} has no way to load this pair: {error}"
            continue
        for key, setting in theirs.settings.items():
            ours = job.plan.settings.get(key)
            if key != "checks" and (ours is None or ours.value != setting.value):
                evidence = POLICIES[name].evidence.get(EVIDENCE.get(key, key), setting.source)
                yield f"{key} becomes {brief(setting.value)}, the plan has {brief(ours.value) if ours else 'none'} ({evidence})"


def _aux_vllm(job: Job) -> str:
    layers, n = job.plan["aux_layers"], int(_text(job.verifier)["num_hidden_layers"])
    top, nested = look(job.draft.config, AUX_KEY), look(job.draft.config, f"eagle_config.{AUX_KEY}")
    reads = [tuple(top.value) if top.key else (2, n // 2, n - 3)]  # nested, they are inputs of layers to one runner, nothing to the other
    reads += [tuple(nested.value)] if nested.key and not top.key else []
    if not job.plan["use_fc"] or set(reads) == {layers}:
        return ""
    seen = " or, by its other runner, ".join(map(str, reads))
    return f"vLLM reads layers {seen}; no option sets them: put {AUX_KEY}: {list(layers)} at the top level of the draft's config.json"


def _aux_sglang(job: Job) -> str:
    layers, n = job.plan["aux_layers"], int(_text(job.verifier)["num_hidden_layers"])
    nested, default = look(job.draft.config, f"eagle_config.{AUX_KEY}"), (2, n // 2, n - 3)
    if nested.key:
        shift = "SGLang adds 1 to each, since PR 25454 (May 2026) only where the first is 1"
        return f"the plan has {layers} as inputs of layers, {nested.key} is {nested.value}: {shift}"
    if not job.plan["use_fc"] or layers == default:
        return ""
    return f"SGLang reads these layers from eagle_config.{AUX_KEY} alone and takes {default} without; the plan has {layers}"


def _aux_trtllm(job: Job) -> str:
    missing = "" if _captured(job) else ", and the input of layer 0 has no number"
    return f"eagle3_layers_to_capture counts outputs of layers; the plan's {job.plan['aux_layers']} count inputs{missing}"


def _flat(job: Job) -> str:
    if "transformer_layer_config" not in job.draft.config:
        return ""
    return "this engine reads flat draft configs; here the sizes are in transformer_layer_config: convert the draft first"


def _architecture(job: Job) -> str:
    names = job.draft.config.get("architectures")
    if _flat(job) or names == ["LlamaForCausalLMEagle3"]:
        return ""
    return f"SGLang knows this kind of draft as ['LlamaForCausalLMEagle3']; architectures is {names!r}"


def _residual(job: Job) -> str:
    before = job.plan["norm_before_residual"]
    return "norm_before_residual is true in the plan; this engine computes as if it were false, which costs acceptance" if before else ""


def _embedding(job: Job) -> str:
    own = job.plan["embed_tokens"] == "draft" and job.plan["target_hidden_size"] == job.plan["hidden_size"]
    return "the draft's own embed_tokens is replaced by the verifier's, whose width it has" if own else ""


def _longer(job: Job) -> str:
    own, other = job.plan["max_position_embeddings"], _text(job.verifier).get("max_position_embeddings") or 0
    return f"the draft's max_position_embeddings {own} is raised to the verifier's {other}" if own < other else ""


def _past_end(job: Job) -> str:
    own = job.plan["max_position_embeddings"]
    past = f"past position {own} the draft's rotary table is read beyond its end (issue 48894): add --max-model-len {own}"
    return past if _longer(job) else ""


def _only_format(job: Job) -> str:
    left = [key for key in job.load_config if key != "load_format"]
    return f"no option for draft_load_config's {', '.join(left)}: left out" if left else ""


def _only_dummy(job: Job) -> str:
    left = {key: value for key, value in job.load_config.items() if (key, value) != ("load_format", "dummy")}
    return f"of draft_load_config only load_format 'dummy' has an effect; left out: {', '.join(left)}" if left else ""


def _unpinned(job: Job) -> str:
    return f"no option pins the draft's revision {job.draft.revision}" if job.draft.revision else ""


_COMMON = frozenset({"method", "model", "num_speculative_tokens", "revision", "draft_load_config"})
_HOLDS = frozenset({"draft_tensor_parallel_size", "kv_cache_dtype"})
_VLLM = frozenset(SpeculativeConfig.__dataclass_fields__)
_VLLM_011 = frozenset({
    "method", "model", "num_speculative_tokens", "revision", "quantization", "max_model_len", "code_revision", "enforce_eager",
    "disable_padded_drafter_batch", "draft_tensor_parallel_size",
})  # fmt: skip

ENGINES: dict[str, Engine] = {
    "vllm": Engine("vLLM", "0.32.0", _vllm, _VLLM, (_aux_vllm, _longer)),
    "vllm-0.11.0": Engine("vLLM", "0.11.0", _vllm, _VLLM_011, (_past_end,), ("vllm-0.11.0",)),
    "sglang": Engine(
        "SGLang", "0.5", _sglang, _COMMON | _HOLDS | {"quantization"},
        (_flat, _architecture, _residual, _aux_sglang, _longer, _only_format),
    ),
    "trtllm": Engine(
        "TensorRT-LLM", "1.4.0rc4", _trtllm, _COMMON | _HOLDS, (_flat, _residual, _aux_trtllm, _embedding, _only_dummy, _unpinned)
    ),
}  # fmt: skip

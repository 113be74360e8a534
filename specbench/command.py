"""The command that starts a serving engine on the same pair, with the settings of a plan.

What enters: a plan, or a pair to be resolved, and perhaps a `speculative_config`. What leaves: text to paste, a shell command (vLLM and
SGLang) or Python (TensorRT-LLM), below comment lines that say where the engine cannot express a setting or takes another than the plan has.
It starts no engine and does not know whether one is installed: an engine is a row of `ENGINES`, from its sources and documentation.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .checkpoint.families import look
from .errors import ConfigError
from .pair import Checkpoint, Pair, text_part
from .plan import Plan, brief, resolve
from .policies import POLICIES
from .speculative import METHOD, PLAIN, SpeculativeConfig, check_speculative_config, parse_speculative_config

if TYPE_CHECKING:
    from .checkpoint.load_config import LoadConfig

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
RULE_OF = {"quantization": "layer_quantization", "num_hidden_layers": "layer_count"}  # setting -> its field of a policy, where names differ
# Settings that follow from others, or are no engine's business.
UNSAID = frozenset({
    "checks", "unknown", "quantization_declared", "quantization_requested", "edge_quantization", "load_format", "download_dir", "weights",
})  # fmt: skip
SGLANG_FORMATS = {"hf": "auto"}  # load formats that SGLang has by another name


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
    def load_config(self) -> LoadConfig | None:
        """The draft's own; None where it has none, and the verifier's counts."""
        return self.config.draft_load_config or self.plan.pair.draft_load


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine at one version.

    keys: what of a `speculative_config` its options carry, or what may only say what holds there anyway; a comment names the rest.
    policies: names of `POLICIES` that say what it does with a draft when no option is given. sets: settings of the plan that its options
    or notes carry; for the others, a comment says where the policies differ from the plan. notes: each looks at a job and returns a comment
    or "".
    """

    title: str
    version: str
    write: Callable[[Job, frozenset[str]], str]
    keys: frozenset[str]
    policies: tuple[str, ...]
    notes: tuple[Callable[[Job], str], ...]
    sets: frozenset[str] = frozenset()


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
        speculative_config: vLLM's dict, from which settings that concern serving engines only are carried over; None takes the one that
            the pair was opened with.

    Raises:
        ConfigError: an unknown engine, k below 1 or said twice differently, or what `parse_speculative_config` and `resolve` raise.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    pair = plan if isinstance(plan, Pair) else plan.pair
    config = pair.speculative if speculative_config is None else parse_speculative_config(speculative_config)
    if isinstance(plan, Pair):
        plan = resolve(plan, overrides=config.plan_overrides())
    elif config.quantization is not None:
        resolve(plan.pair, overrides=config.plan_overrides())  # raises where the draft's files contradict it
    check_speculative_config(config, pair)
    row, job = ENGINES[engine], Job(plan, config, _tokens(num_speculative_tokens, config.num_speculative_tokens))
    notes = [*dict.fromkeys(_differences(job, row)), *(make(job) for make in row.notes)]
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
    config = replace(job.config, draft_load_config=job.load_config)
    plain = ("quantization", PLAIN[0])  # vLLM has no word for it
    said |= {key: value for key, value in config.to_dict().items() if key in keys - set(said) and (key, value) != plain}
    return _shell(["vllm", "serve", job.verifier.name], *_verifier_options(job, {}), ["--speculative-config", json.dumps(said)])


def _sglang(job: Job, keys: frozenset[str]) -> str:
    draft_format = job.load_config.load_format if job.load_config else ""
    return _shell(
        ["python", "-m", "sglang.launch_server"],
        ["--model-path", job.verifier.name],
        *_verifier_options(job, SGLANG_FORMATS),
        ["--speculative-algorithm", "EAGLE3"],
        ["--speculative-draft-model-path", job.draft.name],
        *_option("--speculative-draft-model-revision", job.draft.revision),
        *_option("--speculative-draft-model-quantization", _sglang_quantization(job)),
        *_option("--speculative-draft-load-format", SGLANG_FORMATS.get(draft_format, draft_format)),
        ["--speculative-num-steps", str(job.k)],
        ["--speculative-eagle-topk", "1"],
        ["--speculative-num-draft-tokens", str(job.k + 1)],
    )


def _verifier_options(job: Job, formats: dict[str, str]) -> list[list[str]]:
    """Options that vLLM and SGLang spell alike; formats: load formats that have another name."""
    load = job.plan.pair.verifier_load
    load_format = formats.get(load.load_format, load.load_format)
    return [
        *_option("--revision", job.verifier.revision),
        *_option("--dtype", job.plan["dtype"]),
        *_option("--load-format", None if load_format == "auto" else load_format),
        *_option("--download-dir", load.download_dir),
    ]


def _sglang_quantization(job: Job) -> str | None:
    """Unset would be a copy of --quantization, so a plain draft beside a quantized verifier is said to be plain."""
    if job.draft.quantization is None:
        return PLAIN[1] if job.verifier.quantization else None
    return None if job.config.quantization == PLAIN[0] else job.config.quantization


def _trtllm(job: Job, keys: frozenset[str]) -> str:
    inner = [f"max_draft_len={job.k}", f"speculative_model={job.draft.name!r}"]
    if captured := _captured(job):
        inner.append(f"eagle3_layers_to_capture={{{', '.join(map(str, captured))}}}")
    if job.load_config and job.load_config.load_format == "dummy":
        inner.append("load_format='dummy'")
    outer = [f"model={job.verifier.name!r}"]
    outer += [f"{key}={value!r}" for key, value in (("revision", job.verifier.revision), ("dtype", job.plan["dtype"])) if value]
    lines = ["from tensorrt_llm import LLM", "from tensorrt_llm.llmapi import Eagle3DecodingConfig", "", "llm = LLM("]
    lines += [f"    {item}," for item in outer]
    lines += ["    speculative_config=Eagle3DecodingConfig(", *(f"        {item}," for item in inner), "    ),", ")"]
    return "\n".join(lines)


def _captured(job: Job) -> list[int]:
    """The plan's layers as TensorRT-LLM counts them: what enters layer i has left layer i - 1; -1 is the last state after its norm."""
    last = int(text_part(job.verifier.config)["num_hidden_layers"]) + 1
    layers = list(job.plan["aux_layers"])
    return [] if 0 in layers else [-1 if layer == last else layer - 1 for layer in layers]


def _option(name: str, value: Any) -> list[list[str]]:
    return [[name, str(value)]] if value else []


def _shell(*groups: list[str]) -> str:
    return " \\\n    ".join(shlex.join(group) for group in groups)


def _differences(job: Job, row: Engine) -> Iterator[str]:
    """Where the plan (by its policy, or by what was asked for) is not what the engine does with the same files."""
    files = replace(job.plan.pair, speculative=SpeculativeConfig())
    for policy in row.policies:
        try:
            theirs = resolve(files, policy).settings
        except ConfigError as error:
            yield f"{row.title} {row.version} cannot load this pair as its files are: {error}"
            continue
        for name, ours in job.plan.settings.items():
            other = theirs.get(name)
            if other is None or other.value == ours.value or name in UNSAID | row.sets:
                continue
            why = POLICIES[policy].evidence.get(RULE_OF.get(name, name), other.source)
            yield f"{name} becomes {brief(other.value)}, the plan has {brief(ours.value)} ({why}){_remedy(name, ours.value, policy)}"


def _remedy(name: str, value: Any, policy: str) -> str:
    if name == "aux_layers" and POLICIES[policy].aux_layers in ("config-unshifted", "top-level-unshifted"):
        return f"; to set it, put {AUX_KEY}: {list(value)} at the top level of the draft's config.json"
    return ""


def _aux_sglang(job: Job) -> str:
    layers, n = job.plan["aux_layers"], int(text_part(job.verifier.config)["num_hidden_layers"])
    ids = look(job.draft.config, f"eagle_config.{AUX_KEY}").value or []
    reads = tuple(i + (ids[0] == 1) for i in ids) or (2, n // 2, n - 3)
    if job.plan["use_fc"] and reads != layers:
        rule = f"reads {AUX_KEY} in eagle_config alone, plus 1 where the first is 1"
        return f"aux_layers becomes {reads}, the plan has {layers}: SGLang {rule}"
    return f"before PR 25454 (May 2026) SGLang added 1 to each of eagle_config's {ids}" if ids and ids[0] != 1 else ""


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
    own, other = job.plan["max_position_embeddings"], text_part(job.verifier.config).get("max_position_embeddings") or 0
    return f"the draft's max_position_embeddings {own} is raised to the verifier's {other}" if own < other else ""


def _past_end(job: Job) -> str:
    own = job.plan["max_position_embeddings"]
    past = f"past position {own} the draft's rotary table is read beyond its end (issue 48894): add --max-model-len {own}"
    return past if _longer(job) else ""


def _only_format(job: Job) -> str:
    left = [key for key in (job.load_config.changed() if job.load_config else ()) if key != "load_format"]
    return f"no option for draft_load_config's {', '.join(left)}: left out" if left else ""


def _only_dummy(job: Job) -> str:
    said = job.load_config.changed() if job.load_config else {}
    left = [key for key, value in said.items() if (key, value) != ("load_format", "dummy")]
    return f"of draft_load_config only load_format 'dummy' has an effect; left out: {', '.join(left)}" if left else ""


def _verifier_load(job: Job, carried: tuple[str, ...] = ("load_format", "download_dir")) -> str:
    left = [key for key in job.plan.pair.verifier_load.changed() if key not in carried]
    return f"of the verifier's load config {', '.join(left)} is left out" if left else ""


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
    "vllm": Engine("vLLM", "0.32.0", _vllm, _VLLM, ("vllm-0.32.0", "vllm-0.32.0-mrv2"), (_longer, _verifier_load)),
    "vllm-0.11.0": Engine("vLLM", "0.11.0", _vllm, _VLLM_011, ("vllm-0.11.0",), (_past_end, _verifier_load)),
    "sglang": Engine(
        "SGLang", "0.5", _sglang, _COMMON | _HOLDS | {"quantization"}, ("sglang",),
        (_flat, _architecture, _aux_sglang, _longer, _only_format, _verifier_load), frozenset({"aux_layers"}),
    ),
    "trtllm": Engine(
        "TensorRT-LLM", "1.4.0rc4", _trtllm, _COMMON | _HOLDS, ("draft",),
        (_flat, _residual, _aux_trtllm, _embedding, _only_dummy, _unpinned, partial(_verifier_load, carried=())), frozenset({"aux_layers"}),
    ),
}  # fmt: skip

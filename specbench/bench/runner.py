"""Run prompts at several k through the same loop in the same run, and keep every count and time.

What enters: a pair, prompts, values of k. What leaves: a table of rows, in memory and in a run folder that fills as the run goes. It
derives no figure; it does not know how decoding works.

Machine noise must hit every k alike, so all of them (and transformers' own loop, where asked for) take turns on each prompt, in an order
that rotates from prompt to prompt. One short warm-up of each is not recorded. Clocks are synchronised by the loops themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, SpecbenchError
from ..pair import Checkpoint, Pair, open_checkpoint
from ..quant.scheme import Scheme, parse_quantization
from .prompts import Prompt, as_prompts, prompt_set_hash
from .provenance import provenance
from .records import Recorder, Row, new_run
from .session import runs_root

if TYPE_CHECKING:
    import pandas as pd

    from ..policies import Policy

WARM_UP_TOKENS = 16
PLAIN_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding that is measured.

    facts: the `Row` fields that all of its rows share. decode: token ids and a limit of new tokens -> the `Row` fields that it measured.
    """

    facts: dict[str, Any]
    decode: Callable[[list[int], int], dict[str, Any]]


def benchmark(
    pair: Pair,
    prompts: str | Path | Sequence[Prompt | str] | None = None,
    k: int | Sequence[int] = (0, 1, 3, 5),
    *,
    repeats: int = 1,
    max_new_tokens: int = 128,
    device: str = "auto",
    dtype: str = "auto",
    policy: str | Policy = "draft",
    packed: bool = True,
    baseline: Checkpoint | None = None,
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Decode every prompt greedily at every k and return one row per prompt turn, k and repeat (columns: `records.Row`).

    Args:
        prompts: see `prompts.as_prompts`; None is the shipped set.
        k: numbers of speculative tokens. Keep 0 among them: it is the baseline of every speedup.
        repeats: of everything, for the spread of times; counts repeat exactly.
        max_new_tokens: per turn; EOS ends a turn sooner.
        device, dtype, policy, packed: see `load.load_draft`.
        baseline: a checkpoint with the verifier's tokenizer, to decode with transformers' own `generate` in the same run (rows with engine
            "transformers" and k 0).
        run_dir: folder to fill, new or without an earlier run; None makes one (`records.new_run`) under `session.runs_root()`.
        progress: show a bar.

    Raises:
        DataError: a k, limit or repeat count that cannot be, or a folder that holds a run.
        SpecbenchError: the pair does not load. Prompts that fail are rows with status "failed" instead.
    """
    asked, ks = as_prompts(prompts), _check_counts(k, repeats, max_new_tokens)
    parameters = {
        "prompts": _prompt_source(prompts), "k": ks, "repeats": repeats, "max_new_tokens": max_new_tokens, "device": device,
        "dtype": dtype, "packed": packed, "policy": str(getattr(policy, "name", policy)), "temperature": 0.0, "ignore_eos": False,
        "warm_up_tokens": WARM_UP_TOKENS,
    }  # fmt: skip
    checkpoints = {"verifier": pair.verifier, "draft": pair.draft} | ({"baseline": baseline} if baseline else {})
    with Recorder(_folder(run_dir), provenance(parameters, checkpoints, asked)) as recorder:
        from ..load import load_draft
        from ..text import load_tokenizer
        from ..verifier import load_verifier

        verifier = load_verifier(pair, device=device, dtype=dtype, packed=packed)
        draft = load_draft(pair, policy, device=device, dtype=dtype, verifier=verifier, packed=packed) if any(ks) else None
        tokenizer = load_tokenizer(verifier)
        facts = {
            "engine": "specbench", "verifier": pair.verifier.name, "draft": pair.draft.name, "policy": parameters["policy"],
            **_model_facts(pair.verifier, verifier),
        }  # fmt: skip
        arms = [Arm({**facts, "k": value}, _speculative(verifier, draft, tokenizer, value)) for value in ks]
        if baseline is not None:
            arms.append(_transformers_arm(baseline, str(verifier.device), dtype))
        _measure(arms, asked, tokenizer, repeats, max_new_tokens, recorder, progress)
    return recorder.frame()


def transformers_baseline(
    path: str | Path,
    prompts: str | Path | Sequence[Prompt | str] | None = None,
    max_new_tokens: int = 128,
    *,
    repeats: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The same prompts through transformers' own greedy `generate`: rows of the same schema with engine "transformers" and k 0.

    A run of its own: to compare speeds, `benchmark(..., baseline=)` measures it in turns with the rest.

    Args:
        path: checkpoint folder or hub id of a causal language model; the rest as in `benchmark`.
    """
    checkpoint = open_checkpoint(path)
    asked, _ = as_prompts(prompts), _check_counts(0, repeats, max_new_tokens)
    parameters = {
        "engine": "transformers", "prompts": _prompt_source(prompts), "repeats": repeats, "max_new_tokens": max_new_tokens,
        "device": device, "dtype": dtype, "temperature": 0.0, "ignore_eos": False, "warm_up_tokens": WARM_UP_TOKENS,
    }  # fmt: skip
    with Recorder(_folder(run_dir), provenance(parameters, {"verifier": checkpoint}, asked)) as recorder:
        from transformers import AutoTokenizer

        arm = _transformers_arm(checkpoint, device, dtype)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
        _measure([arm], asked, tokenizer, repeats, max_new_tokens, recorder, progress)
    return recorder.frame()


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


def _speculative(verifier: Any, draft: Any, tokenizer: Any, k: int) -> Callable[[list[int], int], dict[str, Any]]:
    from ..text import generate

    def decode(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        models = verifier, draft if k else None
        one = generate(*models, [ids], num_speculative_tokens=k, max_new_tokens=max_new_tokens, tokenizer=tokenizer)[0]
        names = ("prefill_s", "verify_s", "other_s", "decode_s", "total_s")
        return {
            "accepted_per_round": one.accepted_per_round, "proposed_per_round": one.proposed_per_round, "token_ids": one.token_ids,
            "finish_reason": one.finish_reason, "draft_s": one.timing.draft_prefill_s + one.timing.draft_s,
            **{name: getattr(one.timing, name) for name in names},
        }  # fmt: skip

    return decode


def _transformers_arm(checkpoint: Checkpoint, device: str, dtype: str) -> Arm:
    from .baseline import TransformersLoop

    loop = TransformersLoop(checkpoint, device, dtype)
    facts = {"engine": "transformers", "verifier": checkpoint.name, "draft": "", "policy": "", "k": 0}
    return Arm(facts | _model_facts(checkpoint, loop.model), loop.decode)


def _model_facts(checkpoint: Checkpoint, model: Any) -> dict[str, Any]:
    import torch

    dtype = str(model.dtype).removeprefix("torch.")
    place = {"device": str(model.device), "threads": torch.get_num_threads()}
    return {"verifier_format": format_name(checkpoint, dtype), "dtype": dtype, **place}


def _measure(
    arms: Sequence[Arm], prompts: Sequence[Prompt], tokenizer: Any, repeats: int, max_new_tokens: int, recorder: Recorder, progress: bool
) -> None:
    from tqdm.auto import tqdm

    for arm in arms:
        arm.decode(conversation_ids(tokenizer, ("Hello",), ()), WARM_UP_TOKENS)
    common = {"run_id": recorder.run_id, "max_new_tokens": max_new_tokens, "prompt_set_hash": prompt_set_hash(prompts)}
    turns = sum(len(prompt.turns) for prompt in prompts)
    with tqdm(total=repeats * turns * len(arms), desc="benchmark", unit="output", disable=not progress) as bar:
        for repeat in range(repeats):
            for place, prompt in enumerate(prompts):
                shift = (place + repeat) % len(arms)
                order = [*arms[shift:], *arms[:shift]]
                rows = _ask(prompt, order, tokenizer, {**common, "repeat": repeat}, bar)
                recorder.add(rows)


def _ask(prompt: Prompt, arms: Sequence[Arm], tokenizer: Any, common: dict[str, Any], bar: Any) -> list[Row]:
    """All turns of a prompt by every arm. All arms read the same history: the answers of the smallest k that has one."""
    rows: list[Row] = []
    answers: list[str] = []
    for turn in range(len(prompt.turns)):
        facts = {**common, "question_id": prompt.question_id, "category": prompt.category, "turn": turn}
        asked: list[Row] = []
        for arm in arms:
            if len(answers) < turn:
                asked.append(_failed(arm, facts, f"turn {len(answers)} has no answer to go on from"))
            else:
                asked.append(_answer(arm, conversation_ids(tokenizer, prompt.turns[: turn + 1], answers), facts))
            bar.update()
        ok = [row for row in asked if row.status == "ok"]
        if ok:
            first = min(ok, key=lambda row: (row.k, row.engine))
            answers.append(tokenizer.decode(first.token_ids, skip_special_tokens=True))
        rows += sorted(asked, key=lambda row: (row.engine, row.k))
    return rows


def _answer(arm: Arm, ids: list[int], facts: dict[str, Any]) -> Row:
    try:
        measured = arm.decode(ids, facts["max_new_tokens"])
    except (SpecbenchError, RuntimeError) as error:  # out of memory is a RuntimeError; a mistake in this program is not caught
        return _failed(arm, facts, f"{type(error).__name__}: {error}", len(ids))
    counts: dict[str, Any] = {"num_prompt_tokens": len(ids), "num_output_tokens": len(measured["token_ids"])}
    return Row(**facts, **arm.facts, **measured, **counts, status="ok")


def _failed(arm: Arm, facts: dict[str, Any], reason: str, num_prompt_tokens: int | None = None) -> Row:
    empty: dict[str, Any] = {"accepted_per_round": [], "proposed_per_round": [], "token_ids": []}
    return Row(**facts, **arm.facts, **empty, status="failed", error=reason, num_prompt_tokens=num_prompt_tokens)


def conversation_ids(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Token ids of a conversation that ends with a user turn, through the chat template; plain lines where there is none."""
    from ..text import encode

    if len(turns) == 1:
        return encode(tokenizer, turns[0])
    if not getattr(tokenizer, "chat_template", None):
        return encode(tokenizer, "\n".join(text for pair in zip(turns, [*answers, ""], strict=True) for text in pair))
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _check_counts(k: int | Sequence[int], repeats: int, max_new_tokens: int) -> list[int]:
    ks = [k] if isinstance(k, int) else list(k)
    if not ks or len(set(ks)) != len(ks) or any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in ks):
        raise DataError(f"k is {k!r}; expected distinct whole numbers from 0, such as (0, 1, 3, 5)")
    if repeats < 1 or max_new_tokens < 1:
        raise DataError(f"repeats is {repeats} and max_new_tokens {max_new_tokens}; expected at least 1 of each")
    return ks


def _prompt_source(prompts: Any) -> str:
    return "specbench" if prompts is None else str(prompts) if isinstance(prompts, str | Path) else "given by the caller"


def _folder(run_dir: str | Path | None) -> Path:
    return Path(run_dir) if run_dir is not None else new_run(runs_root(), "benchmark")

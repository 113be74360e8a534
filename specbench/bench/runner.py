"""Run prompts under several ways of decoding in the same run, and keep every count and time.

What enters: a pair, prompts, values of k and whatever else is varied. What leaves: a table of rows, in memory and in a run folder that
fills as the run goes. It derives no figure; it does not know how decoding works.

Machine noise must hit every way alike, so all of them (and transformers' own loop, where asked for) take turns on the same few prompts, in
an order that rotates. One short warm-up of each is not recorded. Clocks are synchronised by the loops themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decode.request import Sampling
from ..errors import DataError, SpecbenchError
from ..pair import Checkpoint, Pair, open_checkpoint
from .arms import Arm, DraftSampling, TreeShape, Variants, distinct, model_facts, specbench_arms, transformers_arms
from .memory import PeakMemory
from .prompts import Prompt, PromptSet, as_prompts, prompt_set_hash
from .provenance import provenance
from .records import Recorder, Row, new_run
from .session import runs_root

if TYPE_CHECKING:
    import pandas as pd

    from ..policies import Policy

WARM_UP_TOKENS = 16
SEED_STEP = 1_000_003  # between the seeds of repeats; those of prompts and turns lie between
TURN_STEP = 100_003


def benchmark(
    pair: Pair,
    prompts: str | Path | Sequence[Prompt | str] | None = None,
    k: int | Sequence[int] = (0, 1, 3, 5),
    *,
    adaptive: int | Sequence[int] = (),
    draft_p_min: float | Sequence[float] = 0.0,
    trees: Sequence[TreeShape] = (),
    batch_size: int | Sequence[int] = 1,
    temperature: float | Sequence[float] = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    draft_sampling: DraftSampling = "greedy",
    repeats: int = 1,
    max_new_tokens: int = 128,
    device: str = "auto",
    dtype: str = "auto",
    policy: str | Policy = "draft",
    packed: bool = True,
    baseline: Checkpoint | None = None,
    prompt_lookup: int = 0,
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Decode every prompt under every combination and return one row per prompt turn, combination and repeat (columns: `schema.Row`).

    Args:
        prompts: see `prompts.as_prompts`; None is the shipped set.
        k: numbers of speculative tokens. Keep 0 among them: it is the baseline of every speedup.
        adaptive: greatest k, one or several, of chains whose length is chosen for each round, besides the chains of `k`.
        draft_p_min: where chains end early (see `text.stream`), one or several; 0 is nowhere. Every chain is run with each.
        trees: draft trees (depth, top_k, nodes) besides them.
        batch_size: sequences decoded together, one number or several; prompts are batched in their order.
        temperature: 0 is greedy; one or several. top_k, top_p, min_p, draft_sampling: see `text.stream`; they count where it is above 0.
        repetition_penalty, presence_penalty, frequency_penalty: see `decode.request.Sampling`; greedy decoding heeds them too.
        seed: of the sampling; each prompt, turn and repeat has its own, the same for every k and batch size.
        repeats: of everything, for the spread of times; greedy counts repeat exactly.
        max_new_tokens: per turn; EOS ends a turn sooner.
        device, dtype, policy, packed: see `load.load_draft`.
        baseline: a checkpoint with the verifier's tokenizer, to decode with transformers' own greedy `generate` in the same run (rows with
            engine "transformers" and k 0).
        prompt_lookup: with a `baseline`, decode also with transformers' own assisted decoding, prompt lookup of at most so many tokens
            (rows with engine "transformers", proposer "prompt lookup" and that k); 0 leaves it out.
        run_dir: folder to fill, new or without an earlier run; None makes one (`records.new_run`) under `session.runs_root()`.
        progress: show a bar.

    Raises:
        DataError: a number that cannot be, penalties beside a baseline that has none, or a folder that holds a run.
        ConfigError: sampling settings that cannot be.
        SpecbenchError: the pair does not load. Prompts that fail are rows with status "failed" instead.
    """
    asked = as_prompts(prompts)
    _check_counts(repeats, max_new_tokens, prompt_lookup, baseline)
    sampling = Sampling(0.0, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty)
    if baseline is not None and sampling.penalised:
        raise DataError("transformers' baseline is plain greedy decoding; penalties would compare other texts: leave one of the two out")
    variants = Variants(
        distinct(k, "k", int, 0), distinct(adaptive, "adaptive", int, 1) if adaptive not in ((), []) else (),
        tuple((depth, width, nodes) for depth, width, nodes in trees), distinct(batch_size, "batch_size", int, 1),
        distinct(temperature, "temperature", float, 0), sampling, draft_sampling,
        distinct(draft_p_min, "draft_p_min", float, 0),
    )  # fmt: skip
    parameters = {
        "prompts": _prompt_source(prompts), "k": variants.k, "adaptive": variants.adaptive, "draft_p_min": variants.p_min,
        "trees": variants.trees, "batch_size": variants.batch_sizes, "temperature": variants.temperatures,
        "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "seed": seed, "draft_sampling": draft_sampling, "repeats": repeats, "max_new_tokens": max_new_tokens, "device": device,
        "dtype": dtype, "packed": packed, "policy": str(getattr(policy, "name", policy)), "ignore_eos": False,
        "warm_up_tokens": WARM_UP_TOKENS, "prompt_lookup": prompt_lookup,
    }  # fmt: skip
    checkpoints = {"verifier": pair.verifier, "draft": pair.draft} | ({"baseline": baseline} if baseline else {})
    with Recorder(_folder(run_dir), provenance(parameters, checkpoints, asked)) as recorder:
        from ..load import load_draft
        from ..text import load_tokenizer
        from ..verifier import load_verifier

        verifier = load_verifier(pair, device=device, dtype=dtype, packed=packed)
        drafting = any(shape.k for shape in variants.shapes())
        draft = load_draft(pair, policy, device=device, dtype=dtype, verifier=verifier, packed=packed) if drafting else None
        tokenizer = load_tokenizer(verifier)
        facts = {
            "engine": "specbench", "verifier": pair.verifier.name, "draft": pair.draft.name, "policy": parameters["policy"],
            **model_facts(pair.verifier, verifier),
        }  # fmt: skip
        arms = specbench_arms(verifier, draft, tokenizer, facts, variants)
        if baseline is not None:
            arms += transformers_arms(baseline, str(verifier.device), dtype, prompt_lookup)
        _measure(arms, asked, tokenizer, repeats, max_new_tokens, seed, recorder, progress)
    return recorder.frame()


def transformers_baseline(
    path: str | Path,
    prompts: str | Path | Sequence[Prompt | str] | None = None,
    max_new_tokens: int = 128,
    *,
    repeats: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    prompt_lookup: int = 0,
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The same prompts through transformers' own greedy `generate`: rows of the same schema with engine "transformers" and k 0.

    A run of its own: to compare speeds, `benchmark(..., baseline=)` measures it in turns with the rest.

    Args:
        path: checkpoint folder or hub id of a causal language model; the rest as in `benchmark`.
    """
    checkpoint = open_checkpoint(path)
    asked = as_prompts(prompts)
    _check_counts(repeats, max_new_tokens, prompt_lookup, checkpoint)
    parameters = {
        "engine": "transformers", "prompts": _prompt_source(prompts), "repeats": repeats, "max_new_tokens": max_new_tokens,
        "device": device, "dtype": dtype, "temperature": 0.0, "ignore_eos": False, "warm_up_tokens": WARM_UP_TOKENS,
        "prompt_lookup": prompt_lookup,
    }  # fmt: skip
    with Recorder(_folder(run_dir), provenance(parameters, {"verifier": checkpoint}, asked)) as recorder:
        from transformers import AutoTokenizer

        arms = transformers_arms(checkpoint, device, dtype, prompt_lookup)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
        _measure(arms, asked, tokenizer, repeats, max_new_tokens, 0, recorder, progress)
    return recorder.frame()


def _measure(
    arms: Sequence[Arm], prompts: PromptSet, tokenizer: Any, repeats: int, limit: int, seed: int, recorder: Recorder, progress: bool
) -> None:
    from tqdm.auto import tqdm

    for arm in arms:
        hello = conversation_ids(tokenizer, ("Hello",), ())
        arm.decode([hello] * arm.batch_size, WARM_UP_TOKENS, [seed] * arm.batch_size)
    common = {
        "run_id": recorder.run_id, "max_new_tokens": limit, "prompt_set": prompts.name, "prompt_set_hash": prompt_set_hash(prompts),
    }  # fmt: skip
    size = max(arm.batch_size for arm in arms)
    chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    turns = sum(len(prompt.turns) for prompt in prompts)
    numbers = itertools.count()
    with tqdm(total=repeats * turns * len(arms), desc="benchmark", unit="output", disable=not progress) as bar:
        for repeat in range(repeats):
            for place, chunk in enumerate(chunks):
                shift = (place + repeat) % len(arms)
                order = [*arms[shift:], *arms[:shift]]
                facts = {**common, "repeat": repeat}
                recorder.add(_ask(chunk, order, list(arms), tokenizer, facts, seed + repeat * SEED_STEP, numbers, bar))


def _ask(
    prompts: Sequence[Prompt], arms: Sequence[Arm], sorting: list[Arm], tokenizer: Any, common: dict[str, Any], seed: int,
    numbers: Iterator[int], bar: Any,
) -> list[Row]:  # fmt: skip
    """All turns of some prompts by every arm. All arms read the same history: the answers of the first arm that has one."""
    rows: dict[tuple[int, int, int], Row] = {}  # by prompt, turn, arm
    answers: list[list[str]] = [[] for _ in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        for arm in arms:
            asked = []
            for i, prompt in enumerate(prompts):
                if turn >= len(prompt.turns):
                    continue
                facts = {**common, **arm.facts, "question_id": prompt.question_id, "category": prompt.category, "turn": turn}
                key = (i, turn, sorting.index(arm))
                if len(answers[i]) < turn:
                    rows[key] = _failed(facts, f"turn {len(answers[i])} has no answer to go on from")
                    bar.update()
                    continue
                ids = conversation_ids(tokenizer, prompt.turns[: turn + 1], answers[i])
                asked.append((key, ids, facts, (seed + prompt.question_id + turn * TURN_STEP) % 2**63))
            for start in range(0, len(asked), arm.batch_size):
                batch = asked[start : start + arm.batch_size]
                found = _answer(arm, [(ids, facts, one) for _, ids, facts, one in batch], next(numbers))
                rows |= dict(zip([key for key, *_ in batch], found, strict=True))
                bar.update(len(batch))
        for i, prompt in enumerate(prompts):
            ok = [rows[i, turn, a] for a in range(len(sorting)) if (i, turn, a) in rows and rows[i, turn, a].status == "ok"]
            if turn < len(prompt.turns) and ok:
                answers[i].append(tokenizer.decode(ok[0].token_ids, skip_special_tokens=True))
    return [rows[key] for key in sorted(rows)]


def _answer(arm: Arm, asked: Sequence[tuple[list[int], dict[str, Any], int]], number: int) -> list[Row]:
    """One batch. A prompt that leaves no room fails alone; what stops the batch fails all of it."""
    fits = [len(ids) < arm.context for ids, _, _ in asked]
    rows: list[Row] = []
    memory = PeakMemory(arm.facts["device"])
    measured: Iterator[dict[str, Any]] = iter(())
    stopped = ""
    good = [entry for entry, fit in zip(asked, fits, strict=True) if fit]
    if good:
        try:
            measured = iter(arm.decode([ids for ids, _, _ in good], good[0][1]["max_new_tokens"], [seed for _, _, seed in good]))
        except (SpecbenchError, RuntimeError) as error:  # out of memory is a RuntimeError; a mistake in this program is not caught
            stopped = f"{type(error).__name__}: {error}" + (f" (in a batch of {len(good)})" if len(good) > 1 else "")
    peak = memory.bytes()
    for (ids, facts, _), fit in zip(asked, fits, strict=True):
        if not fit or stopped:
            reason = stopped if fit else f"the prompt has {len(ids)} tokens and the verifier's context {arm.context}; nothing can follow"
            rows.append(_failed({**facts, "batch": number}, reason, len(ids)))
        else:
            values = next(measured)
            counts: dict[str, Any] = {"num_prompt_tokens": len(ids), "num_output_tokens": len(values["token_ids"])}
            rows.append(Row(**facts, **values, **counts, batch=number, peak_memory_bytes=peak, status="ok"))
    return rows


def _failed(facts: dict[str, Any], reason: str, num_prompt_tokens: int | None = None) -> Row:
    empty: dict[str, Any] = {"accepted_per_round": [], "proposed_per_round": [], "token_ids": []}
    return Row(**facts, **empty, status="failed", error=reason, num_prompt_tokens=num_prompt_tokens)


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


def _check_counts(repeats: int, max_new_tokens: int, prompt_lookup: int, baseline: Checkpoint | None) -> None:
    if repeats < 1 or max_new_tokens < 1:
        raise DataError(f"repeats is {repeats} and max_new_tokens {max_new_tokens}; expected at least 1 of each")
    if prompt_lookup < 0 or (prompt_lookup and baseline is None):
        raise DataError(f"prompt_lookup is {prompt_lookup} and baseline {baseline}; expected at least 0, and a baseline where it is not 0")


def _prompt_source(prompts: Any) -> str:
    return "specbench" if prompts is None else str(prompts) if isinstance(prompts, str | Path) else "given by the caller"


def _folder(run_dir: str | Path | None) -> Path:
    return Path(run_dir) if run_dir is not None else new_run(runs_root(), "benchmark")

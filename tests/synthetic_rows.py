"""Rows as a benchmark would leave them, drawn from a seeded cost and acceptance model: for tests of tables and figures only."""
import numpy as np

from specbench.bench.prompts import load_prompts, prompt_set_hash
from specbench.bench.records import Row, to_frame

RATES = {"bf16": (0.62, 0.55, 0.50, 0.46, 0.42), "w4a16": (0.60, 0.54, 0.48, 0.45, 0.40)}
STEP_S = {"bf16": 0.042, "w4a16": 0.024}
EASY = {"coding": 0.12, "math": 0.10, "extraction": 0.08, "roleplay": -0.08, "writing": -0.06}


def synthetic_rows(verifier_format="bf16", ks=(0, 1, 3, 5), prompts=None, repeats=1, max_new_tokens=64, seed=0, run_id=None):
    """Rows of one run: chains with conditional rates `RATES` (higher for easy categories), noisy times, one failure at the largest k."""
    rng = np.random.default_rng(seed)
    prompts = load_prompts() if prompts is None else prompts
    rows = []
    for prompt in prompts:
        for repeat in range(repeats):
            for k in ks:
                common = {
                    "run_id": run_id or f"run-{verifier_format}", "engine": "specbench", "verifier": "SmolLM2-135M-Instruct",
                    "verifier_format": verifier_format, "draft": "data/draft", "policy": "draft",
                    "proposer": "eagle3" if k else "", "k": k, "dtype": "bfloat16",
                    "device": "cpu", "threads": 2, "max_new_tokens": max_new_tokens, "prompt_set_hash": prompt_set_hash(prompts),
                    "question_id": prompt.question_id, "turn": 0, "category": prompt.category, "repeat": repeat,
                }  # fmt: skip
                if prompt is prompts[-1] and k == max(ks) and len(prompts) > 1:
                    lists = {"accepted_per_round": [], "proposed_per_round": [], "token_ids": []}
                    rows.append(Row(**common, **lists, status="failed", error="RuntimeError: out of memory"))
                    continue
                accepted, proposed, tokens = [], [], 1
                while tokens < max_new_tokens:
                    count = min(k, max_new_tokens - tokens - 1)
                    hits = 0
                    while hits < count and rng.random() < RATES[verifier_format][hits] + EASY.get(prompt.category, 0.0):
                        hits += 1
                    accepted.append(hits)
                    proposed.append(count)
                    tokens += hits + 1
                step = STEP_S[verifier_format] * rng.lognormal(0, 0.04)
                draft_s = sum(proposed) * 0.0035
                verify_s = sum(step * (1 + 0.06 * count) for count in proposed)
                other_s = 0.0004 * len(proposed)
                decode_s = draft_s + verify_s + other_s
                rows.append(
                    Row(
                        **common, status="ok", finish_reason="length", num_prompt_tokens=40, num_output_tokens=tokens,
                        accepted_per_round=accepted, proposed_per_round=proposed, nodes_per_round=proposed,
                        token_ids=list(range(tokens)), prefill_s=0.1, draft_s=draft_s, verify_s=verify_s,
                        other_s=other_s, decode_s=decode_s, total_s=0.1 + decode_s,
                    )  # fmt: skip
                )
    return rows


def synthetic_table(**kwargs):
    """Both verifier formats, each a run of its own."""
    return to_frame([row for seed, name in enumerate(RATES) for row in synthetic_rows(name, seed=seed, **kwargs)])

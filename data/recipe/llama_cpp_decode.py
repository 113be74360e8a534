"""Acceptance of a draft in llama.cpp on the CPU, to set beside ours. It needs a `llama-server` (one that knows `draft-eagle3`: 2026-06 or
later) and verifier and draft as GGUF, from llama.cpp's `convert_hf_to_gguf.py` (the draft with `--target-model-dir VERIFIER`).

What enters: the server's path, two GGUF files, a prompt file, how many of its prompts (evenly spread). What leaves: a JSON file with
llama.cpp's counters and token ids, which `engine_follow.py` reads. Of this project it uses the tokenizer alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import AutoTokenizer

from specbench.bundled import bundled_verifier
from specbench.text import encode

WAIT = 120  # seconds for the server to come up


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until the server answers; SystemExit if it ends before, or takes longer than `WAIT`."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit(f"llama-server does not answer at {url}; its exit status is {server.poll()} (None: still starting)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", type=Path)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens at most")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8765)
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    rows = rows[:: max(len(rows) // given.count, 1)]
    tokenizer = AutoTokenizer.from_pretrained(bundled_verifier("bf16"))
    url = f"http://127.0.0.1:{given.port}"
    command = [
        str(given.server), "-m", str(given.verifier), "-md", str(given.draft), "-c", "1024", "-np", "1", "-t", str(given.threads),
        "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(given.k), "--spec-draft-p-min", "0", "--port", str(given.port),
    ]  # fmt: skip
    with Path(f"{given.out}.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait(url, server)
            answers = []
            for row in tqdm(rows, desc="llama.cpp"):
                asked = {"prompt": encode(tokenizer, row["turns"][0]), "n_predict": given.tokens, "return_tokens": True}
                answers.append(post(f"{url}/completion", {**asked, "temperature": 0, "top_k": 1, "cache_prompt": False}))
        finally:
            server.terminate()
    timings = [answer["timings"] for answer in answers]
    accepted = [t.get("draft_n_accepted", 0) for t in timings]
    found = {
        "prompts": [row["question_id"] for row in rows],
        "drafts": sum(t["predicted_n"] - 1 - a for t, a in zip(timings, accepted, strict=True)),  # each writes one token that is no draft's
        "draft_tokens": sum(t.get("draft_n", 0) for t in timings),
        "accepted_tokens": sum(accepted),
        "tokens_per_s": 1e3 * sum(t["predicted_n"] for t in timings) / sum(t["predicted_ms"] for t in timings),
        "token_ids": [answer["tokens"] for answer in answers],
    }
    given.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

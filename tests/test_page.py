"""Summary pages: of a run and of a sweep; without network or code, nothing hidden, nothing mixed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from planted import planted_pair
from synthetic_rows import synthetic_rows

import specbench as sb
from specbench.bench.prompts import load_prompts, prompt_set_hash
from specbench.bench.records import Recorder
from specbench.bench.runner import benchmark
from specbench.bench.sweep_index import write_index
from specbench.page import report, run_page, sweep_page

PROMPTS = load_prompts()[::8]


def recorded(folder: Path, verifier_format: str = "bf16", **facts: object) -> Path:
    with Recorder(folder, {"argv": ["x"], "parameters": {"note": "<b>bold</b>"}, **facts}) as recorder:
        recorder.add(synthetic_rows(verifier_format, prompts=PROMPTS, run_id=recorder.run_id))
    return folder


def opens_offline(page: str) -> bool:
    return not re.search(r"<(script|link|iframe)|(src|href)=[\"']?(https?:|//|file:)", page) and "@import" not in page


def test_a_run(tmp_path: Path) -> None:
    path = report(recorded(tmp_path / "run"))
    page = path.read_text(encoding="utf-8")
    assert path == tmp_path / "run" / "summary.html" and opens_offline(page)
    assert page.count("data:image/svg+xml;base64") == 6, "every figure is inline"
    for words in ("Faster or slower", "faster: ", "breaks even at", "Acceptance", "over drafts", "over prompts", "T(k+1) / T(1)",
                  "time to first token", "read off", "Failed: 1 of 32 rows", "out of memory",
                  "What the words mean", "bonus counted"):  # fmt: skip
        assert words in page, words
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page
    assert "not finished" not in page and "import " not in page


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    facts = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps(facts | {"complete": False}))
    assert "not finished, read as far as they got: run" in run_page(folder).read_text(encoding="utf-8")


def test_a_real_run_carries_its_origin(tmp_path: Path) -> None:
    pair = sb.open_pair(*planted_pair(tmp_path / "pair"))
    benchmark(pair, PROMPTS[:2], (0, 2), max_new_tokens=8, run_dir=tmp_path / "run", device="cpu", progress=False)
    page = run_page(tmp_path / "run").read_text(encoding="utf-8")
    for words in (
        "CC0-1.0",
        prompt_set_hash(PROMPTS[:2]),
        "ignore_eos",
        "machine.cpu",
        "packages.torch",
        "git",
        "sha256",
        "peak memory, GB",
    ):
        assert words in page, words


def test_a_sweep_of_benchmarks(tmp_path: Path) -> None:
    rows = []
    for name, status in (("bf16", "complete"), ("w4a16", "complete"), ("fp8", "failed")):
        folder = tmp_path / f"{name}-0123"
        folder.mkdir()
        (folder / "04.html").write_text("report")
        error = "ValueError: <no>" if status == "failed" else None
        ended = {"status": status, "exit_status": int(status == "failed")}
        rows.append({"run_id": folder.name, "verifier": name, "max_new_tokens": 64, **ended,
                     "seconds": 3.21, "error": error, "folder": folder.name})  # fmt: skip
        if status == "complete":
            recorded(folder / "verifier_1", name)
    write_index(tmp_path, rows)
    page = report(tmp_path).read_text(encoding="utf-8")
    assert opens_offline(page) and "3 runs: 2 complete, 1 failed." in page
    assert '<a href="bf16-0123/04.html">bf16-0123</a>' in page and "ValueError: &lt;no&gt;" in page
    assert "<th>verifier</th>" in page and "<th>max_new_tokens</th>" not in page, "only what differs"
    assert page.count("data:image/svg+xml;base64") == 6 and "w4a16, k = 3: " in page


def test_a_sweep_without_rows(tmp_path: Path) -> None:
    write_index(
        tmp_path, [{"run_id": "a", "status": "complete", "exit_status": 0, "seconds": 1.0, "error": None, "folder": "a", "key": "x"}]
    )
    assert "leaves no rows of a benchmark" in sweep_page(tmp_path).read_text(encoding="utf-8")


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"results\.parquet"):
        report(tmp_path)
    with pytest.raises(FileNotFoundError, match="no index of a sweep"):
        sweep_page(tmp_path)


def test_index_files_hold_one_type_per_column(tmp_path: Path) -> None:
    rows = [{"run_id": "a", "k": [1, 3], "found": 1, "exit_status": 0}, {"run_id": "b", "k": [5], "found": "x", "exit_status": None}]
    write_index(tmp_path, rows)
    stored = pd.read_parquet(tmp_path / "index.parquet")
    assert stored.k.tolist() == ["[1, 3]", "[5]"] and stored.found.tolist() == ["1", "x"] and stored.exit_status.tolist() == [0, pd.NA]

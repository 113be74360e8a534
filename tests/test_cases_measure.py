"""Reported mistakes of measuring and of notebook runs, each as its number says: one table of cases, right answers worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
from planted import planted_pair
from test_summary import row

import specbench as sb
from specbench import plots
from specbench.bench import kernel, metrics, records
from specbench.bench.notebooks import run_notebook
from specbench.bench.prompts import Prompt, prompt_set_hash
from specbench.bench.records import to_frame
from specbench.bench.runner import benchmark
from specbench.bench.summary import per_position_rates, summarize
from specbench.errors import ConfigError, DataError
from specbench.page import run_page

ROOT = Path(__file__).resolve().parents[1]
NAN = float("nan")
THREE = row(k=3, accepted=(3, 0, 2), tokens=9)  # rounds with accepted [3, 0, 2], each of 3 proposed
PARAMETERS = {"source": 'run_dir: str = ""\nk: int = 3', "metadata": {"tags": ["parameters"]}}
FINISH = "from specbench.bench.session import finish\nfinish(run_dir, k=k)"


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, equal_nan=True)


def notebook(path: Path, *cells: str | dict[str, Any], **metadata: Any) -> Path:
    """A notebook of code cells as given: text alone has no metadata at all."""
    made = [
        {"cell_type": "code", "outputs": [], "execution_count": None} | (cell if isinstance(cell, dict) else {"source": cell})
        for cell in cells
    ]
    path.write_text(json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}), encoding="utf-8")
    return path


def launch(path: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specbench.bench.notebooks", str(path), "--run-dir", str(folder), "--quiet", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def record(folder: Path, name: str = "run.json") -> dict[str, Any]:
    return json.loads((folder / name).read_bytes())


# --- metrics


def b100_length_with_and_without_the_bonus(_: Path) -> None:
    accepted, proposed = [[3, 0, 2]], [[3, 3, 3]]
    close(metrics.mean_acceptance_length(accepted, proposed), 8 / 3)
    close(metrics.mean_accepted_tokens(accepted, proposed), 5 / 3)
    close(metrics.draft_acceptance_rate(accepted, proposed), 5 / 9)
    close(metrics.acceptance_per_position(accepted, proposed), [2 / 3, 2 / 3, 1 / 3])
    close(metrics.acceptance_per_position(accepted, proposed).sum(), metrics.mean_accepted_tokens(accepted, proposed))
    s = summarize(to_frame([THREE])).iloc[0]
    close([s.mean_acceptance_length, s.mean_accepted_tokens, s.draft_acceptance_rate], [8 / 3, 5 / 3, 5 / 9])
    for figure in (metrics.mean_acceptance_length, metrics.mean_accepted_tokens, metrics.draft_acceptance_rate):
        assert "bonus" in (figure.__doc__ or "") and "over rounds" in (figure.__doc__ or "").replace(
            "over all rounds", "over rounds"
        ).replace("**", "")
    assert "bonus counted" in plots.acceptance(to_frame([THREE])).get_ylabel()


def b101_conditional_rates(_: Path) -> None:
    close(metrics.conditional_acceptance_per_position([[3, 0, 2]], [[3, 3, 3]]), [2 / 3, 1.0, 0.5])
    close(metrics.conditional_acceptance_per_position([[0, 1, 0]], [[3, 3, 3]]), [1 / 3, 0.0, NAN])
    rates = per_position_rates(to_frame([THREE]))
    close(rates.unconditional, [2 / 3, 2 / 3, 1 / 3])
    close(rates.conditional, [2 / 3, 1.0, 0.5])
    close(rates.unconditional.to_numpy()[1:] / rates.unconditional.to_numpy()[:-1], rates.conditional.to_numpy()[1:])
    labels = [text.get_text() for text in plots.per_position(to_frame([THREE])).get_legend().get_texts()]
    assert any("unconditional" in label for label in labels) and any(label.endswith(" conditional") for label in labels)


def b103_trees_and_their_denominators(_: Path) -> None:
    """Ten passes of depth 3, eight nodes with the root, 15 accepted: the root is not a draft token."""
    tree = row(k=3, accepted=[1, 2] * 5, tokens=26, draft_shape="tree", nodes_per_round=[7] * 10)
    s = summarize(to_frame([tree])).iloc[0]
    close([s.mean_acceptance_length, s.draft_acceptance_rate, s.node_acceptance_rate], [2.5, 0.5, 15 / 70])
    chain = row(k=3, accepted=[1, 2] * 5, tokens=26, nodes_per_round=[3] * 10)
    s = summarize(to_frame([chain])).iloc[0]
    close([s.draft_acceptance_rate, s.node_acceptance_rate], [0.5, 0.5])


def b105_histogram_counts_drafts_not_emitted(_: Path) -> None:
    histogram = metrics.accepted_histogram([[0, 1, 1, 3]])
    assert histogram == {0: 1, 1: 2, 3: 1} and sum(histogram.values()) == 4
    meaning = records.schema().field("accepted_per_round").metadata[b"meaning"].decode()
    assert "bonus token not counted" in meaning


def b106_a_cut_window_counts_what_it_proposed(tmp_path: Path) -> None:
    """A perfect draft at k=4 with a limit of 10: 1 + 5 + 4, the last window cut. By hand, and by the loop with the verifier as draft."""
    accepted, proposed = [[4, 3]], [[4, 3]]
    close(metrics.draft_acceptance_rate(accepted, proposed), 1.0)
    close(metrics.acceptance_per_position(accepted, proposed), [1.0] * 4)
    assert "cut" in (metrics.draft_acceptance_rate.__doc__ or "")
    pair = sb.open_pair(*planted_pair(tmp_path / "pair"))
    table = benchmark(pair, ["abc"], (0, 4), max_new_tokens=10, run_dir=tmp_path / "run", device="cpu", progress=False)
    drafted = table[table.k == 4].iloc[0]
    assert drafted.num_output_tokens <= 10 and all(
        a <= p for a, p in zip(drafted.accepted_per_round, drafted.proposed_per_round, strict=True)
    )
    assert 1 + sum(a + 1 for a in drafted.accepted_per_round) - drafted.num_output_tokens in (0, 1)
    room = 10 - 1
    for a, p in zip(drafted.accepted_per_round, drafted.proposed_per_round, strict=True):
        assert p <= max(room - 1, 0) or drafted.finish_reason == "eos", "never more than could still be kept beside the bonus"
        room -= a + 1


def b107_the_prompt_pass_is_in_no_decode_speed(_: Path) -> None:
    """Prefill 1.0 s gives token 1, then 99 tokens at 10 ms."""
    measured = row(tokens=100, prefill_s=1.0, decode_s=0.99, total_s=1.99)
    s = summarize(to_frame([measured])).iloc[0]
    close([s.decode_tokens_per_second, s.end_to_end_tokens_per_second, s.ttft_s], [100.0, 100 / 1.99, 1.0])
    close(s.inter_token_latency_s, 0.010)
    assert round(s.end_to_end_tokens_per_second, 1) == 50.3
    one = summarize(to_frame([row(tokens=1, prefill_s=1.0, decode_s=0.0, total_s=1.0)])).iloc[0]
    assert np.isnan(one.decode_tokens_per_second) and np.isnan(one.inter_token_latency_s), "n/a, not infinity"
    assert metrics.decode_tokens_per_second(1, 0.0) is None


def b109_content_of_a_run_is_told_and_not_mixed(tmp_path: Path) -> None:
    prompts = [Prompt(1, "math", ("What is 6 x 7?",)), Prompt(2, "math", ("And 7 x 8?",))]
    pair = sb.open_pair(*planted_pair(tmp_path / "pair"))
    for i, asked in enumerate((prompts, prompts[:1])):
        folder = tmp_path / "runs" / str(i)
        benchmark(pair, asked, (0, 1), max_new_tokens=4, run_dir=folder, device="cpu", progress=False)
        facts = record(folder, "provenance.json")
        assert facts["parameters"]["ignore_eos"] is False and facts["prompts"]["source"] == "given by the caller"
        assert facts["prompts"]["sha256"] == prompt_set_hash(asked) and facts["checkpoints"]["verifier"]["quantization_config"] is None
        page = run_page(folder).read_text(encoding="utf-8")
        assert prompt_set_hash(asked)[:12] in page and "given by the caller" in page and "ignore_eos" in page
    with pytest.raises(DataError, match="mixed_prompts"):
        sb.load_runs(tmp_path / "runs")
    assert len(sb.load_runs(tmp_path / "runs", mixed_prompts=True)) == 6


# --- notebooks


def b126_exactly_one_parameters_cell(tmp_path: Path) -> None:
    twice_tagged = {"source": "'x'", "metadata": {"tags": ["a", "a"]}}
    good = notebook(tmp_path / "good.ipynb", "'intro'", PARAMETERS, twice_tagged, FINISH)
    assert run_notebook(good, tmp_path / "good", {"k": 4}, progress=False).facts == {"k": 4}
    with pytest.raises(ConfigError, match="no parameter tokens; its parameters cell defines run_dir, k"):
        run_notebook(good, tmp_path / "unknown", {"tokens": 1}, progress=False)
    for count, cells in ((0, ["'x'"]), (2, [PARAMETERS, PARAMETERS])):
        with pytest.raises(ConfigError, match=f"{count} cells tagged 'parameters'; exactly one"):
            run_notebook(notebook(tmp_path / "bad.ipynb", *cells), tmp_path / "bad", progress=False)
    assert not (tmp_path / "unknown").exists() and not (tmp_path / "bad").exists()


def b127_the_kernel_is_the_current_environments(tmp_path: Path) -> None:
    tells = "import sys\nfrom specbench.bench.session import finish\nfinish(run_dir, python=sys.executable)"
    for name, metadata in (("none", {}), ("mine", {"kernelspec": {"name": "my_env", "display_name": "x", "language": "python"}})):
        done = run_notebook(notebook(tmp_path / f"{name}.ipynb", PARAMETERS, tells, **metadata), tmp_path / name, progress=False)
        assert done.facts == {"python": sys.executable}
    assert kernel.registered_kernels()
    for shipped in (ROOT / "notebooks").glob("*.ipynb"):
        assert json.loads(shipped.read_bytes())["metadata"]["kernelspec"]["name"] == "python3"


def b129_a_failed_cell_fails_the_run(tmp_path: Path) -> None:
    printed = "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()"
    raising = {"magic": "%run missing.py", "raises": "1 / 0"}
    for name, cell in raising.items():
        ended = launch(notebook(tmp_path / f"{name}.ipynb", PARAMETERS, cell, FINISH), tmp_path / name)
        assert ended.returncode != 0 and record(tmp_path / name)["status"] == "failed"
    for name, cell in {"shell": "!false", "printed": printed}.items():  # they raise nothing: the missing marker tells
        ended = launch(notebook(tmp_path / f"{name}.ipynb", PARAMETERS, cell), tmp_path / name)
        assert ended.returncode != 0 and record(tmp_path / name)["status"] == "failed" and "without its marker" in ended.stderr


def b131_a_partial_notebook_is_found_and_known_as_one(tmp_path: Path) -> None:
    cells = [PARAMETERS, "from pathlib import Path\nPath(run_dir, 'early.txt').write_text('x')", "assert k > 3", "'never'", FINISH]
    path = notebook(tmp_path / "n.ipynb", *cells)
    ended = launch(path, tmp_path / "run")
    output = tmp_path / "run" / "n.ipynb"
    assert ended.returncode != 0 and str(output) in ended.stderr
    assert "failed at cell 3 of 5" in nbformat.read(output, as_version=4).cells[0].source
    assert record(tmp_path / "run", "result.json")["complete"] is False and (tmp_path / "run" / "early.txt").exists()
    assert launch(path, tmp_path / "run", "-p", "k", "4").returncode == 0
    assert record(tmp_path / "run", "result.json") == {"status": "complete", "complete": True, "facts": {"k": 4}}
    assert "failed" not in nbformat.read(output, as_version=4).cells[0].source


def b132_old_outputs_and_parameter_cells_do_not_survive(tmp_path: Path) -> None:
    stored = {"output_type": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": []}
    path = notebook(tmp_path / "n.ipynb", PARAMETERS, {"source": FINISH, "outputs": [stored], "metadata": {}})
    first = run_notebook(path, tmp_path / "one", {"k": 1}, progress=False)
    second = run_notebook(first.output, tmp_path / "two", {"k": 2}, progress=False)
    cells = nbformat.read(second.output, as_version=4).cells
    injected = [cell.source for cell in cells if "injected-parameters" in cell.metadata.get("tags", [])]
    assert second.facts == {"k": 2} and len(injected) == 1 and "k = 2" in injected[0]
    for shipped in (ROOT / "notebooks").glob("*.ipynb"):
        assert all(not cell.get("outputs") for cell in json.loads(shipped.read_bytes())["cells"])


def b134_a_sweep_from_inside_a_notebook(tmp_path: Path) -> None:
    measuring = notebook(tmp_path / "measuring.ipynb", PARAMETERS, "assert k != 2", FINISH)
    given = {"source": 'run_dir: str = ""\nmeasuring: str = ""', "metadata": {"tags": ["parameters"]}}
    sweeps = "from specbench.bench.sweep import sweep\ntable = sweep(measuring, run_dir + '/k', [{'k': k} for k in (1, 2, 4)])"
    ends = "from specbench.bench.session import finish\nfinish(run_dir, exits=list(table.exit_status), statuses=list(table.status))"
    driver = notebook(tmp_path / "driver.ipynb", given, sweeps, ends)
    done = run_notebook(driver, tmp_path / "run", {"measuring": str(measuring)}, progress=False)
    assert done.facts == {"exits": [0, 1, 0], "statuses": ["complete", "failed", "complete"]}
    index = pd.read_parquet(tmp_path / "run" / "k" / "index.parquet")
    assert len(set(index.folder)) == 3 and all((tmp_path / "run" / "k" / name / "measuring.ipynb").is_file() for name in index.folder)


CASES: dict[str, Callable[[Path], None]] = {
    name.partition("_")[0].upper(): case for name, case in list(globals().items()) if name.startswith("b1") and callable(case)
}


@pytest.mark.notebook
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case: Callable[[Path], None], tmp_path: Path) -> None:
    case(tmp_path)


def test_all_are_here() -> None:
    assert set(CASES) == {"B100", "B101", "B103", "B105", "B106", "B107", "B109", "B126", "B127", "B129", "B131", "B132", "B134"}

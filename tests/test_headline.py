"""The headline figures are those of the rows, on real tiny pairs, and the command ends in one JSON line."""
import json
import sys
import types

import numpy as np
import pytest
from planted import planted_pair
from synthetic_rows import synthetic_table

import specbench as sb
from specbench.bench import headline
from specbench.bench.load_cost import LoadCostError, draft_load_cost
from specbench.bench.prompts import Prompt
from specbench.bench.records import load_runs
from specbench.bench.summary import summarize
from specbench.errors import DataError

PROMPTS = [Prompt(1, "math", ("What is 6 x 7?",)), Prompt(2, "writing", ("Write a line about rain.",))]
OPTIONS = {"max_new_tokens": 16, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    return {
        "plain": sb.open_pair(*planted_pair(root / "plain")),
        "w4a16": sb.open_pair(*planted_pair(root / "w4a16", quantized=True)),
    }


@pytest.fixture(scope="module")
def found(pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, headline.measure(pairs, pairs["plain"].verifier, PROMPTS, folder, (0, 1, 3), **OPTIONS)


def test_figures_are_those_of_the_rows(found):
    folder, figures = found
    for name, verifier_format in (("plain", "fp32"), ("w4a16", "w4a16")):
        table = load_runs(folder / name)
        summary = summarize(table)
        own = summary[summary.engine == "specbench"].set_index("k")
        theirs = summary[summary.engine == "transformers"].iloc[0]
        f = figures[name]
        assert (f["verifier_format"], f["k"], f["num_prompts"], f["num_failed"]) == (verifier_format, 3, 2, 0)
        assert f["mean_acceptance_length"]["estimate"] == own.mean_acceptance_length[3] > 1
        assert f["mean_acceptance_length"]["low"] <= f["mean_acceptance_length"]["estimate"] <= f["mean_acceptance_length"]["high"]
        assert f["decode_tokens_per_second"] == own.decode_tokens_per_second.to_dict()
        assert f["speedup"][f["best_k"]] == f["best_speedup"] and f["best_speedup"]["estimate"] == own.speedup[own.index > 0].max()
        assert f["k0_over_transformers"] == own.decode_tokens_per_second[0] / theirs.decode_tokens_per_second
        assert theirs.verifier_format == "fp32", "the baseline is the plain verifier in both runs"
        assert f["num_unlike_k0"] == 0


def test_draft_load_is_measured(found, pairs):
    for name, f in found[1].items():
        load = f["draft_load"]
        assert load["file_bytes"] == (pairs[name].draft.path / "model.safetensors").stat().st_size
        assert load["seconds"] > 0 and load["device_peak_bytes"] is None
        if sys.platform == "linux" and load["host_peak_bytes"] is not None:
            assert 0 <= load["host_peak_bytes"] < 1 << 30
            assert load["peak_over_file"] == load["host_peak_bytes"] / load["file_bytes"]


def test_a_load_that_fails_says_why(pairs):
    with pytest.raises(LoadCostError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        draft_load_cost(pairs["w4a16"], policy="vllm-0.11.0", device="cpu")


def test_table_and_command_line(found, pairs, monkeypatch, capsys, tmp_path):
    bundled = types.ModuleType("specbench.bundled")
    bundled.bundled_pair = lambda name: pairs["plain" if name == "bf16" else name]
    monkeypatch.setitem(sys.modules, "specbench.bundled", bundled)
    small = ["--k", "0", "2", "--per-category", "1", "--max-new-tokens", "4", "--device", "cpu"]
    headline.main(["--pairs", "bf16", *small, "--run-dir", str(tmp_path)])
    *table, last = capsys.readouterr().out.splitlines()
    said = json.loads(last)
    assert said["run_dir"] == str(tmp_path) and said["pairs"]["bf16"]["num_prompts"] == 8 and said["pairs"]["bf16"]["k"] == 2
    assert any("mean acceptance length at k=2" in line for line in table) and any("best k: 2" in line for line in table)
    assert len(load_runs(tmp_path)) == 8 * 3
    text = headline.to_frame(found[1]).to_string()
    assert "plain" in text and "w4a16" in text and "nan" not in text


def test_undefined_figures_are_none_not_nan():
    table = synthetic_table()
    alone = table[(table.k == 0) & (table.verifier_format == "bf16")]
    f = headline.figures(alone)
    assert f["k"] is None and f["mean_acceptance_length"] is None and f["best_k"] is None and f["k0_over_transformers"] is None
    f = headline.figures(table[(table.verifier_format == "bf16") & (table.k != 3)])
    assert f["k"] == 5 and f["num_failed"] == 1
    assert np.isfinite(f["best_speedup"]["estimate"]) and f["transformers_tokens_per_second"] is None
    json.dumps(f, allow_nan=False)


def test_the_baseline_must_be_measured(pairs, tmp_path):
    with pytest.raises(DataError, match="0 among them"):
        headline.measure(pairs, pairs["plain"].verifier, PROMPTS, tmp_path, (1, 3), **OPTIONS)

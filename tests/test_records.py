"""Rows keep their types through files; a run folder is readable at every moment and never overwritten."""
import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from synthetic_rows import synthetic_rows, synthetic_table

from specbench.bench import records
from specbench.bench.prompts import load_prompts, prompt_set_hash
from specbench.bench.provenance import describe_checkpoint, git_state, machine, provenance
from specbench.errors import DataError
from specbench.pair import open_checkpoint

PROMPTS = load_prompts()[:3]


def test_table_round_trip(tmp_path):
    table = synthetic_table(prompts=PROMPTS)
    assert list(table.columns) == [field.name for field in dataclasses.fields(records.Row)]
    records.write_table(table, tmp_path / "results.parquet")
    with pytest.warns(UserWarning, match="not finished"):
        back = records.load_runs(tmp_path)
    pd.testing.assert_frame_equal(back, table)
    assert back.k.dtype == np.int64 and back.decode_s.dtype == np.float64 and back.num_prompt_tokens.dtype == "Int64"
    assert [path.name for path in tmp_path.iterdir()] == ["results.parquet"]


def test_failed_row_has_no_figures():
    table = records.to_frame(synthetic_rows(prompts=PROMPTS))
    failed = table[table.status == "failed"]
    assert len(failed) == 1
    row = failed.iloc[0]
    assert row.error and row.finish_reason == "" and len(row.accepted_per_round) == 0 and row.num_output_tokens == 0
    assert row[["num_prompt_tokens", "prefill_s", "decode_s", "total_s"]].isna().all()


def test_empty_table_has_the_columns_and_types():
    empty, full = records.to_frame([]), records.to_frame(synthetic_rows(prompts=PROMPTS))
    assert list(empty.columns) == list(full.columns)
    assert empty.num_prompt_tokens.dtype == "Int64"


def test_run_ids_are_never_reused(tmp_path):
    folders = [records.new_run(tmp_path / "runs", "bench") for _ in range(4)]
    assert len(set(folders)) == 4 and all(folder.is_dir() and folder.name.startswith("bench-2") for folder in folders)
    for label in ("", "a/b", ".."):
        with pytest.raises(DataError, match="label"):
            records.new_run(tmp_path, label)


def test_crash_leaves_a_readable_folder(tmp_path):
    folder = records.new_run(tmp_path)
    rows = synthetic_rows(prompts=PROMPTS, run_id=folder.name)
    with pytest.raises(ZeroDivisionError), records.Recorder(folder, {"argv": ["x"]}) as recorder:
        assert json.loads((folder / "provenance.json").read_text())["complete"] is False, "stamped before the first row"
        recorder.add(rows[:2])
        recorder.add(rows[2:5])
        assert json.loads((folder / "provenance.json").read_text())["complete"] is False
        raise ZeroDivisionError("boom")
    stamped = json.loads((folder / "provenance.json").read_text())
    assert stamped["complete"] is False and stamped["stopped_by"] == "ZeroDivisionError: boom"
    assert stamped["argv"] == ["x"] and stamped["run_id"] == recorder.run_id == f"{tmp_path.name}/{folder.name}"
    with pytest.warns(UserWarning, match=folder.name):
        pd.testing.assert_frame_equal(records.load_runs(tmp_path), records.to_frame(rows[:5]))


def test_finished_run_and_no_overwriting(tmp_path, recwarn):
    folder = records.new_run(tmp_path)
    rows = synthetic_rows(prompts=PROMPTS)
    with records.Recorder(folder, {}) as recorder:
        recorder.add(rows)
    assert json.loads((folder / "provenance.json").read_text())["complete"] is True
    pd.testing.assert_frame_equal(records.load_runs(folder), records.to_frame(rows))
    assert not recwarn.list
    with pytest.raises(DataError, match="already holds"), records.Recorder(folder, {}):
        pass
    assert json.loads((folder / "provenance.json").read_text())["complete"] is True


def test_b109_runs_over_other_prompts_need_a_word(tmp_path):
    for prompts in (PROMPTS, PROMPTS[:2]):
        folder = records.new_run(tmp_path)
        with records.Recorder(folder, {}) as recorder:
            recorder.add(synthetic_rows(prompts=prompts))
    with pytest.raises(DataError) as caught:
        records.load_runs(tmp_path)
    for prompts in (PROMPTS, PROMPTS[:2]):
        assert prompt_set_hash(prompts)[:12] in str(caught.value)
    assert "mixed_prompts" in str(caught.value)
    assert len(records.load_runs(tmp_path, mixed_prompts=True)) == 5 * 4


def test_tables_of_another_shape_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"results\.parquet"):
        records.load_runs(tmp_path)
    table = records.to_frame(synthetic_rows(prompts=PROMPTS))
    records.write_table(table.assign(schema_version=99), tmp_path / "results.parquet")
    with pytest.raises(DataError, match="99"):
        records.load_runs(tmp_path)
    records.write_table(table.drop(columns="k").assign(extra=1), tmp_path / "results.parquet")
    with pytest.raises(DataError, match=r"lacks \['k'\] and has unknown \['extra'\]"):
        records.load_runs(tmp_path)


@pytest.fixture
def checkpoint(tmp_path):
    save_file({"w": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "x"}}))
    return open_checkpoint(tmp_path)


def test_provenance_says_what_the_numbers_depend_on(checkpoint):
    facts = provenance({"k": [0, 3], "ignore_eos": False}, {"verifier": checkpoint}, PROMPTS)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["parameters"] == {"k": [0, 3], "ignore_eos": False}
    assert facts["prompts"] == {"sha256": prompt_set_hash(PROMPTS), "num_prompts": 3, "categories": {"writing": 3}}
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0] or facts["packages"]["torch"] == torch.__version__
    assert facts["machine"]["threads"] == torch.get_num_threads() and facts["machine"]["cores"] >= 1 and facts["machine"]["cpu"]
    assert facts["checkpoints"]["verifier"]["quantization_config"] == {"quant_method": "x"}
    assert {"argv", "started", "python", "git", "environment"} <= set(facts)
    assert machine() == facts["machine"]


def test_file_hashes_follow_content(checkpoint, tmp_path):
    first = describe_checkpoint(checkpoint)["files"]
    assert set(first) == {"config.json", "model.safetensors"}
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    second = describe_checkpoint(checkpoint)["files"]
    assert second["config.json"] == first["config.json"]
    assert second["model.safetensors"]["bytes"] == first["model.safetensors"]["bytes"]
    assert second["model.safetensors"]["sha256"] != first["model.safetensors"]["sha256"]


def test_large_files_are_told_apart_by_header(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr("specbench.bench.provenance.WHOLE_FILE_BYTES", 8)
    first = describe_checkpoint(checkpoint)["files"]["model.safetensors"]
    assert set(first) == {"bytes", "header_sha256"}
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    assert describe_checkpoint(checkpoint)["files"]["model.safetensors"] == first
    save_file({"v": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    assert describe_checkpoint(open_checkpoint(tmp_path))["files"]["model.safetensors"] != first


def test_a_hub_checkpoint_is_known_by_its_commit(checkpoint):
    hub = dataclasses.replace(checkpoint, name="org/model", revision="c" * 40)
    facts = describe_checkpoint(hub)
    assert facts["revision"] == "c" * 40 and set(facts["files"]) == {"config.json"}


def test_git_state_is_of_this_package_only(monkeypatch, tmp_path):
    state = git_state()
    assert state is None or (len(state["sha"]) == 40 and isinstance(state["dirty"], bool))
    monkeypatch.setattr("specbench.bench.provenance.PACKAGE", tmp_path)
    assert git_state() is None

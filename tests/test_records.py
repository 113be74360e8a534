"""Rows keep their types through files; a run folder is readable at every moment and never overwritten."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from synthetic_rows import synthetic_rows, synthetic_table

import specbench as sb
from specbench.bench import records
from specbench.bench.prompts import load_prompts, prompt_set_hash
from specbench.bench.provenance import describe_checkpoint, git_state, machine, provenance
from specbench.bench.schema import ADDED, SCHEMA_VERSION, describe, schema
from specbench.errors import DataError
from specbench.pair import open_checkpoint

ROOT = Path(__file__).resolve().parents[1]
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
            recorder.add(synthetic_rows(prompts=prompts, run_id=folder.name))
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
    for version in (99, 0):
        records.write_table(table.assign(schema_version=version), tmp_path / "results.parquet")
        with pytest.raises(DataError, match=rf"\['{version}'\]; this version of specbench reads 1 to {SCHEMA_VERSION}"):
            records.load_runs(tmp_path)
    (tmp_path / "results.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match="is no Parquet file"):
        records.load_runs(tmp_path)
    records.write_table(table.drop(columns="k").assign(extra=1), tmp_path / "results.parquet")
    with pytest.raises(DataError, match=r"lacks \['k'\] and has unknown \['extra'\]"):
        records.load_runs(tmp_path)


def stored_by_version(version, folder, rows):
    """results.parquet as an older version of the schema had it."""
    table = pa.Table.from_pylist([dataclasses.asdict(row) for row in rows], schema=schema())
    table = table.drop_columns([name for since, names in ADDED.items() if since > version for name in names])
    place = table.column_names.index("schema_version")
    folder.mkdir()
    pq.write_table(table.set_column(place, "schema_version", pa.array([version] * len(table), pa.int64())), folder / "results.parquet")
    (folder / "provenance.json").write_text('{"complete": true}')


def test_an_older_version_is_read_beside_this_one(tmp_path, recwarn):
    old, new = (synthetic_rows(prompts=PROMPTS, run_id=name) for name in ("old", "new"))
    stored_by_version(1, tmp_path / "old", old)
    with records.Recorder(tmp_path / "new", {}) as recorder:
        recorder.add(new)
    table = sb.load_runs(tmp_path)
    assert not recwarn.list and set(table.schema_version) == {SCHEMA_VERSION} and len(table) == 2 * len(old)
    before = table[table.run_id == "old"]
    assert set(before[before.k == 0].proposer) == {""} and set(before[before.k > 0].proposer) == {"eagle3"}
    assert set(before.draft_shape) == {"chain"} and set(before.batch_size) == {1} and before.seed.isna().all()
    assert all(list(d) == list(p) for d, p in zip(before.nodes_per_round, before.proposed_per_round, strict=True))
    same = [name for name in table.columns if name not in ("run_id", *ADDED[2])]
    pd.testing.assert_frame_equal(before[same].reset_index(drop=True), table[table.run_id == "new"][same].reset_index(drop=True))


def test_version_2_had_no_penalties(tmp_path):
    rows = synthetic_rows(prompts=PROMPTS, run_id="old")
    stored_by_version(2, tmp_path / "old", rows)
    table = sb.load_runs(tmp_path)
    pd.testing.assert_frame_equal(table, records.to_frame(rows))
    assert table[list(ADDED[3])].isna().all().all()


def test_every_column_says_what_it_means(tmp_path):
    documented = describe()
    assert documented.column.tolist() == [field.name for field in dataclasses.fields(records.Row)]
    assert documented.meaning.str.len().min() > 5
    records.write_table(records.to_frame([]), tmp_path / "results.parquet")
    stored = pq.read_schema(tmp_path / "results.parquet")
    assert stored.field("prefill_s").metadata[b"meaning"].decode().startswith("from the start to the first token"), (
        "the file documents itself"
    )


def test_many_folders_deep_and_none_twice(tmp_path):
    for name in ("a/one", "a/two", "b/deeper/one", ".earlier/a/one"):
        with records.Recorder(tmp_path / name, {}) as recorder:
            recorder.add(synthetic_rows(prompts=PROMPTS, run_id=recorder.run_id))
    assert set(records.load_runs(tmp_path).run_id) == {"a/one", "a/two", "deeper/one"}, "what a sweep set aside is not read"
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with pytest.raises(DataError, match=r"run a/one is there twice, in .*a/one and in .*copy/one"):
        records.load_runs(tmp_path)


def test_a_killed_process_leaves_a_readable_folder(tmp_path):
    """No Python code runs after SIGKILL: what is on disk is what each write left."""
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom synthetic_rows import synthetic_rows\nfrom specbench.bench import records\n"
        "from specbench.bench.prompts import load_prompts\n"
        f"with records.Recorder(Path({str(tmp_path / 'run')!r}), {{}}) as recorder:\n"
        "    recorder.add(synthetic_rows(prompts=load_prompts()[:3], run_id=recorder.run_id)[:4])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    killed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.warns(UserWarning, match="not finished, read as far as they got: run"):
        assert len(records.load_runs(tmp_path)) == 4
    with records.Recorder(tmp_path / "second", {}):
        pass  # began and ended without a row
    with pytest.warns(UserWarning, match="not finished"):
        assert len(records.load_runs(tmp_path)) == 4
    (tmp_path / "run" / "results.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="1 runs began and have no row yet"):
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
    assert facts["prompts"] == {
        "name": "specbench", "source": "shipped with specbench", "licence": "CC0-1.0", "sha256": prompt_set_hash(PROMPTS), "num_prompts": 3,
        "categories": {"writing": 3},
    }  # fmt: skip
    assert facts["packages"]["torch"] == torch.__version__.partition("+")[0] or facts["packages"]["torch"] == torch.__version__
    assert facts["machine"]["threads"] == torch.get_num_threads() and facts["machine"]["cores"] >= 1 and facts["machine"]["cpu"]
    assert facts["machine"]["cpu_capability"] and isinstance(facts["machine"]["cpu_bf16"], bool)
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

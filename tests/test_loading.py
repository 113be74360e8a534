"""The loading cost benchmark on a pair of a few megabytes: what it writes loads, and what it measures is of that load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import specbench as sb
from specbench.bench import loading
from specbench.errors import CheckpointError

SMALL = 0.004  # gigabytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return loading.write_pair(tmp_path_factory.mktemp("pair"), SMALL)


def request_of(folders: tuple[Path, Path], which: str, cold: bool = False, **load_config: Any) -> dict[str, Any]:
    return {"which": which, "cold": cold, "verifier": str(folders[0]), "draft": str(folders[1]), "load_config": load_config}


def test_the_synthetic_pair_is_a_pair_of_that_size(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        assert (folder / "model.safetensors").stat().st_size >= SMALL * 1e9
    pair = sb.open_pair(*folders)
    draft, verifier = sb.load_draft(pair, device="cpu"), sb.load_verifier(pair, device="cpu")
    stored = load_file(folders[1] / "model.safetensors")
    assert torch.equal(draft.fc.weight, stored["fc.weight"]) and len(draft.fc.weight.unique()) > 100
    assert verifier.lm_head.weight is verifier.embed_tokens.weight and verifier.dtype == torch.bfloat16


@pytest.mark.parametrize("which", ["verifier", "draft"])
def test_a_turn_measures_the_load_and_the_reads_of_its_own_file(folders: tuple[Path, Path], which: str) -> None:
    turn = loading.measure(**request_of(folders, which, use_tqdm_on_load=False))
    assert turn is not None
    size = (folders[0 if which == "verifier" else 1] / "model.safetensors").stat().st_size
    assert turn["file_bytes"] == size and abs(turn["kept_bytes"] / size - 1) < 0.02
    row = loading._figures(turn)
    assert row["load_over_copy"] == pytest.approx(row["load_gb_per_s"] / row["copy_gb_per_s"]) and row["read_gb_per_s"] > 0


def test_the_child_gives_the_same_facts_and_its_failure_is_told(folders: tuple[Path, Path]) -> None:
    turn = loading._child(request_of(folders, "draft", use_tqdm_on_load=False))
    assert turn is not None and turn["kept_bytes"] == loading.measure(**request_of(folders, "draft"))["kept_bytes"]  # type: ignore[index]
    with pytest.raises(loading.LoadingError, match="load_format is 'gguf'"):
        loading._child(request_of(folders, "draft", load_format="gguf"))


def test_cold_is_only_said_where_pages_were_dropped(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "drop_pages", lambda file: False)
    assert loading.measure(**request_of(folders, "draft", cold=True)) is None
    monkeypatch.setattr(loading, "_child", lambda request: loading.measure(**request))
    lines: list[str] = []
    results = loading.run(tmp_path, SMALL, 1, {"use_tqdm_on_load": False}, lines.append)
    assert {name for name in results if name.endswith(("_warm", "_cold"))} == {"verifier_warm", "draft_warm"}
    assert [line for line in lines if "not measured" in line and "cold" in line] and len(lines) == 4


def test_the_last_line_is_json_and_the_status_says_whether_targets_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"extra_over_kept": 1.1, "load_over_copy": 0.7}
    for state, status in [(good, 0), (good | {"extra_over_kept": 1.3}, 1), (good | {"load_over_copy": 0.5}, 1)]:
        monkeypatch.setattr(loading, "run", lambda *_, state=state: {"draft_warm": state})
        assert loading.main(["--gigabytes", "0.004"]) == status
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (line["memory_ok"] and line["speed_ok"]) == (status == 0)


def test_a_damaged_file_is_refused_while_it_is_measured(tmp_path: Path) -> None:
    verifier, draft = loading.write_pair(tmp_path, SMALL)
    with (draft / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x80\x7f")  # bf16 infinity
    with pytest.raises(CheckpointError, match="not finite"):
        loading.measure(**request_of((verifier, draft), "draft"))

"""Whose load config the draft is loaded with: parsing, precedence per policy, and what reaches the loader in every code path."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import draft_config, draft_tensors, tiny_draft, tiny_verifier, write

import specbench as sb
from specbench.checkpoint import load_formats
from specbench.checkpoint.load_config import FORMATS, OTHER_FORMATS, LoadConfig, parse_load_config
from specbench.checkpoint.weight_files import WeightFiles
from specbench.errors import CheckpointError, CheckpointFileError, ConfigError, DownloadError
from specbench.pair import Pair

HONOURED = ["draft", "vllm-0.31.0"]
IGNORED = ["vllm-0.11.0", "vllm-0.30.0-mrv2"]
SENTINEL = LoadConfig(load_format="safetensors", download_dir="draft-cache")
TARGET = LoadConfig(load_format="hf", download_dir="target-cache")


# --- parsing


def test_defaults_are_vllms() -> None:
    config = parse_load_config(None)
    assert config == parse_load_config({}) == LoadConfig()
    assert config.load_format == "auto" and config.download_dir is None and config.safetensors_load_strategy is None
    assert config.ignore_patterns == ("original/**/*",) and config.pt_load_map_location == "cpu" and config.use_tqdm_on_load
    assert (config.safetensors_prefetch_num_threads, config.safetensors_prefetch_block_size) == (8, 16 << 20)
    assert len(fields(LoadConfig)) == 10 and str(config) == "defaults" and config.changed() == {}


def test_a_load_config_is_returned_as_it_is() -> None:
    assert parse_load_config(SENTINEL) is SENTINEL


@pytest.mark.parametrize("value", FORMATS)
def test_every_format_parses_in_any_case(value: str) -> None:
    assert parse_load_config({"load_format": value.upper()}).load_format == value


@pytest.mark.parametrize("value", OTHER_FORMATS)
def test_what_only_vllm_loads_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match=f"draft_load_config: load_format is '{value}': vLLM knows it.*not supported here.*'safetensors'"):
        parse_load_config({"load_format": value}, "draft_load_config")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"load_fromat": "auto"}, "has no key 'load_fromat'; nearest: 'load_format'"),
        ({"quantization": None}, "has no key 'quantization'; known: load_format, download_dir"),
        ({"load_format": "safetensor"}, "no load format; nearest: 'safetensors'"),
        ({"load_format": None}, "load_format is None"),
        ({"download_dir": 3}, "download_dir is 3"),
        ({"download_dir": ""}, "download_dir is ''"),
        ({"safetensors_load_strategy": "torchao"}, "'torchao': expected null, 'lazy', 'eager' or 'prefetch'"),
        ({"device": "gpu7"}, "device is 'gpu7'"),
        ({"ignore_patterns": [1]}, r"ignore_patterns is \[1\]"),
        ({"use_tqdm_on_load": 1}, "use_tqdm_on_load is 1: true or false"),
        ({"pt_load_map_location": {"cuda:1": 0}}, "pt_load_map_location is"),
        ({"safetensors_prefetch_num_threads": 0}, "safetensors_prefetch_num_threads is 0"),
        ({"safetensors_prefetch_block_size": True}, "safetensors_prefetch_block_size is True"),
        ({"model_loader_extra_config": []}, r"model_loader_extra_config is \[\]"),
        ({"model_loader_extra_config": {"num_thread": 2}}, "has no key 'num_thread' here; nearest: 'num_threads'"),
        ({"model_loader_extra_config": {"num_threads": "2"}}, "num_threads is '2'"),
        ({"model_loader_extra_config": {"enable_multithread_load": 1}}, "enable_multithread_load is 1"),
        (
            {"model_loader_extra_config": {"enable_multithread_load": True}, "safetensors_load_strategy": "eager"},
            "safetensors_load_strategy is 'eager': enable_multithread_load reads lazily",
        ),
    ],
)
def test_bad_values_are_refused_with_what_is_expected(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_load_config(given)


@pytest.mark.parametrize("value", ["safetensors", 3, ["load_format"]])
def test_only_a_dict_is_a_dict(value: Any) -> None:
    with pytest.raises(ConfigError, match="a dict, a LoadConfig or None"):
        parse_load_config(value)


def test_threads_count_only_when_enabled() -> None:
    assert 1 <= LoadConfig(model_loader_extra_config={"num_threads": 9}).num_threads == LoadConfig().num_threads <= 4
    assert LoadConfig(model_loader_extra_config={"enable_multithread_load": True}).num_threads == 8
    assert LoadConfig(model_loader_extra_config={"enable_multithread_load": True, "num_threads": 3}).num_threads == 3


# --- precedence


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return tiny_verifier(tmp_path / "verifier"), tiny_draft(tmp_path / "draft")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, LoadConfig]]:
    """What `weights`, the one way to weight files, was asked for; it then reads with all defaults."""
    seen: list[tuple[Path, LoadConfig]] = []

    def spy(files: WeightFiles, config: LoadConfig) -> load_formats.WeightSource:
        seen.append((files.folder, config))
        return source(files, LoadConfig())

    source = load_formats.WeightSource
    monkeypatch.setattr(load_formats, "WeightSource", spy)
    return seen


def only(asked: list[tuple[Path, LoadConfig]], folder: Path) -> LoadConfig:
    configs = [config for path, config in asked if path == folder]
    assert configs and all(config is configs[0] for config in configs), "one object in every read of one checkpoint"
    return configs[0]


@pytest.mark.parametrize("policy", HONOURED)
def test_the_drafts_own_config_reaches_the_loader(folders: tuple[Path, Path], asked: list[tuple[Path, LoadConfig]], policy: str) -> None:
    pair = sb.open_pair(*folders, load_config=TARGET, draft_load_config=SENTINEL)
    assert pair.draft_load is SENTINEL and pair.verifier_load is TARGET
    sb.load_draft(pair, policy)
    assert only(asked, folders[1]) is SENTINEL


@pytest.mark.parametrize("policy", IGNORED)
def test_an_engine_that_ignores_it_loads_with_the_verifiers(
    folders: tuple[Path, Path], asked: list[tuple[Path, LoadConfig]], policy: str
) -> None:
    pair = sb.open_pair(*folders, load_config=TARGET, draft_load_config=SENTINEL)
    sb.load_draft(pair, policy)
    assert only(asked, folders[1]) is TARGET
    row = sb.resolve(pair, policy).settings["load_config"]
    assert row.warning and "ignored" in row.note and "draft-cache" in row.note


@pytest.mark.parametrize("policy", HONOURED + IGNORED)
def test_unset_is_the_verifiers_object(folders: tuple[Path, Path], asked: list[tuple[Path, LoadConfig]], policy: str) -> None:
    pair = sb.open_pair(*folders, load_config=TARGET)
    assert pair.draft_load is None
    plan = sb.resolve(pair, policy)
    assert plan["load_config"] is TARGET and "inherited" in plan.settings["load_format"].note
    assert not plan.settings["load_config"].warning
    sb.load_draft(pair, policy)
    assert only(asked, folders[1]) is TARGET


def test_an_empty_config_is_not_unset(folders: tuple[Path, Path], asked: list[tuple[Path, LoadConfig]]) -> None:
    pair = sb.open_pair(*folders, load_config=TARGET, draft_load_config={})
    sb.load_draft(pair)
    assert only(asked, folders[1]) == LoadConfig() and sb.resolve(pair)["load_format"] == "auto"


@pytest.mark.parametrize("path", ["loaded verifier", "alone", "own embedding", "computed map", "engine", "verifier"])
def test_the_sentinel_reaches_the_loader_in_every_code_path(
    folders: tuple[Path, Path], tmp_path: Path, asked: list[tuple[Path, LoadConfig]], path: str
) -> None:
    verifier, draft = folders
    tensors = draft_tensors()
    if path == "own embedding":
        draft = write(tmp_path / "own", draft_config(), tensors | {"embed_tokens.weight": torch.randn(256, 64)})
    if path == "computed map":
        draft = write(tmp_path / "map", draft_config(), {name: t for name, t in tensors.items() if name != "d2t"})
    pair = sb.open_pair(verifier, draft, load_config=TARGET, draft_load_config=SENTINEL)
    if path == "verifier":
        sb.load_verifier(pair)
        assert [config for _, config in asked] == [TARGET] and asked[0][1] is TARGET
        return
    loaded = sb.load_verifier(sb.open_pair(verifier, draft)) if path == "loaded verifier" else None
    asked.clear()
    sb.load_draft(pair, "vllm-0.31.0" if path == "engine" else "draft", verifier=loaded)
    assert only(asked, draft) is SENTINEL


def test_unset_loads_the_same_bytes_as_no_load_config_at_all(folders: tuple[Path, Path]) -> None:
    plain = sb.load_draft(sb.open_pair(*folders)).state_dict()
    for options in ({"load_config": {}}, {"draft_load_config": {}}, {"load_config": {"load_format": "safetensors"}}):
        other = sb.load_draft(sb.open_pair(*folders, **options)).state_dict()
        assert plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)


# --- the two settings that differ in practice


def half(folder: Path) -> Path:
    return write(folder, draft_config(), draft_tensors() | {"fc.weight": torch.full((64, 192), 0.5)})


def test_a_dummy_verifier_and_a_draft_of_its_own_format(tmp_path: Path) -> None:
    verifier, draft = tiny_verifier(tmp_path / "verifier"), half(tmp_path / "draft")
    dummy = {"load_format": "dummy"}
    own = sb.open_pair(verifier, draft, load_config=dummy, draft_load_config={"load_format": "safetensors"})
    for policy in HONOURED:
        assert bool((sb.load_draft(own, policy).fc.weight == 0.5).all())
    unset = sb.open_pair(verifier, draft, load_config=dummy)
    for pair, policy in [(own, "vllm-0.30.0-mrv2"), (unset, "draft"), (unset, "vllm-0.31.0")]:
        weight = sb.load_draft(pair, policy).fc.weight
        assert 0 < float(weight.abs().max()) <= 1e-3 and len(weight.unique()) > 1000, "random, and silently so"
    row = sb.resolve(unset).settings["load_format"]
    assert row.value == "dummy" and "inherited" in row.note and "random" in row.note and row.warning
    assert any("random weights" in warning for warning in sb.resolve(own, "vllm-0.30.0-mrv2").warnings)
    assert not any("random weights" in warning for warning in sb.resolve(own).warnings)


def test_dummy_weights_are_seeded_and_read_no_weight_file(tmp_path: Path) -> None:
    verifier, draft = tiny_verifier(tmp_path / "verifier"), half(tmp_path / "draft")
    pair = sb.open_pair(verifier, draft, load_config={"load_format": "dummy"})
    for folder in (verifier, draft):
        (folder / "model.safetensors").write_bytes(b"")
    one, two = sb.load_draft(pair).state_dict(), sb.load_draft(pair).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one) and not one["d2t"].any()
    model = sb.load_verifier(pair)
    assert 0 < float(model.layers[0].mlp.down_proj.weight.abs().max()) <= 1e-3
    borrowed = sb.load_draft(pair, verifier=model)
    assert borrowed.embed_tokens is model.embed_tokens and torch.equal(borrowed.embed_tokens.weight, one["embed_tokens.weight"])


def test_a_pickled_draft_beside_a_verifier_that_takes_safetensors_only(tmp_path: Path) -> None:
    verifier, draft = tiny_verifier(tmp_path / "verifier"), tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(draft_config()))
    torch.save(draft_tensors(), draft / "pytorch_model.bin")
    only_safetensors = {"load_format": "safetensors"}
    pair = sb.open_pair(verifier, draft, load_config=only_safetensors, draft_load_config={"load_format": "auto"})
    assert torch.equal(sb.load_draft(pair).fc.weight, draft_tensors()["fc.weight"])
    with pytest.raises(
        CheckpointFileError, match=r"Cannot find any model weights.*'safetensors' reads \*\.safetensors; there: pytorch_model.bin"
    ):
        sb.load_draft(pair, "vllm-0.30.0-mrv2")
    row = sb.resolve(pair, "vllm-0.30.0-mrv2").settings["weights"]
    assert row.value is None and row.warning and "Cannot find" in row.note
    assert sb.resolve(pair)["weights"] == "pytorch_model.bin"
    inherited = sb.open_pair(verifier, draft, load_config=only_safetensors)
    with pytest.raises(CheckpointFileError, match="Cannot find any model weights"):
        sb.load_draft(inherited)


def test_the_files_that_are_read_decide_not_those_that_were_opened(tmp_path: Path) -> None:
    """The folder holds two drafts; each policy's load config leads to another one, and the plan is made for that."""
    verifier, draft = tiny_verifier(tmp_path / "verifier"), tiny_draft(tmp_path / "draft")
    torch.save(draft_tensors(seed=5), draft / "model.pt")
    pair = sb.open_pair(verifier, draft, draft_load_config={"load_format": "pt"})
    assert torch.equal(sb.load_draft(pair).fc.weight, draft_tensors(seed=5)["fc.weight"])
    assert torch.equal(sb.load_draft(pair, "vllm-0.30.0-mrv2").fc.weight, draft_tensors()["fc.weight"])
    torch.save({"fc.weight": torch.zeros(2)}, draft / "model.pt")
    with pytest.raises((CheckpointError, ConfigError)):
        sb.load_draft(sb.open_pair(verifier, draft, draft_load_config={"load_format": "pt"}))


def test_a_device_of_the_load_config_counts_where_the_call_says_auto(folders: tuple[Path, Path]) -> None:
    pair = sb.open_pair(*folders, load_config={"device": "meta"}, draft_load_config={"device": "cpu"})
    assert sb.load_draft(pair).device.type == "cpu"


# --- download_dir: a hub cache of its own


def hub_cache(cache: Path, folder: Path, repo: str = "org/draft", commit: str = "c" * 40) -> Path:
    """`folder` as the hub's client would have left it in `cache`."""
    home = cache / f"models--{repo.replace('/', '--')}"
    shutil.copytree(folder, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    return cache


def test_a_draft_in_its_own_download_dir(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "everyone"))
    own = hub_cache(tmp_path / "own", folders[1])
    pair = sb.open_pair(folders[0], "org/draft", draft_load_config={"download_dir": str(own)})
    assert pair.draft.revision == "c" * 40 and pair.draft.path.is_relative_to(own)
    assert torch.equal(sb.load_draft(pair).fc.weight, draft_tensors()["fc.weight"])
    with pytest.raises(DownloadError, match="org/draft"):
        sb.load_draft(pair, "vllm-0.30.0-mrv2")
    hub_cache(tmp_path / "everyone", write(tmp_path / "other", draft_config(), draft_tensors(seed=9)))
    stale = sb.load_draft(pair, "vllm-0.30.0-mrv2")
    assert torch.equal(stale.fc.weight, draft_tensors(seed=9)["fc.weight"]), "another copy, from another place"


def test_a_local_folder_is_read_where_it_lies(folders: tuple[Path, Path], tmp_path: Path) -> None:
    pair = sb.open_pair(*folders, draft_load_config={"download_dir": str(tmp_path / "nowhere")})
    assert torch.equal(sb.load_draft(pair).fc.weight, draft_tensors()["fc.weight"])
    assert "local folder" in sb.resolve(pair).settings["download_dir"].note


def test_a_pair_without_load_configs_has_defaults(folders: tuple[Path, Path]) -> None:
    pair = sb.open_pair(*folders)
    assert Pair(pair.verifier, pair.draft) == pair
    assert replace(pair, draft_load=SENTINEL) != pair

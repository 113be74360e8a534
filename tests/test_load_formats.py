"""Load formats: which files count, in which order tensors come, what pickles may hold, and that every way gives the same bytes."""

from __future__ import annotations

import collections
import json
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import draft_config, draft_tensors, tiny_draft, tiny_verifier, verifier_config, verifier_tensors
from torch import Tensor

import specbench as sb
from specbench.checkpoint import load_formats, numpy_cache, pickles
from specbench.checkpoint.files import TensorInfo, read_tensor
from specbench.checkpoint.load_config import LoadConfig
from specbench.checkpoint.load_formats import WeightSource, fill_dummy, headers, weights
from specbench.checkpoint.weight_files import weight_files
from specbench.errors import CheckpointError, CheckpointFileError, CheckpointKeyError, ConfigError

SEVERAL: dict[str, Tensor] = {
    "b.weight": torch.randn(5, 3), "a.weight": torch.randn(4, 4).to(torch.bfloat16), "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3, dtype=torch.int64), "empty": torch.empty(0, 4), "scale": torch.randn(6).to(torch.float8_e4m3fn),
    "half": torch.randn(3).half(), "packed": torch.arange(-3, 3, dtype=torch.int32),
}  # fmt: skip


def same(one: Tensor, two: Tensor) -> bool:
    same_kind = one.dtype == two.dtype and one.shape == two.shape
    return same_kind and torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def read(folder: Path, **config: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights(folder, LoadConfig(**config))}


def shards(folder: Path, tensors: dict[str, Tensor], suffix: str, count: int = 3) -> dict[str, str]:
    """Tensors dealt out over `count` files with an index; returns its weight map."""
    stem, index = (
        ("model", "model.safetensors.index.json") if suffix == "safetensors" else ("pytorch_model", "pytorch_model.bin.index.json")
    )
    weight_map = {}
    for i in range(count):
        file = f"{stem}-{i + 1:05d}-of-{count:05d}.{suffix}"
        part = {name: tensor for j, (name, tensor) in enumerate(tensors.items()) if j % count == i}
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


# --- which files count


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("load_format", "there", "chosen"),
    [
        ("auto", ["model.safetensors", "pytorch_model.bin", "model.pt"], ["model.safetensors"]),
        ("hf", ["pytorch_model.bin", "model.pt"], ["pytorch_model.bin"]),
        ("auto", ["model.pt", "optimizer.pt", "scheduler.pt", "scaler.pt"], ["model.pt"]),
        ("safetensors", ["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        ("pt", ["model.safetensors", "pytorch_model.bin", "model.pt"], ["model.pt"]),
        ("npcache", ["model.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]),
        ("auto", ["pytorch_model.bin", "training_args.bin", "optimizer.bin", "notes.safetensors.json"], ["pytorch_model.bin"]),
        ("auto", ["pytorch_model.bin", "model.safetensors.partial", ".model.safetensors", "safetensors"], ["pytorch_model.bin"]),
        ("auto", ["model-2.safetensors", "model-10.safetensors", "model-1.safetensors"], [f"model-{i}.safetensors" for i in (1, 2, 10)]),
        ("auto", ["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        ("dummy", ["model.safetensors"], []),
    ],
)
def test_files_by_exact_names(tmp_path: Path, load_format: str, there: list[str], chosen: list[str]) -> None:
    files = weight_files(touch(tmp_path, "config.json", *there), load_format)
    assert [file.name for file in files.files] == chosen
    counted = {file.name for file in (*files.files, *files.left_out)}
    assert counted <= set(there) - {"notes.safetensors.json", "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt"}


def test_a_folder_called_like_weights_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert weight_files(touch(tmp_path, "pytorch_model.bin"), "auto").kind == ".bin"


@pytest.mark.parametrize("load_format", ["safetensors", "fastsafetensors", "runai_streamer", "pt", "npcache"])
def test_nothing_for_a_format_says_what_is_there(tmp_path: Path, load_format: str) -> None:
    other = "pytorch_model.bin" if load_format != "npcache" else "model.safetensors"
    with pytest.raises(CheckpointFileError, match=f"Cannot find any model weights with `{tmp_path}`: load_format '{load_format}'.*{other}"):
        weights(touch(tmp_path, other, "config.json"), LoadConfig(load_format=load_format))


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match=r"'auto' reads \*.safetensors, \*.bin, \*.pt; there: training_args.bin"):
        weight_files(touch(tmp_path, "training_args.bin"), "auto")


def test_both_kinds_safetensors_are_used_and_the_other_is_reported(tmp_path: Path) -> None:
    folder = tiny_draft(tmp_path / "draft")
    torch.save(draft_tensors() | {"fc.weight": torch.zeros(64, 192)}, folder / "pytorch_model.bin")
    pair = sb.open_pair(tiny_verifier(tmp_path / "verifier"), folder)
    assert pair.draft.note == "not read: pytorch_model.bin; .safetensors weights are used"
    assert sb.resolve(pair).settings["weights"].note == pair.draft.note
    assert torch.equal(sb.load_draft(pair).fc.weight, draft_tensors()["fc.weight"])


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_beside_an_index_exactly_its_files(tmp_path: Path, suffix: str) -> None:
    weight_map = shards(tmp_path, SEVERAL, suffix)
    stray = tmp_path / f"stray.{suffix}"
    save_file({"a.weight": torch.ones(1)}, stray) if suffix == "safetensors" else torch.save({"a.weight": torch.ones(1)}, stray)
    source = weights(tmp_path, LoadConfig())
    assert [file.name for file in source.files.files] == sorted(set(weight_map.values())) and source.files.left_out == (stray,)
    assert all(same(tensor, SEVERAL[name]) for name, tensor in source) and set(source.headers()) == set(SEVERAL)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("damage", ["missing", "empty", "lying index", "outside"])
def test_an_index_is_checked_both_ways(tmp_path: Path, suffix: str, damage: str) -> None:
    weight_map = shards(tmp_path, SEVERAL, suffix)
    second = tmp_path / sorted(set(weight_map.values()))[1]
    expected = second.name
    if damage == "missing":
        second.unlink()
    elif damage == "empty":
        second.write_bytes(b"")
    else:
        expected = "not.there" if damage == "lying index" else "outside the checkpoint folder"
        weight_map["not.there"] = second.name if damage == "lying index" else "../elsewhere.bin"
        next(tmp_path.glob("*.index.json")).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointFileError, match=expected):
        headers(weight_files(tmp_path, "auto"))


# --- order and bytes


def test_safetensors_come_file_by_file_and_sorted_within_as_safetensors_gives_them(tmp_path: Path) -> None:
    shards(tmp_path, SEVERAL, "safetensors")
    expected = []
    for file in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            expected += list(opened.keys())
    assert [name for name, _ in weights(tmp_path, LoadConfig())] == expected != sorted(expected)


def test_pickles_come_in_the_order_of_their_state_dict(tmp_path: Path) -> None:
    shards(tmp_path, SEVERAL, "bin", count=2)
    names = list(SEVERAL)
    assert [name for name, _ in weights(tmp_path, LoadConfig())] == names[::2] + names[1::2]


THREADED = {"enable_multithread_load": True, "num_threads": 3}
WAYS: dict[str, dict[str, Any]] = {
    "lazy": {"safetensors_load_strategy": "lazy"},
    "eager": {"safetensors_load_strategy": "eager"},
    "prefetch": {"safetensors_load_strategy": "prefetch", "safetensors_prefetch_block_size": 100, "safetensors_prefetch_num_threads": 2},
    "threads": {"model_loader_extra_config": THREADED},
    "safetensors": {"load_format": "safetensors"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
def test_every_way_gives_the_bytes_of_safetensors(tmp_path: Path, way: str, count: int) -> None:
    shards(tmp_path, SEVERAL, "safetensors", count)
    got = read(tmp_path, **WAYS[way])
    assert got.keys() == SEVERAL.keys() and all(same(got[name], SEVERAL[name]) for name in SEVERAL)


@pytest.mark.parametrize("way", [*WAYS, "bin", "pt", "npcache", "bin threads"])
def test_every_way_loads_the_same_draft(tmp_path: Path, way: str) -> None:
    verifier, folder = tiny_verifier(tmp_path / "verifier"), tiny_draft(tmp_path / "draft")
    plain = sb.load_draft(sb.open_pair(verifier, folder)).state_dict()
    config = WAYS.get(way, {"model_loader_extra_config": THREADED} if "threads" in way else {})
    if way not in WAYS:
        (folder / "model.safetensors").unlink()
        torch.save(draft_tensors(), folder / ("model.pt" if way == "pt" else "pytorch_model.bin"))
        config = config | ({"load_format": way} if way in ("pt", "npcache") else {})
    loaded = sb.load_draft(sb.open_pair(verifier, folder, draft_load_config=config)).state_dict()
    assert plain.keys() == loaded.keys() and all(same(plain[name], loaded[name]) for name in plain)


def test_a_lazy_load_reads_straight_into_place(tmp_path: Path) -> None:
    save_file(SEVERAL, tmp_path / "model.safetensors")
    stored = dict(weights(tmp_path, LoadConfig()).stored())
    assert all(isinstance(item, TensorInfo) and same(read_tensor(item), SEVERAL[name]) for name, item in stored.items())


def test_eager_reads_misaligned_tensors_too(tmp_path: Path) -> None:
    entry = {"flag": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}}
    header, values = json.dumps(entry).encode(), np.array([1.5, -2.0], "<f4")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1\0\1" + values.tobytes())
    assert read(tmp_path, safetensors_load_strategy="eager")["x"].tolist() == [1.5, -2.0]


def test_prefetch_stops_with_its_reader(tmp_path: Path) -> None:
    save_file(SEVERAL, tmp_path / "model.safetensors")
    items = weights(tmp_path, LoadConfig(safetensors_load_strategy="prefetch", safetensors_prefetch_block_size=1)).stored()
    next(items)
    items.close()  # returns: the threads are told to stop


def test_one_tensor_by_name(tmp_path: Path) -> None:
    shards(tmp_path, SEVERAL, "safetensors")
    (tmp_path / "pickled").mkdir()
    shards(tmp_path / "pickled", SEVERAL, "bin")
    for folder in (tmp_path, tmp_path / "pickled"):
        source = weights(folder, LoadConfig())
        assert all(same(source.read(name), tensor) for name, tensor in SEVERAL.items())
        with pytest.raises(CheckpointError, match="holds no 'nothing'"):
            source.read("nothing")


# --- pickles


def pickled_draft(folder: Path, tensors: Any, name: str = "pytorch_model.bin", **options: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(draft_config()))
    torch.save(tensors, folder / name, **options)
    return folder


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path, zipped: bool) -> None:
    marker = tmp_path / "ran"
    folder = pickled_draft(tmp_path / "draft", {"fc.weight": Payload(marker)}, _use_new_zipfile_serialization=zipped)
    for step in (lambda: headers(weight_files(folder, "auto")), lambda: read(folder), lambda: read(folder, load_format="npcache")):
        with pytest.raises(CheckpointError, match="pytorch_model.bin asks for more than tensors.*mkdir.*refused"):
            step()
    with pytest.raises(CheckpointError, match="refused"):
        sb.open_pair(tiny_verifier(tmp_path / "verifier"), folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists(), "the payload would have run"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no whole torch file"),
        (b"garbage", "no whole torch file"),
        ({"state_dict": {"fc.weight": torch.ones(1)}}, "holds 'state_dict': dict"),
        ({"epoch": 3, "fc.weight": torch.ones(1)}, "holds 'epoch': int"),
        ([torch.ones(1)], "holds a list"),
        ({"fc.weight": torch.ones(2).to_sparse()}, "sparse"),
        ({"fc.weight": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        (collections.OrderedDict({1: torch.ones(1)}), "holds 1: Tensor"),
    ],
    ids=["empty", "garbage", "nested", "number", "list", "sparse", "complex", "key"],
)
def test_what_is_no_state_dict_is_refused_by_name(tmp_path: Path, content: Any, words: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises((CheckpointError, CheckpointFileError), match=f"pytorch_model.bin.*{words}"):
        headers(weight_files(tmp_path, "auto"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_cut_short(tmp_path: Path, zipped: bool) -> None:
    folder = pickled_draft(tmp_path / "draft", draft_tensors(), _use_new_zipfile_serialization=zipped)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointFileError, match="no whole torch file"):
        read(folder)


def test_names_and_shapes_of_a_pickle_come_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pickled_draft(tmp_path / "draft", draft_tensors())
    calls = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: calls.append(options) or real(*args, **options))
    pair = sb.open_pair(tiny_verifier(tmp_path / "verifier"), folder)
    assert calls == [{"map_location": "meta", "weights_only": True, "mmap": True}]
    assert {name: info.shape for name, info in pair.draft.tensors.items()} == {n: tuple(t.shape) for n, t in draft_tensors().items()}
    assert "cannot be inspected without unpickling" in pair.draft.note and "pytorch_model.bin" in pair.draft.note
    assert pair.draft.note == sb.resolve(pair).settings["weights"].note
    with pytest.raises(CheckpointError, match="no byte ranges"):
        read_tensor(pair.draft.tensors["fc.weight"])
    sb.load_draft(pair)
    assert all(options["weights_only"] is True for options in calls), "never the unpickler that runs code"


def test_pickled_verifiers_and_strided_or_shared_tensors(tmp_path: Path) -> None:
    config = verifier_config()
    tensors = verifier_tensors(config)
    stored = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    folder = pickled_draft(tmp_path / "verifier", stored)
    (folder / "config.json").write_text(json.dumps(config))
    draft = tiny_draft(tmp_path / "draft")
    pair = sb.open_pair(folder, draft)
    loaded = sb.load_verifier(pair)
    assert torch.equal(loaded.layers[3].mlp.down_proj.weight, tensors["model.layers.3.mlp.down_proj.weight"])
    assert torch.equal(sb.load_draft(pair).embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_a_pickled_draft_meets_the_engines_key_error_in_its_own_order(tmp_path: Path) -> None:
    from tiny import tiny_w4a16_verifier

    pair = sb.open_pair(tiny_w4a16_verifier(tmp_path / "verifier"), pickled_draft(tmp_path / "draft", draft_tensors()))
    with pytest.raises(CheckpointKeyError) as caught:
        sb.load_draft(pair, "vllm-0.11.0")
    assert caught.value.args[0] == "layers.0.self_attn.qkv_proj.weight", "its state_dict begins with fc, then q_proj"


def test_strict_checks_of_a_pickle_come_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pickled_draft(tmp_path / "draft", draft_tensors() | {"norm.weight": torch.ones(63)})
    pair = sb.open_pair(tiny_verifier(tmp_path / "verifier"), folder)
    monkeypatch.setattr(load_formats, "read_pickled", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=r"norm.weight: stored \[63\], expected \[64\]"):
        sb.load_draft(pair)


def test_map_location_reaches_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pickled_draft(tmp_path / "draft", draft_tensors())
    calls = []
    real = torch.load
    monkeypatch.setattr(pickles.torch, "load", lambda *args, **options: calls.append(options["map_location"]) or real(*args, **options))
    read(folder, pt_load_map_location={"cuda:0": "cpu"})
    assert calls == [{"cuda:0": "cpu"}]


# --- numpy cache


def test_the_numpy_cache_is_written_once_and_made_again_when_its_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(SEVERAL, tmp_path / "pytorch_model.bin")
    loads = []
    real = pickles.load_state_dict
    monkeypatch.setattr(pickles, "load_state_dict", lambda *args: loads.append(args) or real(*args))
    first = read(tmp_path, load_format="npcache")
    assert len(loads) == 2 and list(first) == list(SEVERAL), "headers, then data"
    second = read(tmp_path, load_format="npcache")
    assert len(loads) == 2 and all(same(first[n], SEVERAL[n]) and same(second[n], SEVERAL[n]) for n in SEVERAL)
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert list(read(tmp_path, load_format="npcache")) == ["a.weight"]
    assert {path.name for path in tmp_path.iterdir()} == {"pytorch_model.bin", numpy_cache.FOLDER}, "nothing half-written stays"


def test_hostile_tensor_names_become_no_paths(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    torch.save({"../../evil": torch.ones(2), "/etc/x": torch.ones(1)}, folder / "pytorch_model.bin")
    assert set(read(folder, load_format="npcache")) == {"../../evil", "/etc/x"}
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


def test_the_numpy_cache_takes_no_place_of_something_else(tmp_path: Path) -> None:
    torch.save(SEVERAL, tmp_path / "pytorch_model.bin")
    (tmp_path / numpy_cache.FOLDER).mkdir()
    with pytest.raises(CheckpointFileError, match="no numpy cache"):
        read(tmp_path, load_format="npcache")


def test_a_cache_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(SEVERAL, tmp_path / "pytorch_model.bin")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy_cache.np, "save", full)
    with pytest.raises(CheckpointFileError, match="cannot be written.*No space"):
        read(tmp_path, load_format="npcache")
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


# --- dummy, and formats that need a package


def test_dummy_has_no_tensors_to_iterate_and_depends_on_shapes_only(tmp_path: Path) -> None:
    source = weights(touch(tmp_path, "model.safetensors"), LoadConfig(load_format="dummy"))
    assert source.dummy and source.headers() == {}
    with pytest.raises(ConfigError, match="fill_dummy"):
        next(source.stored())
    one, two = torch.nn.Linear(8, 4, dtype=torch.bfloat16), torch.nn.Linear(8, 4)
    for module in (one, two):
        fill_dummy(module)
    assert torch.equal(one.weight, two.weight.to(torch.bfloat16)) and float(two.weight.detach().abs().max()) <= 1e-3
    assert len(two.weight.unique()) > 30
    counter = torch.nn.Module()
    counter.register_parameter("n", torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))
    fill_dummy(counter)
    assert counter.n.tolist() == [0, 0, 0]


PACKAGES = {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai_model_streamer"}


@pytest.mark.parametrize("load_format", PACKAGES)
def test_a_missing_package_says_what_to_install(tmp_path: Path, load_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(SEVERAL, tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, PACKAGES[load_format], None)
    with pytest.raises(ConfigError, match=f"'{load_format}' needs the package .*pip install {PACKAGES[load_format].replace('_', '-')}"):
        read(tmp_path, load_format=load_format)


@pytest.mark.parametrize("load_format", PACKAGES)
def test_packages_give_the_same_bytes(tmp_path: Path, load_format: str) -> None:
    pytest.importorskip(PACKAGES[load_format])
    shards(tmp_path, {name: tensor for name, tensor in SEVERAL.items() if tensor.numel()}, "safetensors")
    got = read(tmp_path, load_format=load_format)
    assert all(same(got[name].cpu(), SEVERAL[name]) for name in got) and len(got) == len(SEVERAL) - 1


def test_a_view_that_is_valid_only_until_the_next_is_copied_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streamer hands out views of one buffer, so threads must not run ahead of it."""

    class Streamer:
        def __enter__(self) -> Streamer:
            return self

        def __exit__(self, *_: object) -> None: ...

        def stream_file(self, path: str) -> None:
            with safe_open(path, framework="pt") as opened:
                self.tensors = {name: opened.get_tensor(name) for name in opened.keys()}

        def get_tensors(self) -> Any:
            buffer = torch.empty(1 << 20, dtype=torch.uint8)
            for name, tensor in self.tensors.items():
                view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                yield name, view.copy_(tensor)
                buffer.fill_(255)

    monkeypatch.setitem(sys.modules, "runai_model_streamer", types.SimpleNamespace(SafetensorsStreamer=Streamer))
    pair = sb.open_pair(
        tiny_verifier(tmp_path / "verifier"),
        tiny_draft(tmp_path / "draft"),
        draft_load_config={"load_format": "runai_streamer", "model_loader_extra_config": THREADED},
    )
    plain = sb.load_draft(sb.open_pair(tmp_path / "verifier", tmp_path / "draft")).state_dict()
    loaded = sb.load_draft(pair).state_dict()
    assert all(same(plain[name], loaded[name]) for name in plain)
    assert WeightSource(weight_files(tmp_path / "draft", "auto"), LoadConfig(model_loader_extra_config=THREADED)).threads == 3

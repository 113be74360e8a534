"""Headers, shards, indexes and tensor bytes, held against safetensors' own reading; damaged and hostile files are refused."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from specbench.checkpoint.files import DTYPES, INDEX, TensorInfo, read_header, read_headers, read_into, read_json, read_tensor, total_bytes
from specbench.errors import CheckpointError, CheckpointFileError

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=11)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def raw_file(path, header, data=b""):
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def two_shards(folder):
    save_file({"a": torch.arange(4.0), "c": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.arange(3)}, folder / "two.safetensors")
    return {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@given(entries=st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=5))
def test_headers_and_bytes_agree_with_safetensors(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    tensors = {}
    for name, (dtype, shape) in entries.items():
        whole = torch.empty(shape, dtype=DTYPES[dtype])
        whole.view(-1).view(torch.uint8).random_(0, 2 if dtype == "BOOL" else 256)
        tensors[name] = whole
    save_file(tensors, path, metadata={"format": "pt"})
    infos = read_header(path)
    with safe_open(path, framework="pt") as theirs:
        assert set(infos) == set(theirs.keys())
        for name, info in infos.items():
            piece = theirs.get_slice(name)
            assert (info.dtype, list(info.shape)) == (piece.get_dtype(), piece.get_shape())
    for name, tensor in tensors.items():
        ours = read_tensor(infos[name])
        assert (ours.dtype, ours.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(ours), bits(tensor))
    assert total_bytes(infos) == sum(tensor.nbytes for tensor in tensors.values())


def test_shards_follow_their_index_and_come_sorted(tmp_path):
    weight_map = two_shards(tmp_path)
    write_index(tmp_path, weight_map)
    infos = read_headers(tmp_path)
    assert list(infos) == ["a", "b", "c"]
    assert {name: info.file.name for name, info in infos.items()} == weight_map
    assert read_tensor(infos["b"]).tolist() == [0, 1, 2]


def test_files_without_an_index_are_read_together(tmp_path):
    two_shards(tmp_path)
    assert list(read_headers(tmp_path)) == ["a", "b", "c"]


def test_the_same_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointFileError, match="'a'.*one.safetensors.*two.safetensors"):
        read_headers(tmp_path)


def test_unfinished_downloads_are_not_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "other.safetensors.partial").write_bytes(b"half")
    (tmp_path / "other.safetensors.incomplete").write_bytes(b"half")
    assert list(read_headers(tmp_path)) == ["a"]
    (tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.partial")
    with pytest.raises(CheckpointFileError, match="no .*safetensors file"):
        read_headers(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_file_cut_short_is_refused_wherever_it_ends(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8), "b": torch.ones(8)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointFileError, match="model.safetensors"):
        read_headers(tmp_path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8)}, path)
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    with pytest.raises(CheckpointFileError, match="something follows"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe garbage",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        {"a": None},
        {"a": [1, 2]},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": entry(0, 4) | {"shape": ["1"]}},
        {"a": entry(0, 4) | {"shape": [True]}},
        {"a": entry(0, 4) | {"shape": [-1, -1]}},
        {"a": entry(0, 4) | {"shape": 1}},
        {"a": entry(0, 4) | {"dtype": ["F32"]}},
        {"a": entry(0, 4) | {"dtype": None}},
        {"a": entry(0, 4) | {"data_offsets": [0.0, 4.0]}},
        {"a": entry(0, 4) | {"data_offsets": ["0", "4"]}},
        {"a": entry(0, 4) | {"data_offsets": [-4, 0]}},
        {"a": entry(0, 4) | {"data_offsets": [4, 0]}},
        {"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}},
        {"a": entry(0, 4) | {"data_offsets": [0, 2**63]}},
    ],
    ids=lambda header: str(header)[:60],
)  # fmt: skip
def test_a_garbage_header_is_refused_by_name(tmp_path, header):
    path = raw_file(tmp_path / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointFileError, match="model.safetensors"):
        read_header(path)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass


def test_a_header_longer_than_its_file_is_refused_before_it_is_allocated(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointFileError, match="not a whole safetensors file"):
        read_header(path)


def test_tensors_that_overlap_are_refused_and_named(tmp_path):
    path = raw_file(tmp_path / "model.safetensors", {"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12)
    with pytest.raises(CheckpointFileError, match="'b'.*'a'"):
        read_header(path)


def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path):
    path = raw_file(tmp_path / "model.safetensors", {"a": entry(0, 4, dtype="F6_E3M2")}, b"\0" * 4)
    with pytest.raises(CheckpointFileError, match="'a' has dtype 'F6_E3M2'; readable: .*BF16"):
        read_header(path)


def test_a_size_that_contradicts_shape_and_dtype_is_refused(tmp_path):
    path = raw_file(tmp_path / "model.safetensors", {"a": entry(0, 8, shape=[3])}, b"\0" * 8)
    with pytest.raises(CheckpointFileError, match="needs 12 bytes, its header gives 8"):
        read_header(path)


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_a_missing_or_empty_shard_is_refused_by_name(tmp_path, content):
    write_index(tmp_path, two_shards(tmp_path))
    (tmp_path / "two.safetensors").unlink()
    if content is not None:
        (tmp_path / "two.safetensors").write_bytes(content)
    with pytest.raises(CheckpointFileError, match="two.safetensors.*fetch it again"):
        read_headers(tmp_path)


@pytest.mark.parametrize(("name", "shard"), [("b", "one.safetensors"), ("z", "two.safetensors")], ids=["other shard", "no such tensor"])
def test_an_index_that_lies_is_refused(tmp_path, name, shard):
    write_index(tmp_path, two_shards(tmp_path) | {name: shard})
    with pytest.raises(CheckpointFileError, match=f"says that {shard} holds '{name}'"):
        read_headers(tmp_path)


@pytest.mark.parametrize("shard", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ".", ""])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, shard):
    inside = tmp_path / "checkpoint"
    (inside / "sub").mkdir(parents=True)
    weight_map = two_shards(inside)
    for outside in (tmp_path, inside / "sub"):
        save_file({"z": torch.ones(1)}, outside / "one.safetensors")
    write_index(inside, weight_map | {"z": shard})
    with pytest.raises(CheckpointFileError, match="outside the checkpoint folder"):
        read_headers(inside)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\xff"])
def test_a_damaged_index_is_refused_by_name(tmp_path, text):
    two_shards(tmp_path)
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointFileError, match=INDEX):
        read_headers(tmp_path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointFileError, match="model.safetensors"):
        read_headers(tmp_path)


def test_read_into_converts_and_fills_views_of_any_layout(tmp_path):
    stored = torch.randn(4, 6)
    save_file({"a": stored}, tmp_path / "m.safetensors")
    info = read_header(tmp_path / "m.safetensors")["a"]

    same = torch.empty(4, 6)
    read_into(info, same)
    assert torch.equal(same, stored)

    narrower = torch.empty(4, 6, dtype=torch.bfloat16)
    read_into(info, narrower)
    assert torch.equal(narrower, stored.bfloat16())

    fused = torch.full((9, 6), 7.0)  # a shard of a fused parameter: rows 3..6, contiguous
    read_into(info, fused[3:7])
    assert torch.equal(fused[3:7], stored)
    assert bool((fused[:3] == 7).all() and (fused[7:] == 7).all())

    columns = torch.full((4, 10), 7.0)  # not contiguous
    read_into(info, columns[:, 2:8])
    assert torch.equal(columns[:, 2:8], stored)
    assert bool((columns[:, :2] == 7).all() and (columns[:, 8:] == 7).all())

    turned = torch.empty(6, 4).t()
    read_into(info, turned)
    assert torch.equal(turned, stored)


def test_read_into_takes_scalars_empty_tensors_and_parameters(tmp_path):
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False, True])}
    save_file(tensors, tmp_path / "m.safetensors")
    for name, info in read_header(tmp_path / "m.safetensors").items():
        out = torch.nn.Parameter(torch.empty_like(tensors[name]), requires_grad=False)
        read_into(info, out.data)
        assert torch.equal(out, tensors[name])


def test_read_into_refuses_another_shape_even_of_equal_size(tmp_path):
    save_file({"a": torch.ones(4, 6)}, tmp_path / "m.safetensors")
    info = read_header(tmp_path / "m.safetensors")["a"]
    with pytest.raises(CheckpointError, match=r"a in m.safetensors is \[4, 6\]; its place is \[6, 4\]"):
        read_into(info, torch.empty(6, 4))


def test_a_file_that_shrinks_after_its_header_was_read_is_noticed(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(64)}, path)
    info = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointFileError, match="ended while 'a' was read"):
        read_tensor(info)


def test_reading_matches_load_file_at_any_offset(tmp_path):
    tensors = {f"t{i}": torch.randn(i + 1) for i in range(20)}
    save_file(tensors, tmp_path / "m.safetensors")
    theirs = load_file(tmp_path / "m.safetensors")
    for name, info in read_headers(tmp_path).items():
        assert isinstance(info, TensorInfo)
        assert torch.equal(read_tensor(info), theirs[name])


@pytest.mark.parametrize(
    ("text", "message"), [(None, "missing"), ("{", "not JSON"), ("[1]", "holds a list"), ("\xff", "not JSON"), ("", "not JSON")]
)
def test_read_json_refuses_what_is_no_object(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointFileError, match=message):
        read_json(path)


def test_a_tensor_that_the_index_forgot_is_not_dropped(tmp_path):
    weight_map = two_shards(tmp_path)
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != "b"} | {"a": "one.safetensors"})
    assert list(read_headers(tmp_path)) == ["a", "c"], "its file is not named at all"
    write_index(tmp_path, {name: file for name, file in weight_map.items() if name != "c"})
    assert list(read_headers(tmp_path)) == ["a", "b", "c"]

"""Hub ids that cannot be had: each failure says what to do, and nothing half-written or hostile is used."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path

import hub_client as do
import pytest
import torch
from hub_server import TOKEN, shards
from safetensors.torch import load_file, save_file
from tiny import tiny_draft, write

from specbench.checkpoint.hub_errors import explained
from specbench.errors import CheckpointError, CheckpointFileError, ConfigError, DownloadError

pytest_plugins = ("hub_fixtures",)
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"


def test_offline_without_a_cache_says_what_is_missing(hub, client, offline, pair):
    verifier, draft, *_ = pair
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set.*fetch it once without HF_HUB_OFFLINE, or give a local folder"):
        offline(do.open_one, verifier)
    client(do.open_two, verifier, draft)  # configs and index arrive, weights do not
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE is set.*model-0000\d-of-00005.safetensors"):
        offline(do.open_one, verifier)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        offline(do.open_one, draft)


def test_a_hub_that_does_not_answer_is_replaced_by_the_cache_with_a_warning(hub, client, pair):
    _, draft, *_ = pair
    client(do.open_two, str(pair[2]), draft)
    client(do.load, "draft")
    hub.fault = lambda *_: "drop"
    opened = client(do.open_one, draft)
    assert "cannot be reached" in opened["warnings"][0] and opened["revision"] in opened["warnings"][0]
    hub.fault = lambda *_: 503
    assert "HfHubHTTPError: " in client(do.open_one, draft)["warnings"][0]


def test_a_hub_that_does_not_answer_and_no_cache(hub, client, pair):
    hub.fault = lambda *_: "drop"
    with pytest.raises(DownloadError, match=f"could not be fetched from {hub.url}.*check the network"):
        client(do.open_one, pair[1])
    hub.fault = lambda *_: "stall"
    with pytest.raises(DownloadError, match="did not answer within 1 s.*HF_HUB_DOWNLOAD_TIMEOUT"):
        client(do.open_one, pair[1])
    hub.fault = lambda *_: 503
    with pytest.raises(DownloadError, match="HTTP 503.*try again later"):
        client(do.open_one, pair[1])
    hub.fault = lambda *_: 429
    with pytest.raises(DownloadError, match="HTTP 429.*set HF_TOKEN"):
        client(do.open_one, pair[1])


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "does not fit on the disk.*free some space"),
        (OSError("Consistency check failed: file should be of size 5\nmore"), r"\(OSError: Consistency check.*size 5\); check the network"),
        (RuntimeError("transfer broke"), "RuntimeError: transfer broke"),
    ],
    ids=["full", "short", "transfer"],
)
def test_failures_of_a_download_say_what_to_do(error, advice):
    with (
        pytest.raises(DownloadError, match=f"model.safetensors of org/x at 1234 .*{advice}"),
        explained("org/x", "1234", "model.safetensors"),
    ):
        raise error


@pytest.mark.parametrize("name", ["./missing", "/missing/here", "a/b/c", "-x/y", "org/name.git", "a--b/c", "mo del"])
def test_what_is_neither_a_folder_nor_a_hub_id(hub, client, name):
    with pytest.raises(ConfigError, match="neither a folder here nor a hub id"):
        client(do.open_one, name)
    assert hub.seen == []


def test_a_repository_that_is_not_there(hub, client):
    with pytest.raises(DownloadError, match="'org/nothing' is no folder here, and the hub has no such repository.*check the name"):
        client(do.open_one, "org/nothing")


def test_a_repository_without_a_checkpoint(hub, client, tmp_path):
    (tmp_path / "README.md").write_text("words")
    hub.push("org/words", tmp_path)
    with pytest.raises(DownloadError, match="org/words has no config.json"):
        client(do.open_one, "org/words")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_text("x")
    hub.push("org/words", tmp_path)
    with pytest.raises(CheckpointFileError, match="model.gguf"):
        client(do.open_one, "org/words")


def test_gated(hub, client, pair):
    draft = pair[1]
    hub.repos[draft].gated = True
    with pytest.raises(DownloadError, match="gated and no token was sent: accept its licence.*HF_TOKEN"):
        client(do.open_one, draft)
    client(do.token, "hf_of_someone_else")
    with pytest.raises(DownloadError, match="gated and the token that was sent has no access"):
        client(do.open_one, draft)
    client(do.token, TOKEN)
    client(do.open_two, str(pair[2]), draft)
    client(do.load, "draft")
    client(do.token, None)
    stored = [seen for seen in hub.seen if seen.path.startswith("/blob/")]
    assert stored and not any(seen.token for seen in stored)  # a token stays with the hub


def test_a_download_that_stops_leaves_nothing_behind(hub, client, pair):
    _, draft, *_ = pair
    client(do.open_two, str(pair[2]), draft)
    cut = []

    def fault(method, path, file):
        if path.startswith("/blob/"):
            cut.append(file)
            return 1000 if len(cut) == 1 else 403
        return None

    hub.fault = fault
    with pytest.raises(DownloadError, match="refused model.safetensors of .*HTTP 403"):
        client(do.load, "draft")
    hub.forget()
    snapshot = client(do.open_one, draft)
    assert "model.safetensors" not in snapshot["files"]
    blobs = snapshot["path"].parent.parent / "blobs"
    assert max(blob.stat().st_size for blob in blobs.iterdir()) < 1000
    loaded = client(do.load, "draft")
    client(do.open_two, str(pair[2]), str(pair[3]))
    assert client(do.load, "draft") == loaded


def test_a_download_that_is_cut_once_is_taken_up_again(hub, client, pair):
    _, draft, *_ = pair
    client(do.open_two, str(pair[2]), draft)
    hub.forget()
    ranges = []

    def fault(method, path, file):
        if path.startswith("/blob/"):
            ranges.append(file)
        return 1000 if ranges == [file] else None

    hub.fault = fault
    loaded = client(do.load, "draft")
    assert len(ranges) == 2
    client(do.open_two, str(pair[2]), str(pair[3]))
    assert client(do.load, "draft") == loaded


def test_a_file_that_is_not_what_its_header_said(hub, client, pair, tmp_path):
    draft = pair[1]
    client(do.open_two, str(pair[2]), draft)
    changed = {name: tensor.half() for name, tensor in load_file(pair[3] / "model.safetensors").items()}
    save_file(changed, tmp_path / "other.safetensors")
    commit = hub.repos[draft].branches["main"]
    hub.repos[draft].commits[commit]["model.safetensors"] = tmp_path / "other.safetensors"
    with pytest.raises(CheckpointFileError, match="another header than the hub sent"):
        client(do.load, "draft")
    with (tmp_path / "longer.safetensors").open("wb") as longer:
        longer.write((pair[3] / "model.safetensors").read_bytes() + b"more")
    commit = hub.push(draft, pair[3])
    hub.repos[draft].commits[commit]["model.safetensors"] = tmp_path / "longer.safetensors"
    client(do.open_two, str(pair[2]), draft)
    with pytest.raises(CheckpointFileError, match="something follows"):
        client(do.load, "draft")


@pytest.mark.parametrize("place", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "a\\b.safetensors"])
def test_an_index_cannot_lead_out(hub, client, tmp_path, place):
    folder = shards(tiny_draft(tmp_path / "draft"), 2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["fc.weight"] = place
    (folder / INDEX).write_text(json.dumps(index))
    hub.push("org/leads-out", folder)
    with pytest.raises(CheckpointFileError, match="outside the checkpoint folder; refused"):
        client(do.open_one, "org/leads-out")
    assert not [seen for seen in hub.seen if seen.file.endswith(WEIGHTS) or seen.file == "passwd"]


def test_an_index_that_lies(hub, client, tmp_path):
    folder = shards(tiny_draft(tmp_path / "draft"), 2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    hub.push("org/lies", folder)
    with pytest.raises(CheckpointFileError, match="'ghost.weight'.*its header does not"):
        client(do.open_one, "org/lies")
    index["weight_map"]["ghost.weight"] = "model-00003-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    hub.push("org/lies", folder)
    with pytest.raises(CheckpointFileError, match="model-00003-of-00002.safetensors is missing"):
        client(do.open_one, "org/lies")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08", struct.pack("<Q", 8) + b"garbage!", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"[]",
     struct.pack("<Q", 12) + b'{"a": null} '],
    ids=["empty", "short", "no json", "too long", "a list", "no entry"],
)  # fmt: skip
def test_a_damaged_header(hub, client, tmp_path, content):
    folder = tiny_draft(tmp_path / "draft")
    (folder / "model.safetensors").write_bytes(content)
    hub.push("org/damaged", folder)
    with pytest.raises(CheckpointFileError, match="model.safetensors"):
        client(do.open_one, "org/damaged")


def test_pickled_weights_that_ask_for_code_are_refused(hub, client, tmp_path):
    folder = write(tmp_path / "draft", {}, {"a": torch.zeros(1)})
    (folder / "model.safetensors").unlink()
    torch.save({"a": Path("/")}, folder / "pytorch_model.bin")
    hub.push("org/evil", folder)
    with pytest.raises(CheckpointError, match="could run code; refused"):
        client(do.open_one, "org/evil")

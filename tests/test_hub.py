"""Hub ids, with the real client against a hub on this machine."""

from __future__ import annotations

import errno
import json
import shutil
import struct
from pathlib import Path

import hub_client as do
import pytest
import torch
from hub_client import Client
from hub_server import TOKEN, HubServer, shards
from safetensors.torch import load_file, save_file
from tiny import draft_tensors, tiny_draft, tiny_verifier, write

from specbench.checkpoint.hub_errors import explained
from specbench.errors import CheckpointError, CheckpointFileError, ConfigError, DownloadError

INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(server):
    server.forget()
    server.sizes = True
    return server


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hub") / "home"


@pytest.fixture(scope="module")
def client(server, home):
    client = Client(HF_ENDPOINT=server.url, HF_HOME=str(home), HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1")
    yield client
    client.close()


@pytest.fixture(scope="module")
def offline(server, home):
    client = Client(HF_ENDPOINT=server.url, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    yield client
    client.close()


@pytest.fixture
def pair(hub, tmp_path, request):
    """Repositories of this test alone, so that the cache holds nothing of them: a verifier of five files, and a draft of one."""
    name = request.node.name.partition("[")[0][-60:]
    verifier, draft = shards(tiny_verifier(tmp_path / "verifier"), 5), tiny_draft(tmp_path / "draft")
    (verifier / "generation_config.json").write_text("{}")
    (verifier / "tokenizer_config.json").write_text("{}")
    (verifier / "tokenizer.json").write_text("{}")
    (verifier / "modeling_evil.py").write_text("raise SystemExit('code ran')")
    (verifier / "README.md").write_text("not needed")
    (verifier / "original").mkdir()
    shutil.copy(draft / "model.safetensors", verifier / "original" / "consolidated.safetensors")
    hub.push(f"org/{name}-verifier", verifier)
    hub.push(f"org/{name}-draft", draft)
    return f"org/{name}-verifier", f"org/{name}-draft", verifier, draft


def header_bytes(*folders: Path) -> int:
    files = [file for folder in folders for file in folder.glob("*.safetensors")]
    return sum(8 + struct.unpack("<Q", file.read_bytes()[:8])[0] for file in files)


def test_opening_reads_headers_and_no_weights(hub, client, pair):
    verifier, draft, *folders = pair
    commits = client(do.open_two, verifier, draft)
    assert commits == (hub.repos[verifier].branches["main"], hub.repos[draft].branches["main"])
    # Tiny files fit into the range of one header request; each was asked for once, and nothing but that range.
    asked = [seen for seen in hub.seen if seen.file.endswith(WEIGHTS) and seen.status != 302]
    assert [seen.status for seen in asked] == [206] * 6
    assert all(seen.sent <= 100_001 for seen in asked)
    assert len(hub.seen) <= 32
    assert client(do.settings)["target_hidden_size"] == 64
    snapshot = client(do.open_one, verifier)
    assert snapshot["files"] == ["config.json", "generation_config.json", INDEX]
    assert snapshot["names"] == sorted(json.loads((folders[0] / INDEX).read_text())["weight_map"])


def test_headers_are_those_of_the_files(hub, client, pair):
    from specbench.checkpoint.files import read_headers

    verifier, draft, *folders = pair
    for repo, folder in ((verifier, folders[0]), (draft, folders[1])):
        client(do.open_one, repo)
        expected = {name: (i.dtype, i.shape, i.file.name, i.begin, i.end) for name, i in read_headers(folder).items()}
        assert client(do.headers, repo) == expected


def test_sizes_are_asked_for_where_the_listing_has_none(hub, client, pair):
    from specbench.checkpoint.files import read_headers

    hub.sizes = False
    client(do.open_one, pair[1])
    assert client(do.headers, pair[1], "fc.weight")["fc.weight"][3] == read_headers(pair[3])["fc.weight"].begin


def test_loading_fetches_what_it_needs_and_gives_the_same_tensors(hub, client, pair):
    verifier, draft, *folders = pair
    client(do.open_two, verifier, draft)
    hub.forget()
    from_hub = client(do.load, "draft")
    fetched = {seen.file for seen in hub.seen if seen.sent and seen.file.endswith(WEIGHTS)}
    at = json.loads((folders[0] / INDEX).read_text())["weight_map"]["model.embed_tokens.weight"]
    assert fetched == {"model.safetensors", at}  # its own, and the one with the embedding that it borrows
    hub.forget()
    verifier_from_hub = client(do.load, "verifier")
    assert len({seen.file for seen in hub.seen if seen.sent and seen.file.endswith(WEIGHTS)}) == 4
    assert {seen.file for seen in hub.seen} >= {"tokenizer.json", "tokenizer_config.json"}
    assert not {seen.file for seen in hub.seen} & {"modeling_evil.py", "README.md", "consolidated.safetensors"}
    hub.forget()
    assert client(do.load, "verifier") == verifier_from_hub
    assert hub.bytes_of(WEIGHTS) == 0
    client(do.open_two, str(folders[0]), str(folders[1]))
    assert (client(do.load, "draft"), client(do.load, "verifier")) == (from_hub, verifier_from_hub)


def test_a_branch_that_moves_after_opening_changes_nothing(hub, client, pair, tmp_path):
    verifier, draft, *_ = pair
    before = client(do.open_two, verifier, draft)
    hub.push(draft, tiny_draft(tmp_path / "newer", seed=7))
    hub.push(verifier, tiny_verifier(tmp_path / "another", seed=8))
    hub.forget()
    loaded = client(do.load, "draft")
    assert not [seen.path for seen in hub.seen if "main" in seen.path]
    client(do.open_two, str(pair[2]), str(pair[3]))
    assert client(do.load, "draft") == loaded
    client(do.open_two, verifier, draft, revision=before[0], draft_revision=before[1])
    assert client(do.load, "draft") == loaded
    after = client(do.open_two, verifier, draft)
    assert not set(after) & set(before)
    assert client(do.load, "draft") != loaded


def test_a_branch_that_moves_while_opening_gives_one_commit(hub, client, pair, tmp_path):
    _, draft, *_ = pair
    newer = tiny_draft(tmp_path / "newer", seed=7, draft_vocab_size=32, hidden_size=64)
    smaller = {name: tensor[:32] if name in ("lm_head.weight", "d2t") else tensor for name, tensor in draft_tensors().items()}
    save_file(smaller, newer / "model.safetensors")

    def move(method, path, file):
        if file == "config.json" and len(hub.repos[draft].commits) == 1:
            hub.push(draft, newer)

    hub.fault = move
    opened = client(do.open_one, draft)
    assert opened["revision"] == hub.repos[draft].branches["main"]
    assert client(do.headers, draft, "lm_head.weight")["lm_head.weight"][1] == (32, 64)


def test_tags_and_branches(hub, client, pair, tmp_path):
    verifier, draft, *_ = pair
    tagged = hub.push(draft, tiny_draft(tmp_path / "tagged", seed=3), branch="v1")
    assert client(do.open_two, verifier, draft, draft_revision="v1")[1] == tagged
    with pytest.raises(DownloadError, match="no revision 'v2'.*branch, tag or whole commit"):
        client(do.open_one, draft, "v2")


def test_offline_uses_the_cache(hub, client, offline, pair):
    verifier, draft, *_ = pair
    client(do.open_two, verifier, draft)
    expected = client(do.load, "draft"), client(do.load, "verifier")
    commits = client(do.open_two, verifier, draft)
    hub.forget()
    assert offline(do.open_two, verifier, draft) == commits
    assert (offline(do.load, "draft"), offline(do.load, "verifier")) == expected
    assert offline(do.open_one, draft, commits[1])["warnings"] == []
    assert hub.seen == []


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


def test_120_files_stay_below_50_requests(hub, client, tmp_path):
    folder = tiny_verifier(tmp_path / "verifier", num_hidden_layers=14)
    parts = shards(folder, 120)
    hub.push("org/many-verifier", parts)
    hub.push("org/many-draft", tiny_draft(tmp_path / "draft"))
    client(do.open_two, "org/many-verifier", "org/many-draft")
    assert client(do.settings)["target_hidden_size"] == 64
    assert len(hub.seen) < 50
    asked = {seen.file for seen in hub.seen if "-of-00120" in seen.file}
    assert len(asked) <= 1
    loaded = client(do.load, "verifier")
    client(do.open_two, str(parts), str(tmp_path / "draft"))
    assert client(do.load, "verifier") == loaded


def test_one_of_many_headers_is_read_once(hub, client, tmp_path):
    parts = shards(tiny_verifier(tmp_path / "verifier", num_hidden_layers=3), 13)
    hub.push("org/some-verifier", parts)
    assert len(client(do.open_one, "org/some-verifier")["names"]) > 13
    assert not [seen for seen in hub.seen if "-of-00013" in seen.file]
    for _ in range(2):
        client(do.headers, "org/some-verifier", "model.norm.weight")
    assert len({seen.file for seen in hub.seen if "-of-00013" in seen.file}) == 1
    hub.forget()
    assert len(client(do.headers, "org/some-verifier")) > 13
    assert len({seen.file for seen in hub.seen if "-of-00013" in seen.file}) == 12


def test_weights_that_are_pickled_are_fetched_to_be_described(hub, client, tmp_path):
    folder = tiny_draft(tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    hub.push("org/pickled", folder)
    opened = client(do.open_one, "org/pickled")
    assert opened["names"] == sorted(tensors)
    assert opened["files"] == ["config.json", "pytorch_model.bin"]


def test_pickled_weights_that_ask_for_code_are_refused(hub, client, tmp_path):
    folder = write(tmp_path / "draft", {}, {"a": torch.zeros(1)})
    (folder / "model.safetensors").unlink()
    torch.save({"a": Path("/")}, folder / "pytorch_model.bin")
    hub.push("org/evil", folder)
    with pytest.raises(CheckpointError, match="could run code; refused"):
        client(do.open_one, "org/evil")


def test_load_config_chooses_cache_and_files(hub, client, tmp_path):
    folder = tiny_draft(tmp_path / "draft")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    hub.push("org/both", folder)
    elsewhere = tmp_path / "elsewhere"
    opened = client(do.open_one, "org/both", download_dir=str(elsewhere))
    assert elsewhere in opened["path"].parents
    assert opened["files"] == ["config.json"]
    assert client(do.open_one, "org/both", ignore_patterns=("*.safetensors",))["files"] == ["config.json", "pytorch_model.bin"]

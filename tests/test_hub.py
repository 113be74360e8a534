"""Hub ids with the real client, against a hub on this machine: what is fetched, when, and at which commit."""

from __future__ import annotations

import json

import hub_client as do
import pytest
import torch
from hub_server import shards
from safetensors.torch import load_file, save_file
from tiny import draft_tensors, tiny_draft, tiny_verifier

from specbench.errors import DownloadError

pytest_plugins = ("hub_fixtures",)
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"


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


def test_load_config_chooses_cache_and_files(hub, client, tmp_path):
    folder = tiny_draft(tmp_path / "draft")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    hub.push("org/both", folder)
    elsewhere = tmp_path / "elsewhere"
    opened = client(do.open_one, "org/both", download_dir=str(elsewhere))
    assert elsewhere in opened["path"].parents
    assert opened["files"] == ["config.json"]
    assert client(do.open_one, "org/both", ignore_patterns=("*.safetensors",))["files"] == ["config.json", "pytorch_model.bin"]

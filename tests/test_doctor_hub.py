"""The doctor on hub ids: how much it asks for, what it finds offline, and what it says when there is nothing to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doctored import draft
from hub_client import Client, diagnosed, load, open_two
from large import write_draft, write_verifier
from tiny import tiny_w4a16_verifier

pytest_plugins = ("hub_fixtures",)


@pytest.fixture(scope="module")
def patient(server: Any, home: Path) -> Any:
    """A client that waits: the server hashes 16 MB of every large file that it is asked for."""
    client = Client(HF_ENDPOINT=server.url, HF_HOME=str(home), HF_HUB_DOWNLOAD_TIMEOUT="60", HF_HUB_ETAG_TIMEOUT="60")
    yield client
    client.close()


@pytest.mark.parametrize("shards", [5, 130])
def test_a_pair_of_full_size_costs_few_requests_and_bytes(hub: Any, patient: Any, tmp_path: Path, shards: int) -> None:
    hub.push(f"org/large-{shards}", write_verifier(tmp_path / "v", shards))
    hub.push(f"org/large-{shards}-draft", write_draft(tmp_path / "d"))
    hub.forget()
    report = patient(diagnosed, f"org/large-{shards}", f"org/large-{shards}-draft")
    print(f"{shards} files: {len(hub.seen)} requests, {hub.sent} bytes")
    assert len(hub.seen) < 50 and hub.sent < 5_000_000
    assert report["readable"] and "quantization-from-verifier" in report["codes"]
    assert not [code for code, severity in report["codes"].items() if severity != "info"]
    assert report["verifier"]["revision"] and report["draft"]["revision"]


def test_a_header_that_is_asked_for_late_and_cannot_be_had(hub: Any, patient: Any, tmp_path: Path) -> None:
    hub.push("org/late", write_verifier(tmp_path / "v", 130))
    hub.push("org/late-draft", write_draft(tmp_path / "d"))
    hub.fault = lambda method, path, file: 500 if "00130" in file else None
    report = patient(diagnosed, "org/late", "org/late-draft")
    assert report["codes"] == {"unreachable": "error"} and not report["readable"]


def test_ids_and_folders_give_the_same_findings(pair: Any, client: Any) -> None:
    verifier, other, *folders = pair
    by_id, by_folder = client(diagnosed, verifier, other), client(diagnosed, *map(str, folders))
    assert by_id["codes"] == by_folder["codes"]


def test_what_was_only_looked_at_is_not_in_the_cache(pair: Any, hub: Any, client: Any, offline: Any) -> None:
    verifier, other, *_ = pair
    client(diagnosed, verifier, other)
    hub.forget()
    report = offline(diagnosed, verifier, other)
    assert report["codes"] == {"unreachable": "error"} and not hub.seen
    assert "fetch it once without HF_HUB_OFFLINE" in report["sentences"]["unreachable"]


def test_a_fetched_pair_is_diagnosed_offline(hub: Any, client: Any, offline: Any, tmp_path: Path) -> None:
    hub.push("org/fetched", tiny_w4a16_verifier(tmp_path / "v"))
    hub.push("org/fetched-draft", draft(tmp_path / "d"))
    client(open_two, "org/fetched", "org/fetched-draft")
    client(load, "verifier"), client(load, "draft")
    hub.forget()
    report = offline(diagnosed, "org/fetched", "org/fetched-draft", values=True)
    assert report["readable"] and "quantization-from-verifier" in report["codes"] and not hub.seen


def test_gated_and_missing_repositories_say_what_to_do(pair: Any, hub: Any, client: Any) -> None:
    verifier, other, *_ = pair
    hub.repos[verifier].gated = True
    report = client(diagnosed, verifier, other)
    assert report["codes"] == {"unreachable": "error"} and not report["readable"]
    assert "is gated" in report["sentences"]["unreachable"] and "HF_TOKEN" in report["sentences"]["unreachable"]
    hub.repos[verifier].gated = False
    report = client(diagnosed, verifier, "org/no-such-draft")
    assert report["codes"] == {"unreachable": "error"} and "no such repository" in report["sentences"]["unreachable"]


def test_values_are_not_fetched(pair: Any, hub: Any, client: Any) -> None:
    verifier, other, *_ = pair
    report = client(diagnosed, verifier, other, values=True)
    assert report["codes"]["values-unread"] == "info"
    assert hub.bytes_of(".safetensors") < 1_000_000

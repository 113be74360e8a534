"""What tests of hub ids share: one hub, a process that may ask it, one that may not, and a fresh pair of repositories per test."""

from __future__ import annotations

import shutil

import pytest
from hub_client import Client
from hub_server import HubServer, shards
from tiny import tiny_draft, tiny_verifier


@pytest.fixture(scope="session")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(server):
    server.forget()
    server.sizes = True
    return server


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hub") / "home"


@pytest.fixture(scope="session")
def client(server, home):
    client = Client(HF_ENDPOINT=server.url, HF_HOME=str(home), HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1")
    yield client
    client.close()


@pytest.fixture(scope="session")
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

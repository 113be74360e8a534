"""A model hub on this machine, as far as huggingface_hub's client goes: repositories with commits and branches, file listings, redirects
to a storage server of its own origin, ranges, error codes. It counts requests and bytes, and can fail on purpose.

Written from what huggingface_hub 2.4 asks for (hf_api.py, file_download.py) and the headers it reads (constants.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

STORED = (".safetensors", ".bin")  # what lies on the storage server, as Git LFS and Xet files do
TOKEN = "hf_let_me_in"


@dataclass
class Repo:
    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False


@dataclass(frozen=True)
class Seen:
    """One request: method, path, file that it was for (or ""), status, bytes of body that were sent, whether it carried a token."""

    method: str
    path: str
    file: str
    status: int
    sent: int
    token: bool


class HubServer:
    """`fault`, where set, is called with (method, path, file name) and may return a status to answer instead, "drop" to hang up without an
    answer, "stall" to say nothing until the server stops, or a number of body bytes to send before hanging up."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.fault: Callable[[str, str, str], Any] | None = None
        self.sizes = True  # whether listings give sizes
        self.stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        # Of another host name too, so that every client takes it for another server and keeps its token back.
        hosts = zip(("127.0.0.1", "localhost"), self._servers, strict=True)
        self.url, self.storage = (f"http://{host}:{server.server_port}" for host, server in hosts)

    def __enter__(self) -> HubServer:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def push(self, name: str, folder: Path, branch: str = "main") -> str:
        """Commit the files of `folder` (which must not change afterwards) to a branch, and return the commit."""
        repo = self.repos.setdefault(name, Repo())
        commit = hashlib.sha256(f"{name} {len(repo.commits)}".encode()).hexdigest()[:40]
        repo.commits[commit] = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        repo.branches[branch] = commit
        return commit

    def forget(self) -> None:
        """Count from here; no faults."""
        self.seen, self.fault = [], None

    @property
    def sent(self) -> int:
        return sum(seen.sent for seen in self.seen)

    def bytes_of(self, suffix: str) -> int:
        return sum(seen.sent for seen in self.seen if seen.file.endswith(suffix))


def etag(path: Path) -> str:
    """Of all bytes of a small file; of a big one (sparse, here) only its first part and its size."""
    with path.open("rb") as file:
        content = file.read(1 << 24)
    return hashlib.sha256(content + str(path.stat().st_size).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    file = ""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.file = path.rpartition("/")[2]
        fault = self.hub.fault(self.command, path, self.file) if self.hub.fault else None
        self._limit = fault if isinstance(fault, int) and not 400 <= fault < 600 else None
        if fault in ("drop", "stall"):
            self._record(0, 0)
            if fault == "stall":
                self.hub.stopping.wait(30)
            self.close_connection = True
        elif isinstance(fault, int) and self._limit is None:
            self._error(fault, "")
        else:
            self._route(path)

    def _record(self, status: int, sent: int) -> None:
        seen = Seen(self.command, unquote(urlsplit(self.path).path), self.file, status, sent, "authorization" in self.headers)
        if seen.path != "/api/agent-harnesses":  # once a day, whatever is asked for
            self.hub.seen.append(seen)

    def _route(self, path: str) -> None:
        if found := re.fullmatch(r"/blob/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            return self._blob(self.hub.repos[found[1]].commits[found[2]][found[3]], {})
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        if not found or found[1] not in self.hub.repos:
            return self._error(401, "RepoNotFound")
        repo = self.hub.repos[found[1]]
        revision = (found[3] if api else found[2]) or "main"
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return self._error(404, "RevisionNotFound")
        files = repo.commits[commit]
        if api:
            return self._json(self._tree(files) if found[2] == "tree" else self._info(found[1], commit, files))
        authorization = self.headers.get("authorization")
        if repo.gated and authorization != f"Bearer {TOKEN}":
            return self._error(403 if authorization else 401, "GatedRepo")
        headers = {"X-Repo-Commit": commit}
        if found[3] not in files:
            return self._error(404, "EntryNotFound", headers)
        path_here = files[found[3]]
        if not found[3].endswith(STORED):
            return self._blob(path_here, headers)
        linked = {"X-Linked-Etag": f'"{etag(path_here)}"', "X-Linked-Size": str(path_here.stat().st_size)}
        location = f"{self.hub.storage}/blob/{found[1]}/{commit}/{found[3]}"
        return self._send(302, b"", headers | linked | {"Location": location})

    def _info(self, name: str, commit: str, files: dict[str, Path]) -> dict[str, Any]:
        siblings = [{"rfilename": file} | ({"size": path.stat().st_size} if self.hub.sizes else {}) for file, path in files.items()]
        return {"id": name, "modelId": name, "sha": commit, "private": False, "gated": self.hub.repos[name].gated, "siblings": siblings}

    def _tree(self, files: dict[str, Path]) -> list[dict[str, Any]]:
        entries = []
        for file, path in files.items():
            size, tag = path.stat().st_size, etag(path)
            lfs = {"lfs": {"oid": tag, "size": size, "pointerSize": 134}} if file.endswith(STORED) else {}
            entries.append({"type": "file", "path": file, "size": size, "oid": tag[:40], **lfs})
        return entries

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code, "Content-Type": "application/json", **(headers or {})})

    def _blob(self, path: Path, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        begin, end, status = 0, size, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if wanted:
            begin, end, status = int(wanted[1]), min(int(wanted[2]) + 1 if wanted[2] else size, size), 206
            headers = headers | {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        with path.open("rb") as file:
            file.seek(begin)
            self._send(status, file, headers | {"ETag": f'"{etag(path)}"', "Accept-Ranges": "bytes"}, end - begin)

    def _send(self, status: int, body: Any, headers: dict[str, str], length: int | None = None) -> None:
        length = len(body) if length is None else length
        allowed = 0 if self.command == "HEAD" else length if self._limit is None else min(self._limit, length)
        self._record(status, allowed)  # before the client can know the answer
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        sent = 0
        while sent < allowed:
            chunk = body[sent:allowed] if isinstance(body, bytes) else body.read(min(allowed - sent, 1 << 20))
            self.wfile.write(chunk)
            sent += len(chunk)
        if self.command == "GET" and allowed < length:
            self.close_connection = True


def shards(folder: Path, count: int) -> Path:
    """Split folder/model.safetensors into `count` files with an index, as `save_pretrained` does, tensor by tensor in turn."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = dict(list(tensors.items())[i::count])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder

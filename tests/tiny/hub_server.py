"""Serve the hub's protocol on loopback: repositories, uploads of large files, commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Commit:
    revision: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repo:
    private: bool
    commits: list[Commit]


@dataclass
class Hub:
    """Hold the state of the server; tests change it to be other people, and cut connections."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files that arrived, by SHA-256."""
    sent: list[str] = field(default_factory=list)
    """SHA-256 of each large file, in the order of their arrival."""
    cut: Callable[[str, str], str] = lambda method, path: ""
    """Cuts the connection "before" or "after" a request takes effect."""

    def commit(self, name: str, title: str, files: dict[str, bytes | None]) -> Commit:
        """Add a commit of these files; None removes one."""
        repo = self.repos[name]
        after = (repo.commits[-1].files if repo.commits else {}) | files
        revision = hashlib.sha1(f"{name} {len(repo.commits)} {title}".encode()).hexdigest()
        whole = {path: content for path, content in after.items() if content is not None}
        repo.commits.append(Commit(revision, title, whole))
        return repo.commits[-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        body = self._body()
        cut = self.hub.cut(self.command, self.path)
        if cut == "before":
            self.close_connection = True
            return
        status, content, headers = self._answer(body)
        if cut == "after":
            self.close_connection = True
            return
        raw = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_PUT = handle_any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        hub, path = self.hub, self.path.partition("?")[0]
        if self.command == "PUT":
            digest = hashlib.sha256(body).hexdigest()
            assert path == f"/objects/{digest}"
            hub.objects[digest] = body
            hub.sent.append(digest)
            return 200, {}, {}
        if self.headers.get("Authorization") != "Bearer hf_right":
            return 401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.repos[name] = Repo(asked.get("private") or asked.get("visibility") == "private", [])
            hub.commit(name, "initial commit", {".gitattributes": b""})
            return 200, {"url": f"{hub.url}/{name}"}, {}
        match = re.fullmatch(r"(?:/api/models)?/([\w.-]+/[\w-]+)(?:\.git)?(/.*)?", path)
        assert match, path
        name, action = match[1], match[2] or ""
        if name not in hub.repos:
            missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return 404, {"error": "Repository not found"}, missing
        return self._repository(name, action, body)

    def _repository(self, name: str, action: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        hub, repo = self.hub, self.hub.repos[name]
        newest = repo.commits[-1]
        if action in ("", "/revision/main"):
            files = [{"rfilename": file} for file in newest.files]
            info = {"id": name, "sha": newest.revision, "private": repo.private, "siblings": files}
            return 200, info, {}
        if action == "/tree/main":
            files = [
                {"type": "file", "path": file, "size": len(content), "oid": _oid(file, content)}
                for file, content in newest.files.items()
            ]
            return 200, files, {}
        if action == "/commits/main":
            return (
                200,
                [
                    {"id": commit.revision, "title": commit.title, "message": "", "authors": []}
                    | {"date": "2026-11-26T10:00:00.000Z"}
                    for commit in reversed(repo.commits)
                ],
                {},
            )
        if action == "/preupload/main":
            return (
                200,
                {
                    "files": [
                        {"path": file["path"], "shouldIgnore": False}
                        | {"uploadMode": _mode(file["path"])}
                        | {"oid": _oid(file["path"], newest.files.get(file["path"]))}
                        for file in json.loads(body)["files"]
                    ]
                },
                {},
            )
        if action == "/info/lfs/objects/batch":
            return (
                200,
                {
                    "transfer": "basic",
                    "objects": [
                        entry
                        if entry["oid"] in hub.objects
                        else entry
                        | {"actions": {"upload": {"href": f"{hub.url}/objects/{entry['oid']}"}}}
                        for entry in json.loads(body)["objects"]
                    ],
                },
                {},
            )
        assert action == "/commit/main", action
        lines = [json.loads(line) for line in body.splitlines()]
        values = [(line["key"], line["value"]) for line in lines]
        header = values[0][1]
        if header.get("parentCommit") not in (None, newest.revision):
            return 412, {"error": "A commit has happened since"}, {}
        files: dict[str, bytes | None] = {}
        for kind, value in values[1:]:
            if kind == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            else:
                deleted = kind == "deletedFile"
                files[value["path"]] = None if deleted else base64.b64decode(value["content"])
        commit = hub.commit(name, header["summary"], files)
        url = f"{hub.url}/{name}/commit/{commit.revision}"
        return 200, {"commitUrl": url, "commitOid": commit.revision}, {}


def _mode(path: str) -> str:
    return "lfs" if path.endswith("tensors") else "regular"


def _oid(path: str, content: bytes | None) -> str | None:
    """Return the id of a file that the hub holds, as the hub tells it before an upload."""
    if content is None:
        return None
    if _mode(path) == "lfs":
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve a hub, at which `huggingface_hub` in this process finds everything."""
    from huggingface_hub import constants

    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        # Read from the environment when huggingface_hub was imported.
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", "hf_right")
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

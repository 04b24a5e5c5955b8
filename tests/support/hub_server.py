"""A small server that speaks the part of the Hugging Face Hub's interface that an upload uses."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What the server holds.

    Attributes:
        url: its address.
        repos: name -> whether it is private.
        files: name of a repository -> path -> content.
        objects: large files that were uploaded and not yet committed, by SHA-256.
        commits: messages of all commits.
        refuse: status and message of every answer to a commit, to play a server that fails.
    """

    url: str = ""
    repos: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    refuse: tuple[int, str] | None = None

    def make(self, repo: str, *, private: bool) -> None:
        self.repos[repo], self.files[repo] = private, {}

    # Answers: (status, content)
    def get(self, path: str) -> tuple[int, Any]:
        repo = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        siblings = [{"rfilename": name} for name in self.files[repo]]
        return 200, {"_id": "1", "id": repo, "private": self.repos[repo], "siblings": siblings, "sha": "0" * 40}

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, self._batch(json.loads(body))
        repo, _, verb = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": _mode(f["path"]), "shouldIgnore": False} for f in files]
            return 200, {"files": modes}
        assert verb == "commit", path
        return self._commit(repo, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if repo in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{repo}"}
        self.make(repo, private=bool(asked.get("private")) or asked.get("visibility") == "private")
        return 200, {"url": f"{self.url}/{repo}"}

    def _batch(self, asked: dict[str, Any]) -> Any:
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.url}/objects/{wanted['oid']}"}}}
            for wanted in asked["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        if self.refuse:
            return self.refuse[0], {"error": self.refuse[1]}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile", line
                del self.files[repo][value["path"]]
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40, "success": True}


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A running server."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._answer(*hub.get(self.path.partition("?")[0]))

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            self._answer(*hub.post(self.path.partition("?")[0], self._body()))

        def do_PUT(self) -> None:
            hub.objects[self.path.rpartition("/")[2]] = self._body()
            self._answer(200, {})

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

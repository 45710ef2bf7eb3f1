"""A stand-in of the Hugging Face hub: as much of its HTTP interface as a push needs, and the repositories in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, utils

TOKEN = "hf_of_the_stand_in"


@dataclass
class Repository:
    is_private: bool
    commits: list[dict[str, bytes]] = field(default_factory=list)
    """All files after each commit."""
    messages: list[str] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1] if self.commits else {}

    def save(self, folder: Path) -> str:
        """Write the newest files to a folder, as `snapshot_download` would."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return str(folder)


class Hub(ThreadingHTTPServer):
    """Repositories by their names, licences of other models by theirs, and large files by their digests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.repositories: dict[str, Repository] = {}
        self.licences: dict[str, str] = {}
        self.large: dict[str, bytes] = {}
        self.address = f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if method == "HEAD":  # of a file of a model: the repositories here are only pushed to
            return 404, {"error": "Repository not found"}
        parts, repo = path.strip("/").split("/"), None
        if parts[:2] == ["api", "models"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            repo = self.repositories.get(name)
            if not rest and name in self.licences:
                return 200, {"id": name, "modelId": name, "cardData": {"license": self.licences[name]}}
            if repo is None:
                return 404, {"error": "Repository not found"}
            return 200, self._of_repository(repo, name, rest[0], body)
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            private = given.get("visibility") == "private" or given.get("private") is True
            self.repositories.setdefault(name, Repository(private))
            return 200, {"url": f"{self.address}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [{**each, "actions": {"upload": {"href": f"{self.address}/{each['oid']}"}}} for each in objects]
            return 200, {"transfer": "basic", "objects": uploads}
        assert method == "PUT", path
        assert hashlib.sha256(body).hexdigest() == parts[0]
        self.large[parts[0]] = body
        return 200, {}

    def _of_repository(self, repo: Repository, name: str, what: str, body: bytes) -> Any:
        if what == "tree":
            sizes = {file: len(content) for file, content in repo.files.items()}
            return [{"type": "file", "path": file, "oid": "0", "size": size} for file, size in sizes.items()]
        if what == "preupload":
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            return {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}
        assert what == "commit", what
        files = dict(repo.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repo.commits.append(files)
        number = f"{len(repo.commits):040x}"
        return {"success": True, "commitOid": number, "commitUrl": f"{self.address}/{name}/commit/{number}"}


class _Request(BaseHTTPRequestHandler):
    server: Hub

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        may = self.command == "PUT" or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        path = self.path.partition("?")[0]
        status, found = self.server.answer(self.command, path, body) if may else (401, {"error": "Invalid token"})
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815  # names of the base class

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN) -> Iterator[Hub]:
    """Let huggingface_hub take the stand-in for the hub, with a token or without one."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # xet has a protocol of its own
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN", token or "")
    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    files = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    utils.close_session()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
        utils.close_session()

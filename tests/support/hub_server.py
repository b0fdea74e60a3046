"""A server on this machine that speaks what of the Hub's protocol an upload needs, and can break off in the middle."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LFS = (".safetensors", ".png")


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """What the server holds.

    Attributes:
        address: http://127.0.0.1:PORT.
        repositories: by name.
        objects: of LFS, by hash.
        sent: bytes of LFS objects that have come in.
        breaks: uploads of LFS objects that it will break off after half of their bytes.
        tokens: those of the requests that were made.
    """

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    sent: int = 0
    breaks: int = 0
    tokens: set[str | None] = field(default_factory=set)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub with nothing in it, until the block ends."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self._path()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/main)?", path):
            repository = self.hub.repositories.get(match[1])
            if repository is None:
                return self._say({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return self._say(
                {
                    "_id": "1",
                    "id": match[1],
                    "private": repository.private,
                    "sha": repository.commits[-1],
                    "siblings": [{"rfilename": name} for name in repository.files],
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                }
            )
        if match := re.fullmatch(r"/api/models/(.+?)/refs", path):
            repository = self.hub.repositories[match[1]]
            tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in repository.tags.items()]
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commits[-1]}
            return self._say({"branches": [main], "converts": [], "tags": tags})
        if match := re.fullmatch(r"/api/models/(.+?)/tree/[^/]+", path):
            files = self.hub.repositories[match[1]].files
            return self._say(
                [{"type": "file", "path": n, "size": len(b), "oid": _blob_oid(b)} for n, b in files.items()]
            )
        return self._say({"error": f"no GET {path}"}, 404)

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if path == "/api/validate-yaml":
            return self._say({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values['organization']}/{values['name']}"
            private = values.get("private", values.get("visibility") == "private")
            self.hub.repositories.setdefault(name, Repository(private))
            return self._say({"url": f"{self.hub.address}/{name}", "name": name})
        if match := re.fullmatch(r"/api/models/(.+?)/preupload/main", path):
            held = self.hub.repositories[match[1]].files
            return self._say(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
                            "shouldIgnore": False,
                            "oid": _oid(file["path"], held[file["path"]]) if file["path"] in held else None,
                        }
                        for file in json.loads(body)["files"]
                    ]
                }
            )
        if re.fullmatch(r"/.+?\.git/info/lfs/objects/batch", path):
            asked = json.loads(body)["objects"]
            return self._say({"transfer": "basic", "objects": [self._lfs_object(o) for o in asked]})
        if match := re.fullmatch(r"/api/models/(.+?)/commit/main", path):
            return self._commit(match[1], body)
        if match := re.fullmatch(r"/api/models/(.+?)/tag/(.+)", path):
            self.hub.repositories[match[1]].tags[json.loads(body)["tag"]] = match[2]
            return self._say({})
        return self._say({"error": f"no POST {path}"}, 404)

    def do_PUT(self) -> None:
        oid = self._path().rpartition("/")[2]
        if self.hub.breaks:
            self.hub.breaks -= 1
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self._body()
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.hub.sent += len(body)
        self._say({})

    def _lfs_object(self, asked: dict[str, Any]) -> dict[str, Any]:
        held = asked["oid"] in self.hub.objects
        actions = {} if held else {"actions": {"upload": {"href": f"{self.hub.address}/lfs/{asked['oid']}"}}}
        return {"oid": asked["oid"], "size": asked["size"], **actions}

    def _commit(self, name: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        commit = hashlib.sha1(body).hexdigest()
        repository.commits.append(commit)
        self._say({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit, "hookOutput": ""})

    def _path(self) -> str:
        self.hub.tokens.add(self.headers.get("Authorization"))
        return self.path.partition("?")[0]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = b""
            while size := int(self.rfile.readline(), 16):
                chunks += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return chunks
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _say(self, values: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(values).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(text), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(text)


def _oid(path: str, content: bytes) -> str:
    """What tells whether a file is there already: of an LFS object its own hash, else git's."""
    return hashlib.sha256(content).hexdigest() if path.endswith(LFS) else _blob_oid(content)


def _blob_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

"""The hub's HTTP interface, served from memory: repositories, gates, faults, uploads."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 1500,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "onnx/config.json": b"{}",
    "README.md": b"words",
}


def commit_id(label):
    return hashlib.sha1(label.encode()).hexdigest()


class FakeHub:
    """Repositories in memory, served over the hub's HTTP interface."""

    def __init__(self):
        self.repos = {}  # id -> {"refs": {name: commit}, "commits": {commit: {file: bytes}}}
        self.gated = set()
        self.broken = {}  # path prefix -> HTTP status
        self.drop_once = {}  # file name -> bytes to send before the connection is dropped
        self.ranges = []  # Range headers received
        self.blobs = {}  # uploaded files by sha256
        self.authorization = set()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, repo, files=None, revision="main", label=None):
        commit = commit_id(label or repo)
        entry = self.repos.setdefault(repo, {"refs": {}, "commits": {}})
        entry["commits"][commit] = {**FILES, **UNWANTED} if files is None else files
        entry["refs"][revision] = commit
        return commit


class _Handler(BaseHTTPRequestHandler):
    """Answers one request to `hub`, an attribute of the subclass that each hub makes."""

    hub: FakeHub

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", headers=None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status, code):
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def commit(self, repo, revision):
        """Return the requested commit; after sending an error, None."""
        for prefix, status in self.hub.broken.items():
            if self.path.startswith(prefix):
                return self.answer(status)
        if repo in self.hub.gated:
            return self.error(401, "GatedRepo")
        if repo not in self.hub.repos:
            return self.error(401, "RepoNotFound")
        entry = self.hub.repos[repo]
        commit = entry["refs"].get(revision, revision)
        if commit not in entry["commits"]:
            return self.error(404, "RevisionNotFound")
        return commit

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.hub.authorization.add(self.headers.get("Authorization"))
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/(\w+/\w+)/tree/([^/]+)", path):
            if commit := self.commit(*match.groups()):
                files = self.hub.repos[match[1]]["commits"][commit]
                self.answer(200, [self.entry(name, data) for name, data in files.items()])
        elif match := re.fullmatch(r"/api/models/(\w+/\w+?)(?:/revision/(.+))?", path):
            if commit := self.commit(match[1], (match[2] or "main").replace("%2F", "/")):
                names = [{"rfilename": name} for name in self.hub.repos[match[1]]["commits"][commit]]
                self.answer(200, {"id": match[1], "sha": commit, "siblings": names})
        elif match := re.fullmatch(r"/(\w+/\w+)/resolve/([^/]+)/(.+)", path):
            if commit := self.commit(match[1], match[2]):
                self.send_file(commit, match[3], self.hub.repos[match[1]]["commits"][commit])
        else:
            self.error(404, "EntryNotFound")

    def entry(self, name, data):
        oid = hashlib.sha1(data).hexdigest()
        entry = {"type": "file", "path": name, "size": len(data), "oid": oid}
        if name.endswith(".safetensors"):
            sha = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 130}
        return entry

    def send_file(self, commit, name, files):
        if name not in files:
            return self.error(404, "EntryNotFound")
        data, status = files[name], 200
        etag = hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else None
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{etag or hashlib.sha1(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        if self.command == "GET" and (wanted := self.headers.get("Range")):
            self.hub.ranges.append(wanted)
            start = int(re.match(r"bytes=(\d+)-", wanted)[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        if self.command == "GET" and name in self.hub.drop_once:
            sent = self.hub.drop_once.pop(name)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": len(data)}.items():
                self.send_header(key, str(value))
            self.end_headers()
            self.wfile.write(data[:sent])
            self.wfile.flush()
            return self.connection.close()
        return self.answer(status, data, headers)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self):
        data = self.body()
        self.hub.blobs[hashlib.sha256(data).hexdigest()] = data
        self.answer(200)

    def do_POST(self):
        self.hub.authorization.add(self.headers.get("Authorization"))
        path, body = self.path.split("?")[0], self.body()
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if repo.startswith("forbidden/"):
                return self.error(403, "Forbidden")
            status = 409 if repo in self.hub.repos else 200
            if status == 200:
                self.hub.add(repo, {})
            return self.answer(status, {"url": f"{self.hub.endpoint}/{repo}", "name": repo, "id": repo})
        if match := re.fullmatch(r"/api/models/(\w+/\w+)/branch/(\w+)", path):
            refs = self.hub.repos[match[1]]["refs"]
            refs[match[2]] = refs["main"]
            return self.answer(200, {})
        if match := re.fullmatch(r"/api/models/(\w+/\w+)/preupload/(\w+)", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            files = [{"path": n, "uploadMode": mode[n], "shouldIgnore": False} for n in names]
            return self.answer(200, {"files": files})
        if match := re.fullmatch(r"/(\w+/\w+)\.git/info/lfs/objects/batch", path):
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.hub.endpoint}/upload/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(\w+/\w+)/commit/(\w+)", path):
            return self.take_commit(match[1], match[2], body)
        return self.error(404, "EntryNotFound")

    def take_commit(self, repo, revision, body):
        files, summary = {}, None
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        commit = self.hub.add(repo, files, revision, f"{repo}{revision}{summary}")
        url = f"{self.hub.endpoint}/{repo}/commit/{commit}"
        self.answer(200, {"success": True, "commitUrl": url, "commitOid": commit})

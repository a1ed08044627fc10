"""A Hugging Face Hub on this machine, over real HTTP: what transformers and datasets ask of it to
download. Its folder holds repositories as NAME/ for models and datasets/NAME/ for data sets.
"""

import contextlib
import hashlib
import http.server
import json
import threading
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root = None  # set by `serve`

    def answer(self, body, status=200, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def do_GET(self):
        path = unquote(self.path.split("?")[0]).strip("/")
        if "/resolve/" in path:
            repo, _, file = path.partition("/resolve/")
            file = self.root / repo / file.split("/", 1)[1]
            if file.is_file():
                body = file.read_bytes()
                tag = f'"{hashlib.sha1(body).hexdigest()}"'
                return self.answer(body, ETag=tag, X_Repo_Commit=COMMIT)
            return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        parts = path.split("/")  # api, models or datasets, owner, name, and what about it
        kind, name, request = "".join(parts[1:2]), "/".join(parts[2:4]), parts[4:5]
        repo = self.root / ("datasets" * (kind == "datasets")) / name
        if len(parts) < 4 or not repo.is_dir():
            return self.answer(b"", 404, X_Error_Code="RepoNotFound")
        folder = repo / "/".join(parts[6:]) if request == ["tree"] else repo
        if request == ["tree"] and not folder.is_dir():
            return self.answer(b"", 404, X_Error_Code="EntryNotFound")
        deep = request != ["tree"] or "recursive=true" in self.path
        found = sorted(folder.rglob("*") if deep else folder.iterdir())
        if request == ["tree"]:
            return self.answer(
                [
                    {
                        "path": str(path.relative_to(repo)),
                        "oid": COMMIT,
                        "type": "file" if path.is_file() else "directory",
                        "size": path.stat().st_size,
                    }
                    for path in found
                ]
            )
        names = [{"rfilename": str(path.relative_to(repo))} for path in found if path.is_file()]
        return self.answer(
            {
                "id": name,
                "sha": COMMIT,
                "siblings": names,
                "tags": [],
                "private": False,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
            }
        )

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve(root):
    """The address of a Hub with the repositories in `root`, for HF_ENDPOINT."""
    handler = type("Hub", (Handler,), {"root": root})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()

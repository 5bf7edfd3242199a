"""Serve a bucket in memory under gs://: fsspec's memory files, which TensorStore reaches as Google
Cloud Storage over HTTP.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """Hold what epath reads and writes under gs://, in place of gcsfs."""

    protocol = ("gs", "gcs")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).replace("gs://", "memory://", 1))

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Do nothing: a bucket has no folders."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a bucket has no folders."""

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether there is such a file, or one whose name begins with this folder's."""
        try:
            return bool(self.info(path))
        except FileNotFoundError:
            return False

    def rename(self, path: str, to: str, recursive: bool = False) -> None:
        self.mv(path, to, recursive=recursive)


class _Storage(BaseHTTPRequestHandler):
    """Answer the requests of Google's JSON API that TensorStore makes."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        bucket, name = self._named(parts.path)
        if not name:
            names = sorted(
                key.removeprefix(f"/{bucket}/")
                for key in Bucket.store
                if key.startswith(f"/{bucket}/")
            )
            start, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
            items = [_described(found) for found in names if start <= found < end]
            return self._answer(200, json.dumps({"items": items}).encode())
        if (held := Bucket.store.get(f"/{bucket}/{name}")) is None:
            return self._answer(404)
        content = held.getvalue()
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            first, last = int(first or 0), min(int(last or len(content)), len(content) - 1)
            where = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            return self._answer(206, content[first : last + 1], where)
        return self._answer(200, content)

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        name = parse_qs(parts.query)["name"][0]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        fsspec.filesystem("gcs").pipe_file(f"gs://{self._named(parts.path)[0]}/{name}", content)
        self._answer(200, json.dumps(_described(name)).encode())

    def do_DELETE(self) -> None:
        found = Bucket.store.pop("/{}/{}".format(*self._named(urlsplit(self.path).path)), None)
        self._answer(204 if found else 404)

    def _named(self, path: str) -> tuple[str, str]:
        bucket, _, name = path.partition("/b/")[2].partition("/o")
        return bucket, unquote(name.removeprefix("/"))

    def _answer(
        self, code: int, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        for name, value in {
            "x-goog-generation": "1",
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        if os.environ.get("BUCKET_LOG"):
            print(self.command, self.path, args)


def _described(name: str) -> dict[str, str]:
    return {"name": name, "size": "0", "generation": "1", "metageneration": "1"}


@contextmanager
def bucket() -> Iterator[str]:
    """Serve an empty bucket, whose address this yields."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Storage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fsspec.register_implementation("gcs", Bucket, clobber=True)
    place = {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    }
    # Orbax asks google-cloud-storage, which comes with gcsfs, for the kind of the bucket.
    kind = mock.patch(
        "orbax.checkpoint._src.path.gcs_utils.is_hierarchical_namespace_enabled", return_value=False
    )
    with mock.patch.dict(os.environ, place), kind:
        yield "gs://bucket"
    server.shutdown()
    Bucket.store.clear()

"""Bound what connections may take, name and log requests, and refuse those to another host."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.serve.answers import error_body

UPLOAD = 30.0
"""Maximum seconds that a client may take to send a header or a body, that it may leave an answer
unread, and that a connection stays open after an answer, whatever arrives."""
CONNECTIONS = 512
"""Maximum open connections; more are closed at once."""


class Connection(H11Protocol):
    """Close a connection that has no request to answer for long: uvicorn lets slow clients stay."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.close()
        self.end = self.unread = self.loop.call_later(UPLOAD, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self.end.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.end.cancel()
        if self.cycle.response_complete:  # no next request has come
            self.end = self.loop.call_later(UPLOAD, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.loop.call_later(UPLOAD, self.transport.abort)

    def resume_writing(self) -> None:
        self.unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end.cancel()
        self.unread.cancel()
        super().connection_lost(exc)


class Web(uvicorn.Server):
    """Read and write HTTP; a second signal closes the connections whose answers are not whole."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.should_exit:
            return super().handle_exit(sig, frame)
        for connection in list(self.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)


class Hosts:
    """Refuse requests to a name that is not the server's own, as pages of other sites send them."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            host = re.sub(r":\d*$", "", Headers(scope=scope).get("host", "")).lower()
            if host not in self.names:
                message = f"host: {host!r:.100} is not allowed; start it with --allowed-hosts"
                app = JSONResponse(error_body(message, "invalid_request_error"), 400)
        await app(scope, receive, send)


class Named:
    """Give each request the id of its header X-Request-Id, or a new one, and log it at its end.

    Args:
      log: Takes the line of a request; None logs nothing.
    """

    def __init__(self, app: ASGIApp, log: Callable[[str], None] | None) -> None:
        self.app, self.log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name, start = Headers(scope=scope).get("x-request-id", ""), time.monotonic()
        if not re.fullmatch(r"[\w.:-]{1,64}", name, re.ASCII):
            name = secrets.token_hex(12)
        scope["jaxspec.id"], status = name, "gone"

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self.app(scope, receive, named)
        finally:
            if self.log is not None:
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                seconds, client = time.monotonic() - start, (scope["client"] or ["-"])[0]
                path = scope["path"].encode("ascii", "backslashreplace").decode()[:100]
                what = f"{scope['method']} {path!r}"
                self.log(f"{now} {client} {what} {status} {seconds:.3f} s, id {name}")

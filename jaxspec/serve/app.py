"""Route the server's requests, within its limits, and write its errors in OpenAI's form.

Nothing of the server's inside (a path, a traceback) is in an answer: what a client can mend is an
`InputError`, and anything else is "internal error".
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from jaxspec.engine.requests import EncodedRequest, nth_seed
from jaxspec.errors import InputError
from jaxspec.serve import bodies
from jaxspec.serve.answers import Answer
from jaxspec.serve.bodies import Job
from jaxspec.serve.connections import UPLOAD, Connection, Hosts, Named, Web
from jaxspec.serve.messages import Limits
from jaxspec.serve.metrics import Metrics
from jaxspec.serve.refusals import left, refused
from jaxspec.serve.streams import GRACE, Stream, all_ended, until_gone
from jaxspec.serve.worker import Full, Late, Ticket, Unready, Worker

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class ServerSettings:
    """Choose what the server takes.

    Attributes:
      key: Key that requests must bring; "" for none.
      timeout: Maximum seconds from a request to the end of its answer.
      example: Picture that the page offers, and a question about it.
      hosts: Names under which the server is asked, against pages of other sites; () for any.
      origins: Other sites whose pages may read answers, as https://chat.example; * for all.
      log: Takes a line for each request; None logs nothing.
    """

    limits: Limits
    key: str = ""
    timeout: float = 300.0
    example: tuple[Path, str] | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    log: Callable[[str], None] | None = None


class Server:
    """Answer HTTP requests with a worker's batch."""

    def __init__(self, worker: Worker, settings: ServerSettings, metrics: Metrics) -> None:
        self.worker, self.settings, self.metrics = worker, settings, metrics
        self.reader = ThreadPoolExecutor(1, "jaxspec-reader")
        self.open = 0
        """Number of requests whose body is read or answered."""

    def app(self) -> ASGIApp:
        """Return the application."""
        chat, text = (partial(self._answer, chats) for chats in (True, False))
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/example.png", self._example),
            Route("/v1/{path:path}", self._nothing, methods=["GET", "POST", "PUT", "DELETE"]),
            Mount("/", Page(directory=PAGE, html=True)),
        ]
        kinds = (InputError, HTTPException, Full, Unready, Late, Exception)
        handlers: dict[Any, Any] = dict.fromkeys(kinds, refused) | {ClientDisconnect: left}
        names, origins = self.settings.hosts, self.settings.origins
        shared: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        before = [Middleware(Hosts, names=names)] if names else []
        if origins:
            before.append(Middleware(CORSMiddleware, allow_origins=origins, **shared))
        app = Starlette(routes=routes, middleware=before, exception_handlers=handlers)
        return Named(app, self.settings.log)

    async def _health(self, request: Request) -> Response:
        worker = self.worker
        state = "ready" if worker.ready.is_set() else "warming up"
        state = "failed" if worker.failure else "ending" if worker.ending else state
        body = {"status": state, "programs": worker.warmed, "of": len(worker.programs)}
        return JSONResponse(body, 200 if state == "ready" else 503)

    async def _metrics(self, request: Request) -> Response:
        self._check_key(request)
        return Response(self.metrics.page(self.worker), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        limits, batch = self.settings.limits, self.worker.batch
        name = request.path_params.get("name")
        if name not in (None, limits.model):
            raise HTTPException(404, "model: no such model here")
        config: Any = self.worker.engine.config
        about = {
            "images": limits.images,
            "max_pixels": limits.max_pixels,
            "prompt_tokens": batch.capacity.length,
            "new_tokens": batch.capacity.new,
            "rows": batch.rows,
            "sources": list(self.worker.engine.assembly.mixture.names),
            "gamma": "auto" if config.auto else config.length,
            "race": limits.races,
            "example": self.settings.example and self.settings.example[1],
        }
        model = {"id": limits.model, "object": "model", "created": STARTED, "owned_by": "jaxspec"}
        model |= {"max_model_len": batch.capacity.length + batch.capacity.new, "jaxspec": about}
        return JSONResponse({"object": "list", "data": [model]} if name is None else model)

    async def _example(self, request: Request) -> Response:
        if self.settings.example is None:
            raise HTTPException(404)
        return FileResponse(self.settings.example[0], headers=HEADERS)

    async def _nothing(self, request: Request) -> Response:
        """Refuse a path that is not served, or not for this method."""
        for route in request.app.routes:
            if route.matches(request.scope)[0] is Match.PARTIAL:
                methods = ", ".join(sorted(route.methods))
                mend = f"method: {request.method} is not served here; give {methods}"
                raise HTTPException(405, mend, {"Allow": methods})
        raise HTTPException(404)

    async def _answer(self, chats: bool, request: Request) -> Response:
        """Answer a body, or refuse it before it is read where the server is full."""
        self._check_key(request)
        worker, limits = self.worker, self.settings.limits
        deadline = time.monotonic() + self.settings.timeout
        if not worker.ready.is_set():
            raise Unready
        if self.open >= worker.room:  # the body tells its lane
            raise worker.full
        self.open += 1
        answer = None
        try:
            raw = await self._body(request)
            loop = asyncio.get_running_loop()
            key = request.headers.get("authorization", "")
            job, prompts = await loop.run_in_executor(self.reader, self._read, chats, raw, key)
            news = asyncio.Event()
            tickets = [
                Ticket(
                    replace(prompt, seed=nth_seed(prompt.seed, i)), deadline, news, loop, job.lane
                )
                for prompt in prompts
                for i in range(job.count)
            ]
            worker.submit(tickets)
            name = request.scope["jaxspec.id"]
            answer = Answer(job, limits.model, chats, tickets, worker.engine.encoder, name)
            if job.stream:
                return Stream(answer, self._close)
            await until_gone(all_ended(tickets), request.receive)
            return JSONResponse(answer.whole())
        finally:
            if answer is None or not answer.job.stream:
                self._close(answer)

    def _close(self, answer: Answer | None) -> None:
        """Free the rows of an answer that is over, or that nobody waits for."""
        self.open -= 1
        if answer is not None:
            self.worker.abandon(answer.tickets)

    async def _body(self, request: Request) -> bytes:
        """Return the body; refuse one that is too long, too slow or of another type."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "content-type: give application/json")
        most, length = self.settings.limits.body, request.headers.get("content-length", "0")
        body, refused = bytearray(), HTTPException(413, f"body: over {most} bytes; send less")
        if not length.isdecimal() or len(length) > 18 or int(length) > most:
            raise refused
        try:
            async with asyncio.timeout(UPLOAD):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise refused
        except TimeoutError:
            raise HTTPException(408, "body: not sent in time; send it faster") from None
        return bytes(body)

    def _read(self, chats: bool, raw: bytes, key: str) -> tuple[Job, list[EncodedRequest]]:
        """Return what a body asks for, and its prompts as tokens and pixels.

        key: Prompts share no beginning with those of other keys, or of another `cache_salt`.
        """
        read, body = bodies.chat if chats else bodies.completion, bodies.parse(raw)
        with bodies.shallow("body"):
            job = read(body, self.worker.engine.encoder, self.settings.limits)
            owner = json.dumps([key, body.get("cache_salt")])
            with bodies.in_names(job.names):
                prompts = [self.worker.read(each, job.most, job.lane) for each in job.requests]
        return job, [replace(prompt, owner=owner) for prompt in prompts]

    def _check_key(self, request: Request) -> None:
        """Raise an error for a request without the server's key."""
        if not self.settings.key:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Headers are read as Latin-1, whatever bytes a client sends.
        expected = self.settings.key.encode(errors="surrogateescape")
        same = hmac.compare_digest(key.strip().encode("latin-1"), expected)
        if scheme.lower() != "bearer" or not same:
            mend = "authorization: give the server's key as a bearer token"
            raise HTTPException(401, mend, {"WWW-Authenticate": "Bearer"})


STARTED = int(time.time())


def web_server(server: Server) -> Web:
    """Return the loop that reads and writes HTTP."""
    settings = server.settings
    return Web(
        uvicorn.Config(
            server.app(),
            http=Connection,
            log_level="warning",
            timeout_graceful_shutdown=int(settings.timeout + GRACE),
            server_header=False,
        )
    )


def serve(server: Server, listener: socket.socket) -> None:
    """Answer requests on a listening socket until SIGTERM or Ctrl-C, then finish and return.

    Raises what ended the worker, if it failed.
    """
    worker, web = server.worker, web_server(server)

    def watch() -> None:
        worker.join()
        web.should_exit = True

    def ignore(number: int, frame: object) -> None:
        """Let uvicorn end the server: it raises its signals again once it has ended."""

    signal.signal(signal.SIGTERM, ignore)
    silence_pillow()
    worker.start()
    threading.Thread(target=watch, daemon=True).start()
    try:
        web.run(sockets=[listener])
    finally:
        worker.end()
        worker.join()
    if worker.failure is not None:
        raise worker.failure


def silence_pillow() -> None:
    """Let warnings about the images of strangers fill no log; what matters is in the answer."""
    warnings.filterwarnings("ignore", module="PIL")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


class Page(StaticFiles):
    """Serve the page with headers that keep it from any other address."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response

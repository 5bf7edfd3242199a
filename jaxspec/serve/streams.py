"""Send answers as their parts come, until they have ended or the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxspec.engine.requests import Result
from jaxspec.serve.answers import Answer, error_body, event
from jaxspec.serve.refusals import described
from jaxspec.serve.worker import Ticket

GRACE = 10.0
"""Seconds that a client has for reading the end of its answer."""


class Stream(Response):
    """Send an answer as server-sent events, block by block."""

    def __init__(self, answer: Answer, close: Callable[[Answer], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.answer, self.close = answer, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client is gone or too slow."""
        seconds = max(ticket.deadline for ticket in self.answer.tickets) - time.monotonic()
        try:
            async with asyncio.timeout(seconds + GRACE):
                await until_gone(self._send(send), receive)
        except (ClientDisconnect, OSError, TimeoutError):
            pass
        finally:
            self.close(self.answer)

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for data in self._events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        answer = self.answer
        yield b"".join(answer.begin())
        try:
            async for fresh in news(answer.tickets):
                if data := b"".join(answer.parts(fresh)):
                    yield data
        except Exception as error:  # the status is sent, so the error is an event
            _, message, kind = described(error)
            yield event(error_body(message, kind))
            return
        yield b"".join(answer.end())


async def news(tickets: Sequence[Ticket]) -> AsyncIterator[dict[int, Result]]:
    """Yield the longer answers of tickets by index, until all have ended; raise their error."""
    newest: dict[int, Result] = {}
    while len(newest) < len(tickets) or not all(r.finish_reason for r in newest.values()):
        await tickets[0].news.wait()
        tickets[0].news.clear()
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error
        results = {i: ticket.result for i, ticket in enumerate(tickets) if ticket.result}
        fresh = {i: result for i, result in results.items() if result is not newest.get(i)}
        newest |= results
        yield fresh


async def all_ended(tickets: Sequence[Ticket]) -> None:
    async for _ in news(tickets):
        pass


async def until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work; cancel it and raise ClientDisconnect once the client is gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(coroutine) for coroutine in (work, gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""A stream sends each part once of answers that go on while it is written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from jaxspec.serve.streams import news


def test_each_part_is_told_once() -> None:
    """A part that comes while the one before it is sent is the next one, and is not sent twice."""
    ends = {"a": None, "ab": "stop"}
    first, last = (SimpleNamespace(text=text, finish_reason=ends[text]) for text in ends)
    told = list[str]()

    async def read() -> None:
        ticket: Any = SimpleNamespace(news=asyncio.Event(), error=None, result=first)
        ticket.news.set()
        async for fresh in news([ticket]):
            ticket.result = last
            ticket.news.set()
            told.extend(part.text for part in fresh.values())

    asyncio.run(read())
    assert told == ["a", "ab"]

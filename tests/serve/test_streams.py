"""What a stream sends of answers that go on while it is written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from jaxspec.serve.streams import news
from jaxspec.serve.worker import Part


def test_each_part_is_told_once() -> None:
    """A part that comes while the one before it is sent is the next one, and is not sent twice."""
    first, last = (Part(None, text, "", ended) for text, ended in (("a", False), ("ab", True)))  # pyright: ignore
    told = list[str]()

    async def read() -> None:
        ticket: Any = SimpleNamespace(news=asyncio.Event(), error=None, part=first)
        ticket.news.set()
        async for fresh in news([ticket]):
            ticket.part = last
            ticket.news.set()
            told.extend(part.text for part in fresh.values())

    asyncio.run(read())
    assert told == ["a", "ab"]

"""Write the text of a page: lines of phrases, each over the part of the page that it describes.

top left large red ball     top right small blue cup
the background is mint      there are three things
"""

from __future__ import annotations

from picturebook.phrases import number, there
from picturebook.scenes import BAR_PLACES, PLACES, SIGN, Chart, Scene

LINES = 12
"""Lines of a page."""


def page_lines(page: Scene | Chart) -> tuple[tuple[str, ...], ...]:
    """Return the phrases of each line: two for a scene, three for a chart."""
    background = f"the background is {page.background}"
    if isinstance(page, Chart):
        bars = zip(BAR_PLACES, page.bars, strict=True)
        line = tuple(f"{cell} {colour} {height}" for cell, (colour, height) in bars)
        return tuple((background, "this is a chart") if _last(y) else line for y in range(LINES))
    count = len(page.things)
    facts = (background, f"{there(count)} {number(count, 'thing')}")
    return tuple(
        facts if _last(y) else (_phrase(page, y, 0), _phrase(page, y, 1)) for y in range(LINES)
    )


def _last(line: int) -> bool:
    return line % (LINES // 2) == LINES // 2 - 1


def _phrase(scene: Scene, line: int, column: int) -> str:
    """Return what a line says of its cell: the thing, or in every second line a sign's word."""
    cell = 2 * (line // (LINES // 2)) + column
    thing = scene.cells[cell]
    if thing is None:
        return f"{PLACES[cell]} nothing"
    if thing.kind == SIGN and line % (LINES // 2) % 2:
        return f"sign says {thing.word}"
    return f"{PLACES[cell]} {thing.size} {thing.colour} {thing.kind}"

"""Describe what can be on a page, things in four cells or three bars; draw both at random, and edit
scenes.

Nothing here knows about pixels or language; `rendering.py` draws these values and the grammar talks
about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

T = TypeVar("T")

KINDS = (
    "ball", "box", "tree", "house", "star", "fish", "boat", "cup", "key", "moon", "heart", "flower",
)  # fmt: skip
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
SIZES = ("small", "large")
PLACES = ("top left", "top right", "bottom left", "bottom right")
BAR_PLACES = ("left", "middle", "right")
BACKGROUNDS = ("white", "grey", "cream", "mint", "sky", "lilac")
WORDS = (
    "OPEN", "STOP", "EXIT", "SALE", "PARK", "CAFE", "FARM", "SHOP", "TAXI", "MILK", "FREE", "PULL",
    "PUSH", "WAIT", "SLOW", "KIDS", "ZOO", "BUS", "INN", "GYM", "JAM", "HOT", "ICE", "TEA",
)  # fmt: skip
SIGN = "sign"
MAX_HEIGHT = 8


@dataclass(frozen=True)
class Thing:
    """Hold one object of a page. Only signs have a `word` (kind 'sign', always 'large')."""

    kind: str
    colour: str
    size: str
    word: str | None = None


@dataclass(frozen=True)
class Scene:
    """Hold a page of 2x2 cells in reading order, from top left to bottom right (`PLACES`)."""

    background: str
    cells: tuple[Thing | None, Thing | None, Thing | None, Thing | None]

    @property
    def things(self) -> tuple[tuple[int, Thing], ...]:
        """Return (cell index, thing) of the occupied cells, in reading order."""
        return tuple((cell, thing) for cell, thing in enumerate(self.cells) if thing is not None)

    @property
    def free(self) -> tuple[int, ...]:
        """Return the indices of the empty cells."""
        return tuple(cell for cell, thing in enumerate(self.cells) if thing is None)


@dataclass(frozen=True)
class Chart:
    """Hold a bar chart: three (colour, height 1..8) from left to right, in different colours."""

    background: str
    bars: tuple[tuple[str, int], tuple[str, int], tuple[str, int]]


@dataclass(frozen=True)
class Edit:
    """Hold a change of one cell. `before` is None for 'add', `after` is None for 'remove'."""

    kind: str
    cell: int
    before: Thing | None
    after: Thing | None


def below(rng: np.random.Generator, n: int) -> int:
    """Draw a uniform integer in [0, n), several times cheaper than by `rng.integers`."""
    return int(rng.random() * n)


def pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    """Draw one of `items`, uniformly."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: np.random.Generator, items: Sequence[T]) -> list[T]:
    """Return the items in random order (Fisher-Yates)."""
    out = list(items)
    for i in range(len(out) - 1, 0, -1):
        j = below(rng, i + 1)
        out[i], out[j] = out[j], out[i]
    return out


def other(rng: np.random.Generator, items: Sequence[T], *not_these: T) -> T:
    """Draw one of `items` except `not_these`."""
    return pick(rng, [item for item in items if item not in not_these])


def sample_thing(rng: np.random.Generator) -> Thing:
    """Draw a thing that is no sign; kind, colour and size are independent and uniform."""
    return Thing(pick(rng, KINDS), pick(rng, COLOURS), pick(rng, SIZES))


def sample_sign(rng: np.random.Generator) -> Thing:
    """Draw a sign with a uniform colour and word."""
    return Thing(SIGN, pick(rng, COLOURS), "large", pick(rng, WORDS))


def sample_scene(
    rng: np.random.Generator, count: int | None = None, signs: int | None = None
) -> Scene:
    """Draw a random page.

    Args:
      count: number of things, 1 to 4; None draws 1, 2, 3, 4 with probability 0.15, 0.25, 0.35,
        0.25.
      signs: how many of them are signs; None draws 1 in a quarter of the pages and 0 otherwise.

    A thing copies the kind of the one before it with probability 0.2, else the colour with 0.2, so
    that counting and comparing have something to find.
    """
    if count is None:
        u = rng.random()
        count = 1 + (u > 0.15) + (u > 0.4) + (u > 0.75)
    if signs is None:
        signs = int(rng.random() < 0.25)
    things = [sample_sign(rng) for _ in range(min(signs, count))]
    while len(things) < count:
        thing, u = sample_thing(rng), rng.random()
        if things and things[-1].kind != SIGN and u < 0.2:
            thing = replace(thing, kind=things[-1].kind)
        elif things and 0.2 <= u < 0.4:
            thing = replace(thing, colour=things[-1].colour)
        things.append(thing)
    cells: list[Thing | None] = [None] * 4
    for cell, thing in zip(shuffled(rng, (0, 1, 2, 3)), things, strict=False):
        cells[cell] = thing
    return Scene(pick(rng, BACKGROUNDS), (cells[0], cells[1], cells[2], cells[3]))


def sample_chart(rng: np.random.Generator) -> Chart:
    """Draw a chart: three different colours, heights independent and uniform in 1..8."""
    a, b, c = shuffled(rng, COLOURS)[:3]
    x, y, z = (1 + below(rng, MAX_HEIGHT) for _ in range(3))
    return Chart(pick(rng, BACKGROUNDS), ((a, x), (b, y), (c, z)))


def sample_page(rng: np.random.Generator) -> Scene | Chart:
    """Draw a chart one time in eight, else a scene, with a sign in nearly half of the scenes."""
    if rng.random() < 0.12:
        return sample_chart(rng)
    return sample_scene(rng, signs=int(rng.random() < 0.45))


def with_cell(scene: Scene, cell: int, thing: Thing | None) -> Scene:
    """Return `scene` with one cell exchanged."""
    cells = list(scene.cells)
    cells[cell] = thing
    return Scene(scene.background, (cells[0], cells[1], cells[2], cells[3]))


def edit(rng: np.random.Generator, scene: Scene, avoid: tuple[int, ...] = ()) -> tuple[Scene, Edit]:
    """Change one cell of `scene` that is not in `avoid`; return the new scene and the change.

    A page keeps at least one thing, and signs are not resized. With every occupied cell to be
    avoided and no free one left there is nothing to change: ValueError.
    """
    free = [cell for cell in scene.free if cell not in avoid]
    occupied = [(cell, thing) for cell, thing in scene.things if cell not in avoid]
    resizable = [(cell, thing) for cell, thing in occupied if thing.kind != SIGN]
    possible = {
        "recolour": occupied,
        "replace": occupied,
        "add": free,
        "remove": occupied if len(scene.things) > 1 else [],
        "resize": resizable,
    }
    kinds = [kind for kind, cells in possible.items() if cells]
    if not kinds:
        raise ValueError(
            f"picturebook edit: no cell of {scene} may change with avoid={avoid}; avoid fewer cells"
        )
    kind = pick(rng, kinds)
    before: Thing | None = None
    after: Thing | None = None
    if kind == "add":
        cell, after = pick(rng, free), sample_thing(rng)
    else:
        cell, before = pick(rng, resizable if kind == "resize" else occupied)
        if kind == "recolour":
            after = replace(before, colour=other(rng, COLOURS, before.colour))
        elif kind == "resize":
            after = replace(before, size=other(rng, SIZES, before.size))
        elif kind == "replace":
            after = replace(sample_thing(rng), kind=other(rng, KINDS, before.kind))
    return with_cell(scene, cell, after), Edit(kind, cell, before, after)

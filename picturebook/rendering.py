"""Draw a page: 48x48 RGB, a scene as 2x2 cells of 24 px, a chart as three bars on a grid.

A thing is a sprite that is drawn once per (kind, size, colour) by testing 6x6 sub-pixels against a
formula, so the same machine-independent pixels come out everywhere; a page then costs a few small
blends.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from picturebook import scenes

PAGE, CELL = 48, 24
JITTER = 2
PIXELS = {"small": 13, "large": 20}
UNIT = 5  # pixels per unit of a bar's height
BASELINE, BAR_WIDTH, BAR_LEFT = 45, 10, (5, 19, 33)
SUB = 6  # sub-pixels per pixel along an axis when a sprite is drawn

RGB = {
    "red": (222, 30, 36),
    "orange": (250, 136, 10),
    "yellow": (248, 222, 20),
    "green": (30, 155, 50),
    "blue": (25, 85, 225),
    "purple": (125, 40, 165),
    "pink": (252, 110, 190),
    "black": (38, 38, 42),
    "white": (250, 250, 250),
    "grey": (196, 196, 200),
    "cream": (248, 230, 186),
    "mint": (186, 236, 204),
    "sky": (182, 220, 250),
    "lilac": (222, 202, 246),
}
INK, PALE = (24, 24, 28), (255, 252, 240)
DARK_TEXT_ON = ("orange", "yellow", "pink")

GLYPH_WIDTH, GLYPH_HEIGHT, PITCH = 5, 7, 6

GLYPHS = {
    "A": ".###. #...# #...# ##### #...# #...# #...#",
    "B": "####. #...# #...# ####. #...# #...# ####.",
    "C": ".#### #.... #.... #.... #.... #.... .####",
    "D": "####. #...# #...# #...# #...# #...# ####.",
    "E": "##### #.... #.... ####. #.... #.... #####",
    "F": "##### #.... #.... ####. #.... #.... #....",
    "G": ".#### #.... #.... #.### #...# #...# .####",
    "H": "#...# #...# #...# ##### #...# #...# #...#",
    "I": "##### ..#.. ..#.. ..#.. ..#.. ..#.. #####",
    "J": "..### ...#. ...#. ...#. ...#. #..#. .##..",
    "K": "#...# #..#. #.#.. ##... #.#.. #..#. #...#",
    "L": "#.... #.... #.... #.... #.... #.... #####",
    "M": "#...# ##.## #.#.# #.#.# #...# #...# #...#",
    "N": "#...# ##..# ##..# #.#.# #..## #..## #...#",
    "O": ".###. #...# #...# #...# #...# #...# .###.",
    "P": "####. #...# #...# ####. #.... #.... #....",
    "R": "####. #...# #...# ####. #.#.. #..#. #...#",
    "S": ".#### #.... #.... .###. ....# ....# ####.",
    "T": "##### ..#.. ..#.. ..#.. ..#.. ..#.. ..#..",
    "U": "#...# #...# #...# #...# #...# #...# .###.",
    "W": "#...# #...# #...# #.#.# #.#.# ##.## #...#",
    "X": "#...# #...# .#.#. ..#.. .#.#. #...# #...#",
    "Y": "#...# #...# .#.#. ..#.. ..#.. ..#.. ..#..",
    "Z": "##### ....# ...#. ..#.. .#... #.... #####",
}
"""The 5x7 bitmap font of the signs: one row of '#' and '.' per scan line, rows separated by
spaces."""

Grid = np.ndarray  # [H, W] float coordinates or booleans


def text_mask(word: str) -> np.ndarray:
    """Return `word` as a boolean picture [7, 6 * len(word) - 1]; KeyError for other letters."""
    mask = np.zeros((GLYPH_HEIGHT, PITCH * len(word) - 1), bool)
    for i, letter in enumerate(word):
        rows = GLYPHS[letter].split()
        mask[:, PITCH * i : PITCH * i + GLYPH_WIDTH] = [[dot == "#" for dot in row] for row in rows]
    return mask


def disc(x: Grid, y: Grid, cx: float, cy: float, rx: float, ry: float | None = None) -> Grid:
    """Mark the points inside the ellipse at (cx, cy)."""
    return ((x - cx) / rx) ** 2 + ((y - cy) / (ry or rx)) ** 2 <= 1


def rect(x: Grid, y: Grid, left: float, top: float, right: float, bottom: float) -> Grid:
    """Mark the points inside the rectangle."""
    return (x >= left) & (x <= right) & (y >= top) & (y <= bottom)


def polygon(x: Grid, y: Grid, *points: tuple[float, float]) -> Grid:
    """Mark the points inside the polygon (even-odd rule)."""
    inside = np.zeros(x.shape, bool)
    for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
        if y0 != y1:
            crosses = (y0 > y) != (y1 > y)
            inside ^= crosses & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
    return inside


def _shape(kind: str, x: Grid, y: Grid) -> tuple[Grid, Grid, Grid]:
    """Return coloured part, pale and dark details of `kind` in the unit square, y downwards."""
    none = np.zeros(x.shape, bool)
    if kind == "ball":
        return disc(x, y, 0.5, 0.5, 0.5), disc(x, y, 0.33, 0.3, 0.12), none
    if kind == "box":
        ribbon = rect(x, y, 0.42, 0.1, 0.58, 0.98) | rect(x, y, 0.02, 0.46, 0.98, 0.6)
        return rect(x, y, 0.02, 0.1, 0.98, 0.98), ribbon, none
    if kind == "tree":
        crown = polygon(x, y, (0.5, 0.0), (0.86, 0.45), (0.14, 0.45)) | polygon(
            x, y, (0.5, 0.2), (1.0, 0.78), (0.0, 0.78)
        )
        return crown, none, rect(x, y, 0.4, 0.78, 0.6, 1.0)
    if kind == "house":
        walls = rect(x, y, 0.12, 0.42, 0.88, 1.0) | polygon(
            x, y, (0.5, -0.02), (1.02, 0.46), (-0.02, 0.46)
        )
        return walls, rect(x, y, 0.54, 0.6, 0.74, 1.0), rect(x, y, 0.24, 0.58, 0.42, 0.76)
    if kind == "star":
        tips = [
            (0.5 + r * math.sin(i * math.pi / 5), 0.53 - r * math.cos(i * math.pi / 5))
            for i, r in enumerate([0.55, 0.22] * 5)
        ]
        return polygon(x, y, *tips), none, none
    if kind == "fish":
        body = disc(x, y, 0.4, 0.5, 0.42, 0.32) | polygon(
            x, y, (0.68, 0.5), (1.02, 0.14), (1.02, 0.86)
        )
        return body, disc(x, y, 0.2, 0.42, 0.09), none
    if kind == "boat":
        hull = polygon(x, y, (0.0, 0.66), (1.0, 0.66), (0.8, 1.0), (0.2, 1.0))
        sail = polygon(x, y, (0.56, 0.02), (0.56, 0.58), (0.98, 0.58))
        return hull | sail, none, rect(x, y, 0.45, 0.0, 0.53, 0.66)
    if kind == "cup":
        body = polygon(x, y, (0.02, 0.1), (0.7, 0.1), (0.6, 0.98), (0.12, 0.98))
        handle = disc(x, y, 0.72, 0.45, 0.28, 0.27) & ~disc(x, y, 0.72, 0.45, 0.13, 0.12)
        return body | handle, rect(x, y, 0.14, 0.16, 0.58, 0.27), none
    if kind == "key":
        bow = disc(x, y, 0.27, 0.5, 0.29) & ~disc(x, y, 0.25, 0.5, 0.11)
        blade = rect(x, y, 0.5, 0.41, 1.02, 0.6)
        teeth = rect(x, y, 0.66, 0.6, 0.78, 0.82) | rect(x, y, 0.9, 0.6, 1.02, 0.82)
        return bow | blade | teeth, none, none
    if kind == "moon":
        return disc(x, y, 0.5, 0.5, 0.5) & ~disc(x, y, 0.8, 0.4, 0.4), none, none
    if kind == "heart":
        lobes = disc(x, y, 0.26, 0.29, 0.26) | disc(x, y, 0.74, 0.29, 0.26)
        tip = polygon(x, y, (0.04, 0.42), (0.5, 0.32), (0.96, 0.42), (0.5, 0.98))
        return lobes | tip, none, none
    if kind == "flower":
        petals = none.copy()
        for i in range(5):
            angle = 2 * math.pi * i / 5
            petals |= disc(
                x, y, 0.5 + 0.27 * math.sin(angle), 0.33 - 0.24 * math.cos(angle), 0.2, 0.17
            )
        stem = rect(x, y, 0.45, 0.6, 0.55, 1.0) | disc(x, y, 0.66, 0.82, 0.16, 0.08)
        return petals, disc(x, y, 0.5, 0.33, 0.15), stem & ~petals
    raise ValueError(f"picturebook sprite: unknown kind {kind!r}; one of {', '.join(scenes.KINDS)}")


@cache
def sprite(kind: str, size: str, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a thing as colour times alpha [n, n, 3] and 1 - alpha [n, n, 1], float32."""
    n = PIXELS[size]
    margin = 1.0 / n  # one pixel on each side is left for the outline
    unit = ((np.arange(n * SUB) + 0.5) / (n * SUB) - margin) / (1 - 2 * margin)
    x, y = np.meshgrid(unit, unit)
    fill, pale, dark = _shape(kind, x, y)
    solid = fill | pale | dark
    reach = 5 if size == "large" else 3
    outline, padded = solid.copy(), np.pad(solid, reach)
    for dx in range(-reach, reach + 1):
        for dy in range(-reach, reach + 1):
            if dx * dx + dy * dy <= reach * reach:
                outline |= padded[reach + dy :, reach + dx :][: n * SUB, : n * SUB]
    fine = np.zeros((n * SUB, n * SUB, 3), np.float32)
    fine[outline] = INK
    fine[fill] = RGB[colour]
    fine[pale] = PALE
    fine[dark] = INK
    alpha = outline.reshape(n, SUB, n, SUB).mean((1, 3), dtype=np.float32)[..., None]
    return fine.reshape(n, SUB, n, SUB, 3).mean((1, 3), dtype=np.float32), 1 - alpha


@cache
def board(colour: str, word: str) -> np.ndarray:
    """Draw a sign's board [11, 24, 3] with its word, dark on the lighter colours."""
    picture = np.empty((11, CELL, 3), np.float32)
    picture[:] = RGB[colour]
    letters = text_mask(word)
    height, width = letters.shape
    left = (CELL - width) // 2
    picture[2 : 2 + height, left : left + width][letters] = INK if colour in DARK_TEXT_ON else PALE
    return picture


def _draw_thing(
    page: np.ndarray, thing: scenes.Thing, top: int, left: int, dy: int, dx: int
) -> None:
    """Draw a thing into the cell at (top, left), moved by (dy, dx) pixels."""
    if thing.kind == scenes.SIGN and thing.word is not None:
        y = top + 5 + dy
        page[y + 11 : top + CELL - 1, left + 10 : left + 14] = INK
        page[y : y + 11, left : left + CELL] = board(thing.colour, thing.word)
        return
    colour, through = sprite(thing.kind, thing.size, thing.colour)
    n = len(colour)
    y, x = top + (CELL - n) // 2 + dy, left + (CELL - n) // 2 + dx
    window = page[y : y + n, x : x + n]
    window *= through
    window += colour


def _draw_chart(page: np.ndarray, chart: scenes.Chart) -> None:
    for unit in range(2, scenes.MAX_HEIGHT + 1, 2):
        page[BASELINE - unit * UNIT, 2:46] *= 0.62 if unit == 4 else 0.85
    for (colour, height), left in zip(chart.bars, BAR_LEFT, strict=True):
        top = BASELINE - height * UNIT
        page[top:BASELINE, left : left + BAR_WIDTH] = INK
        page[top + 1 : BASELINE, left + 1 : left + BAR_WIDTH - 1] = RGB[colour]
    page[BASELINE, 2:46] = INK


def render(page: scenes.Scene | scenes.Chart, rng: np.random.Generator) -> np.ndarray:
    """Return the page as uint8 [48, 48, 3].

    `rng` moves each thing by up to 2 px inside its cell (signs up and down only: their word fills
    the cell) and makes the whole page up to 6 % darker or lighter; it takes nine numbers whatever
    is on the page.
    """
    noise = rng.random(9)
    canvas = np.empty((PAGE, PAGE, 3), np.float32)
    canvas[:] = RGB[page.background]
    if isinstance(page, scenes.Chart):
        _draw_chart(canvas, page)
    else:
        shifts = (noise * (2 * JITTER + 1)).astype(int) - JITTER
        for cell, thing in page.things:
            top, left = CELL * (cell // 2), CELL * (cell % 2)
            _draw_thing(canvas, thing, top, left, int(shifts[2 * cell]), int(shifts[2 * cell + 1]))
    canvas *= 0.94 + 0.12 * float(noise[8])
    return np.minimum(canvas, 255.0).astype(np.uint8)


LABELS = {
    "kind": ("none", *scenes.KINDS, scenes.SIGN, "chart cell"),
    "colour": ("none", *scenes.COLOURS),
    "size": ("none", *scenes.SIZES),
    "word": ("none", *scenes.WORDS),
    "background": scenes.BACKGROUNDS,
}
"""Classes of each attribute that a vision tower learns."""
LABEL_CLASSES = {name: len(values) for name, values in LABELS.items()} | {
    "bar_colour": len(LABELS["colour"]),
    "bar_height": scenes.MAX_HEIGHT + 1,
}


def tower_labels(page: scenes.Scene | scenes.Chart) -> dict[str, np.ndarray]:
    """Return what a vision tower should see on the page, as int32 class numbers.

    `kind`, `colour`, `size`, `word` [4] per cell in reading order (0 none; kind: 1..12 `KINDS`, 13
    sign, 14 chart cell), `background` [] (index into `BACKGROUNDS`), `bar_colour`, `bar_height` [3]
    (0 none: no chart). `LABEL_CLASSES` gives the number of classes of each.
    """
    labels = {name: np.zeros(4, np.int32) for name in ("kind", "colour", "size", "word")}
    labels["background"] = np.array(scenes.BACKGROUNDS.index(page.background), np.int32)
    labels["bar_colour"], labels["bar_height"] = np.zeros(3, np.int32), np.zeros(3, np.int32)
    if isinstance(page, scenes.Chart):
        labels["kind"][:] = LABELS["kind"].index("chart cell")
        for i, (colour, height) in enumerate(page.bars):
            labels["bar_colour"][i] = LABELS["colour"].index(colour)
            labels["bar_height"][i] = height
        return labels
    for cell, thing in page.things:
        for name in ("kind", "colour", "size", "word"):
            labels[name][cell] = LABELS[name].index(getattr(thing, name) or "none")
    return labels

"""Draw a race of `jaxspec demo` as an SVG that only its styles move.

Two lanes write the same answer. Each square is a pass of the target, and its tokens appear with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from operator import itemgetter
from textwrap import wrap
from typing import Any, NamedTuple

from jaxspec.errors import printable

WIDTH, EDGE = 600, 22
COLUMNS = 57
"""Characters in a line of the answer."""
LINE, CHARACTER = 22, 9.64
"""Height of a line and width of a character, in pixels."""
PAGE = 72
"""Side of the image that a question is about."""
RACE, PERIOD = 8.0, 12.0
"""Seconds in which the slower lane writes, and after which the picture begins again."""
TARGETS = {
    "eyes": "SmolLM2-135M with a vision tower",
    "smollm2": "SmolLM2-135M",
    "mini": "picture-book models",
}
"""Names of the demo's models."""
STYLE = """
text{font:16px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#1f2328}
.name{font:600 17px system-ui,sans-serif}.note{font:14px system-ui,sans-serif;fill:#59636e}
.end{text-anchor:end}rect{fill:#6e7781}.drafted{fill:#1a7f37;font-weight:700;text-decoration:underline}
.page{fill:#fff;stroke:#d1d9e0}.pixels{image-rendering:pixelated}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.note{fill:#9198a1}.drafted{fill:#3fb950}
rect{fill:#9198a1}.page{fill:#0d1117;stroke:#3d444d}}
@media(prefers-reduced-motion:reduce){g{animation:none!important}}
"""


class Part(NamedTuple):
    """Place the characters of one token on one line."""

    token: int
    line: int
    column: int
    text: str


def draw(race: dict[str, Any]) -> str:
    """Return the picture of a race's first prompt; `race` is what `jaxspec demo --out` writes."""
    row = race["rows"][0]
    drafted = [place >= 0 for _, place in row["tokens"]]
    parts = list(_parts([printable(piece) for piece, _ in row["tokens"]]))
    tokens = range(len(drafted))  # the last one, EOS, has no text
    # Prefill gives the first token, in pass 0; the target's own token ends each later pass.
    passes = [min(token, 1) + drafted[1:token].count(False) for token in tokens]
    green = {token for token in tokens if drafted[token]}
    lanes = [("plain decoding", list(tokens), set[int]()), ("with a draft", passes, green)]
    height = 43 + LINE * (1 + max((part.line for part in parts), default=0))
    each = [ms / max(count, 1) / 1000 for ms, count in zip(row["decode_ms"], row["passes"])]
    longest = max(ends[-1] * seconds for (_, ends, _), seconds in zip(lanes, each)) or 1.0
    shapes, y, left = [], EDGE + 8, EDGE
    if page := row.get("page"):
        frame = f'x="{EDGE}" y="{EDGE - 6}" width="{PAGE}" height="{PAGE}"'
        shapes.append(f'<image href="data:image/png;base64,{page}" {frame} class="pixels"/>')
        y, left = y + PAGE // 2 - 9, EDGE + PAGE + 14
    for line in wrap(printable(row["prompt"]), 80 if left == EDGE else 66)[:2]:
        shapes.append(_text(left, y, line, "note"))
        y += 19
    if page:
        y = EDGE + PAGE + 12
    for lane, seconds in zip(lanes, each):
        shapes += _lane(y + 18, parts, *lane, seconds, seconds * RACE / PERIOD / longest)
        y += 18 + height
    y += 6
    same = "The answers are identical, and drafting is" if row["identical"] else "Drafting is"
    shapes.append(f'<rect x="{EDGE}" y="{y - 8}" width="8" height="8"/>')
    for left, line in (
        (EDGE + 14, "one pass of the target. Green, underlined: drafted and kept."),
        (EDGE, f"{same} {row['speedup']:.2f} times as fast."),
        (EDGE, f"This picture takes {RACE / longest:.1f} times as long as the decoding did."),
        (EDGE, f"{TARGETS.get(race['model'], race['model'])}, {race['device']}, {race['load']}"),
    ):
        shapes.append(_text(left, y, line, "note"))
        y += 19
    head = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img"'
    page = f'<rect x="1" y="1" width="{WIDTH - 2}" height="{y - 2}" rx="8" class="page"/>'
    title = f"<title>The same answer, in {tokens[-1]} passes and in {passes[-1]}</title>"
    # It begins where all is written, so that a first look finds no empty lanes.
    moves = f"g{{animation:{PERIOD:g}s step-end -{RACE:g}s infinite}}"
    style = f"<style>{STYLE}{moves}</style>"
    picture = [f'<svg xmlns="http://www.w3.org/2000/svg" {head}>', title, style, page, *shapes]
    return "\n".join([*picture, "</svg>\n"])


def _lane(
    top: int,
    parts: list[Part],
    name: str,
    passes: list[int],
    drafted: set[int],
    seconds: float,
    share: float,
) -> Iterator[str]:
    """Yield a title, and for each pass a group with its square and its tokens.

    Args:
      passes: Pass in which each token appears.
      seconds: Time of a pass.
      share: The same as a share of the picture's period.
    """
    yield _text(EDGE, top, name, "name")
    count = passes[-1]
    pitch = min(11.0, (WIDTH - 2 * EDGE) / max(count, 1))
    for number in range(count + 1):
        move = f"{name[0]}{number}"
        moves = f"@keyframes {move}{{0%{{opacity:0}}{number * share:.2%}{{opacity:1}}}}"
        yield f'<g style="animation-name:{move}"><style>{moves}</style>'
        if number:
            frame = f'x="{EDGE + pitch * (number - 1):.1f}" y="{top + 11}"'
            yield f'<rect {frame} width="{pitch - 3:.1f}" height="8"/>'
        for token, line, column, text in parts:
            if passes[token] == number:
                kind = "drafted" if token in drafted else ""
                yield _text(EDGE + CHARACTER * column, top + 43 + LINE * line, text, kind)
        if number == count:
            counted = f"{count} passes, {(len(passes) - 1) / max(count, 1):.2f} tokens per pass"
            yield _text(WIDTH - EDGE, top, f"{counted}, {1e3 * count * seconds:.1f} ms", "note end")
        yield "</g>"


def _text(x: float, y: int, text: str, kind: str) -> str:
    """Return one line of text; y is its baseline."""
    label = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y}"{label}>{escape(text)}</text>'


def _parts(pieces: Sequence[str]) -> Iterator[Part]:
    """Yield the tokens' parts, with lines broken between words."""
    letters = [(letter, token) for token, piece in enumerate(pieces) for letter in piece]
    line = column = 0
    for word in re.finditer(r"\n+|[^\S\n]+|\S+", "".join(letter for letter, _ in letters)):
        size, space = len(word[0]), word[0].isspace()
        if word[0][0] == "\n" or (not space and 0 < column > COLUMNS - size):
            line, column = line + 1, 0
        for token, run in groupby(letters[word.start() : word.end()], itemgetter(1)):
            text = "".join(letter for letter, _ in run)
            if not space:
                yield Part(token, line, column, text)
            column += len(text.lstrip("\n"))

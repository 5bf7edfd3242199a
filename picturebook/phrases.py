"""Write words and phrases: things, places, numbers, lists, and the few remarks that several
dialogues share.
"""

from __future__ import annotations

from collections.abc import Sequence

from picturebook.samples import COUNT_WORDS
from picturebook.scenes import BAR_PLACES, PLACES, SIGN, Chart, Scene, Thing

NOUNS = ("page", "picture", "image")
NAMES = ("Mia", "Leo", "Nora", "Otto", "Pip", "Anna")
ORDINALS = ("first", "second", "third", "fourth", "fifth")
CONNECTORS = ("First", "Then", "After that", "Later", "In the end")

STANDS = {
    "ball": "lies", "box": "stands", "tree": "grows", "house": "stands", "star": "shines",
    "fish": "swims", "boat": "floats", "cup": "stands", "key": "lies", "moon": "shines",
    "heart": "glows", "flower": "grows", "sign": "hangs",
}  # fmt: skip
ACTIONS = {
    "ball": "played with", "box": "looked into", "tree": "climbed", "house": "visited",
    "star": "made a wish on", "fish": "fed", "boat": "sailed", "cup": "drank from",
    "key": "picked up", "moon": "sang to", "heart": "loved", "flower": "watered", "sign": "read",
}  # fmt: skip


def an(noun: str) -> str:
    """Return `noun` with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def full(thing: Thing) -> str:
    """Name a thing in full: 'small red ball', 'blue sign that says OPEN'."""
    return (
        f"{short(thing)} that says {thing.word}" if thing.word else f"{thing.size} {short(thing)}"
    )


def short(thing: Thing) -> str:
    """Name a thing in short: 'red ball'."""
    return f"{thing.colour} {thing.kind}"


def at(cell: int) -> str:
    """Name a cell: 'at the top left'."""
    return f"at the {PLACES[cell]}"


def bar_at(bar: int) -> str:
    """Name the place of a bar: 'on the left'."""
    return f"{'in' if bar == 1 else 'on'} the {BAR_PLACES[bar]}"


def inside(noun: str) -> str:
    """Return 'on the page' or 'in the picture'."""
    return f"{'on' if noun == 'page' else 'in'} the {noun}"


def plural(noun: str) -> str:
    """Return a plural: 'boxes', 'fish', 'red balls'."""
    if noun.endswith("fish"):
        return noun
    return noun + ("es" if noun.endswith("box") else "s")


def number(n: int, noun: str) -> str:
    """Count things in words: 'no balls', 'one ball', 'three balls'."""
    return f"{COUNT_WORDS[n]} {noun if n == 1 else plural(noun)}"


def there(n: int) -> str:
    """Return 'there is' or 'there are' for n things."""
    return "there is" if n == 1 else "there are"


def listing(items: Sequence[str]) -> str:
    """Join phrases: 'a, b and c'."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def cap(text: str) -> str:
    """Return `text` with a capital first letter."""
    return text[0].upper() + text[1:]


def join(*sentences: str) -> str:
    """Join sentences, without empty ones."""
    return " ".join(cap(sentence) for sentence in sentences if sentence)


def ref(scene: Scene, cell: int) -> str:
    """Return the shortest of 'ball', 'red ball' and 'small red ball' that fits no other thing.

    If all fit another thing, the cell is added.
    """
    thing = scene.cells[cell]
    assert thing is not None
    neighbours = [other for where, other in scene.things if where != cell]
    if all(other.kind != thing.kind for other in neighbours):
        return thing.kind
    if all((other.kind, other.colour) != (thing.kind, thing.colour) for other in neighbours):
        return short(thing)
    if thing.kind != SIGN and all(full(other) != full(thing) for other in neighbours):
        return full(thing)
    return f"{short(thing)} {at(cell)}"


def unique(scene: Scene) -> list[tuple[int, Thing]]:
    """Return the things whose kind, or colour and kind, no other thing has."""
    return [(cell, thing) for cell, thing in scene.things if len(ref(scene, cell).split()) <= 2]


def side(of: int, to: int) -> str:
    """Say where cell `to` is, seen from cell `of`: 'to the right of', 'below', 'across from'."""
    if of // 2 == to // 2:
        return "to the right of" if to > of else "to the left of"
    if of % 2 == to % 2:
        return "below" if to > of else "above"
    return "across from"


def neighbour(scene: Scene, cell: int) -> str:
    """Name the nearest other thing, in row, column or diagonal, or say that there is none."""
    for to in (cell ^ 1, cell ^ 2, cell ^ 3):
        thing = scene.cells[to]
        if thing is not None:
            return f"{cap(an(full(thing)))} is {side(cell, to)} it."
    return "There is nothing else near it."


def rest(scene: Scene, *cells: int) -> list[str]:
    """Name each thing in another cell than these: 'a small red ball'."""
    return [an(full(thing)) for cell, thing in scene.things if cell not in cells]


def remark(scene: Scene) -> str:
    """Remark on the whole page: same kinds, same colours, same sizes, or all different."""
    things = [thing for _, thing in scene.things]
    if len(things) == 1:
        return "It is all alone there."
    for i, thing in enumerate(things):
        for later in things[i + 1 :]:
            if later.kind == thing.kind:
                return f"There are {number(sum(t.kind == thing.kind for t in things), thing.kind)}."
            if later.colour == thing.colour:
                return f"The {thing.kind} and the {later.kind} are both {thing.colour}."
    if len({thing.size for thing in things}) == 1:
        return f"All of them are {things[0].size}."
    return "Each thing has its own colour."


def caption(page: Scene | Chart) -> str:
    """Caption the page in one short sentence, without a capital or a full stop."""
    if isinstance(page, Chart):
        bars = [f"{an(colour)} bar of {height}" for colour, height in page.bars]
        return f"a chart with {listing(bars)} on {an(page.background)} background"
    things = [f"{an(full(thing))} {at(cell)}" for cell, thing in page.things]
    return f"{listing(things)} on {an(page.background)} background"

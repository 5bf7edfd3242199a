"""Ask short questions about one attribute with one right value, and hold conversations of several
about one page.

They are the densest supervision a reader of pages can get, and their answers can be judged
(`samples.Probe`).
"""

from __future__ import annotations

import numpy as np

from picturebook.phrases import (
    NOUNS,
    an,
    at,
    bar_at,
    cap,
    full,
    inside,
    number,
    plural,
    ref,
    short,
    there,
)
from picturebook.samples import COUNT_WORDS, IMAGE, Probe, Sample, drawn
from picturebook.scenes import (
    COLOURS,
    KINDS,
    PLACES,
    SIGN,
    Chart,
    Scene,
    below,
    pick,
    sample_page,
    sample_scene,
)

Turn = tuple[str, str, Probe]  # question without image placeholder, reference answer, how to judge


def _turn(kind: str, question: str, answer: str, expected: str) -> Turn:
    return cap(question), cap(answer), Probe.of(kind, expected, answer)


def what(rng: np.random.Generator, scene: Scene) -> Turn:
    """Ask what is in a cell; one time in ten the cell is empty."""
    free = scene.free
    cell = pick(rng, free) if free and rng.random() < 0.1 else pick(rng, scene.things)[0]
    thing, noun, way = scene.cells[cell], pick(rng, NOUNS), below(rng, 3)
    name = "nothing" if thing is None else an(full(thing))
    short_answer = f"nothing is {at(cell)}." if thing is None else f"it is {name}."
    question = (
        f"what is {at(cell)} of the {noun}?",
        f"tell me what you see {at(cell)}.",
        f"which thing is {at(cell)}?",
    )[way]
    answer = (
        f"{name} is {at(cell)} of the {noun}.",
        f"I see {name} {at(cell)}.",
        short_answer,
    )[way]
    return _turn("what", question, answer, "nothing" if thing is None else thing.kind)


def where(rng: np.random.Generator, scene: Scene) -> Turn | None:
    """Ask where a thing is that kind, colour or size tells from all others."""
    names = [(cell, ref(scene, cell)) for cell, _ in scene.things]
    names = [(cell, name) for cell, name in names if " at " not in name]
    if not names:
        return None
    cell, name = pick(rng, names)
    thing = scene.cells[cell]
    assert thing is not None
    if name == thing.kind and rng.random() < 0.5:
        name = short(thing)
    noun, way = pick(rng, NOUNS), below(rng, 2)
    question = (f"where is the {name}?", f"in which part of the {noun} is the {name}?")[way]
    answer = (f"the {name} is {at(cell)}.", f"the {name} is {at(cell)} of the {noun}.")[way]
    return _turn("where", question, answer, PLACES[cell])


def colour(rng: np.random.Generator, scene: Scene) -> Turn:
    """Ask for the colour of the thing of a kind, or in a cell."""
    cell, thing = pick(rng, scene.things)
    name = f"the {thing.kind}"
    if sum(near.kind == thing.kind for _, near in scene.things) == 1 and rng.random() < 0.6:
        way = below(rng, 2)
        question = (f"what colour is {name}?", f"which colour does {name} have?")[way]
        answer = (f"{name} is {thing.colour}.", f"{name} has the colour {thing.colour}.")[way]
    else:
        question = f"what colour is the thing {at(cell)}?"
        answer = f"{name} {at(cell)} is {thing.colour}."
    return _turn("colour", question, answer, thing.colour)


def count(rng: np.random.Generator, scene: Scene) -> Turn:
    """Count things, things of a colour, or things of a kind, absent ones included."""
    things, noun, way = [thing for _, thing in scene.things], pick(rng, NOUNS), below(rng, 3)
    if way == 0:
        n, name = len(things), "thing"
    elif way == 1:
        value = pick(rng, things).colour if rng.random() < 0.75 else pick(rng, COLOURS)
        n, name = sum(thing.colour == value for thing in things), f"{value} thing"
    else:
        value = pick(rng, things).kind if rng.random() < 0.75 else pick(rng, KINDS)
        n, name = sum(thing.kind == value for thing in things), value
    names, where_to, way = plural(name), inside(noun), below(rng, 2)
    question = (f"how many {names} are {where_to}?", f"count the {names} {where_to}.")[way]
    answer = f"{(there(n), 'I count')[way]} {number(n, name)} {where_to}."
    return _turn("count", question, answer, COUNT_WORDS[n])


def sign(rng: np.random.Generator, scene: Scene) -> Turn | None:
    """Ask what a sign says."""
    signs = [(cell, thing) for cell, thing in scene.things if thing.kind == SIGN]
    if not signs:
        return None
    cell, thing = pick(rng, signs)
    assert thing.word is not None
    name = ref(scene, cell)
    question, answer = pick(
        rng,
        (
            (f"what does the {name} say?", f"the {name} says {thing.word}."),
            (f"read the {name}, please.", f"the word on the {name} is {thing.word}."),
            (f"which word is {at(cell)}?", f"the word {at(cell)} is {thing.word}."),
        ),
    )
    return _turn("sign", question, answer, thing.word.lower())


def size(rng: np.random.Generator, scene: Scene) -> Turn | None:
    """Ask whether a thing is small or large; signs are left out."""
    things = [(cell, thing) for cell, thing in scene.things if thing.kind != SIGN]
    if not things:
        return None
    cell, thing = pick(rng, things)
    name = ref(scene, cell)
    if thing.size in name:
        name = f"thing {at(cell)}"
    return _turn("size", f"how big is the {name}?", f"the {name} is {thing.size}.", thing.size)


def background(rng: np.random.Generator, page: Scene | Chart) -> Turn:
    """Ask for the page's background."""
    noun, value = pick(rng, NOUNS), page.background
    question = f"what background does the {noun} have?"
    return _turn("background", question, f"the {noun} has {an(value)} background.", value)


def bar_colour(rng: np.random.Generator, chart: Chart) -> Turn:
    """Ask for the colour of the bar on the left, in the middle or on the right."""
    i = below(rng, 3)
    bar, value = f"the bar {bar_at(i)}", chart.bars[i][0]
    return _turn("colour", f"what colour is {bar}?", f"{bar} is {value}.", value)


def bar_height(rng: np.random.Generator, chart: Chart) -> Turn:
    """Ask for the height of the bar of a colour."""
    value, height = pick(rng, chart.bars)
    bar, way = f"the {value} bar", below(rng, 2)
    question = (f"how tall is {bar}?", f"what is the height of {bar}?")[way]
    answer = (f"{bar} is {height} tall.", f"the height of {bar} is {height}.")[way]
    return _turn("height", question, answer, str(height))


ASKERS = {asker.__name__: asker for asker in (what, where, colour, count, sign, size, background)}
MIX = (
    ("what",) * 4
    + ("where",) * 2
    + ("colour",) * 3
    + ("count",) * 2
    + ("sign",) * 2
    + ("size", "background")
)


def ask(rng: np.random.Generator, page: Scene | Chart) -> Turn:
    """Ask one attribute question that suits the page."""
    if isinstance(page, Chart):
        u = rng.random()
        asker = background if u < 0.1 else bar_colour if u < 0.4 else bar_height
        return asker(rng, page)
    while True:
        turn = ASKERS[pick(rng, MIX)](rng, page)
        if turn is not None:
            return turn


def attributes(rng: np.random.Generator) -> Sample:
    """Ask three to five different attribute questions about one page."""
    return _conversation("attributes", rng, 3)


def interview(rng: np.random.Generator) -> Sample:
    """Ask eight to ten different attribute questions about one page."""
    return _conversation("interview", rng, 8)


def _conversation(name: str, rng: np.random.Generator, least: int) -> Sample:
    page = sample_page(rng)
    count, turns, questions = least + below(rng, 3), [], set()
    for _ in range(4 * least):
        turn = ask(rng, page)
        if turn[1] not in questions:
            questions.add(turn[1])
            turns.append(turn)
        if len(turns) == count:
            break
    return _sample(name, rng, page, turns)


def probe_sample(rng: np.random.Generator, kind: str) -> Sample:
    """Return one page and one question of `kind`, one of `samples.PROBE_KINDS`, with its probe."""
    while True:
        scene = sample_scene(rng, signs=1 if kind == "sign" else None)
        turn = ASKERS[kind](rng, scene)
        if turn is not None:
            return _sample(f"probe-{kind}", rng, scene, [turn])


def _sample(name: str, rng: np.random.Generator, page: Scene | Chart, turns: list[Turn]) -> Sample:
    texts = [(question, answer) for question, answer, _ in turns]
    texts[0] = (f"{IMAGE}\n{texts[0][0]}", texts[0][1])
    return drawn(name, rng, [page], texts, tuple(probe for _, _, probe in turns))

"""Write dialogues about one page: describe, read, exist, reason and chart.

Each function draws a page, a question and the answer from `rng`. What an answer says comes from the
page alone; how it says it comes mostly from how the question was put, partly from the page, and now
and then from a coin, so that the wording can be learnt but not read off the question.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from picturebook.phrases import (
    NOUNS,
    STANDS,
    an,
    at,
    bar_at,
    cap,
    caption,
    full,
    inside,
    join,
    listing,
    neighbour,
    number,
    plural,
    ref,
    remark,
    rest,
    short,
    side,
    there,
    unique,
)
from picturebook.samples import IMAGE, Sample, drawn
from picturebook.scenes import (
    COLOURS,
    KINDS,
    PLACES,
    SIGN,
    SIZES,
    Chart,
    Scene,
    Thing,
    below,
    other,
    pick,
    sample_chart,
    sample_page,
    sample_scene,
)

Turn = tuple[str, str]


def one_page(name: str, rng: np.random.Generator, page: Scene | Chart, turn: Turn) -> Sample:
    """Return the sample of one page and one turn."""
    question, answer = turn
    return drawn(name, rng, [page], [(f"{IMAGE}\n{question}", answer)])


# describe
# --------------------------------------------------------------------------------------------


def _by_rows(things: list[tuple[int, Thing]], say: Callable[[int, Thing], str]) -> list[str]:
    """Say something of each thing, a sentence a row."""
    rows = [[say(cell, thing) for cell, thing in things if cell // 2 == row] for row in (0, 1)]
    return [", and ".join(parts) + "." for parts in rows if parts]


def _place_first(things: list[tuple[int, Thing]]) -> list[str]:
    """Say 'At the top left there is ..., and at the top right ...'."""
    return _by_rows(things, lambda cell, thing: f"{at(cell)} there is {an(full(thing))}")


def _thing_first(things: list[tuple[int, Thing]]) -> list[str]:
    """Say 'A large red ball lies at the top left, and ...'."""
    return _by_rows(
        things, lambda cell, thing: f"{an(full(thing))} {STANDS[thing.kind]} {at(cell)}"
    )


def _piece_by_piece(things: list[tuple[int, Thing]]) -> list[str]:
    """Say 'The ball at the top left is large and red.', a sentence a thing."""
    return [
        f"the {thing.kind} {at(cell)} is {thing.colour} and says {thing.word}."
        if thing.word
        else f"the {thing.kind} {at(cell)} is {thing.size} and {thing.colour}."
        for cell, thing in things
    ]


PRAISE = {
    "white": "clear", "grey": "calm", "cream": "warm", "mint": "fresh", "sky": "bright",
    "lilac": "soft",
}  # fmt: skip
"""What a kind description says of a page, by its background."""


def describe_turn(rng: np.random.Generator, scene: Scene) -> Turn:
    """Describe the page as the question asks: plainly, kindly, in detail, as a list, or briefly."""
    noun, things, style, tint = pick(rng, NOUNS), list(scene.things), rng.random(), scene.background
    counted = number(len(things), "thing")
    if style < 0.4:
        way = below(rng, 3)
        question = (
            f"Describe this {noun}.",
            f"What is {inside(noun)}?",
            f"Tell me what you see {inside(noun)}.",
        )[way]
        opening = (
            f"the {noun} has {an(tint)} background with {counted} on it.",
            f"{there(len(things))} {counted} {inside(noun)}, and the background is {tint}.",
            f"I see {counted} on {an(tint)} background.",
        )[way]
        usual = _place_first if way != 2 else _thing_first
        body = usual(things) if rng.random() < 0.85 else _thing_first(things)
        return question, join(opening, *body, remark(scene))
    if style < 0.6:
        question = pick(
            rng, (f"Please describe the {noun} for a child.", f"Kindly describe this {noun}.")
        )
        opening = f"what a {PRAISE[tint]} little {noun} this is!"
        ending = f"behind {'it' if len(things) == 1 else 'them'} everything is {tint}."
        return question, join(opening, *_thing_first(things), ending, remark(scene))
    if style < 0.8:
        question = pick(
            rng, (f"Describe the {noun} in detail.", f"Give all the details of this {noun}.")
        )
        opening = f"this {noun} shows {counted} in front of {an(tint)} background."
        empty = (
            f"nothing is {listing([at(cell) for cell in scene.free])}."
            if scene.free
            else "no place is empty."
        )
        return question, join(opening, *_piece_by_piece(things), empty)
    if style < 0.9:
        question = pick(rng, (f"List what the {noun} shows.", f"Describe the {noun} as a list."))
        lines = [
            f"{PLACES[cell]}: {'nothing' if thing is None else an(full(thing))}."
            for cell, thing in enumerate(scene.cells)
        ]
        return question, join(f"Background: {tint}.", *lines)
    question = pick(rng, (f"Briefly describe the {noun}.", f"Describe this {noun} in a few words."))
    return question, join(f"{an(tint)} {noun} with {listing(rest(scene))}.", remark(scene))


def describe(rng: np.random.Generator) -> Sample:
    """Stand for LLaVA-Bench and COCO captions."""
    scene = sample_scene(rng)
    return one_page("describe", rng, scene, describe_turn(rng, scene))


# caption
# ---------------------------------------------------------------------------------------------

CAPTION_QUESTION = "Write a caption for this image."


def captioned(rng: np.random.Generator) -> Sample:
    """Caption a page for the mini captioner: scenes, a third of them with a sign, and charts."""
    page = sample_page(rng)
    return one_page("caption", rng, page, (CAPTION_QUESTION, caption(page)))


# read
# ------------------------------------------------------------------------------------------------


def read_turn(rng: np.random.Generator, scene: Scene) -> Turn:
    """Ask what a sign says; the answer adds where it is and what is near, or reads all signs."""
    signs = [(cell, thing) for cell, thing in scene.things if thing.kind == SIGN]
    cell, thing = pick(rng, signs)
    noun, name, way = pick(rng, NOUNS), ref(scene, cell), below(rng, 4)
    if way == 0:
        sign = name if " at " in name else f"{name} {at(cell)}"
        question, reading, more = f"What does the {name} say?", f"the {sign} says {thing.word}.", ""
    elif way == 1:
        question = f"What is written {at(cell)}?"
        reading = f"the word {thing.word} is written {at(cell)}."
        more = f"it is written on {an(thing.colour)} sign."
    elif way == 2:
        texts = [f"{sign.word} on {an(short(sign))} {at(where)}" for where, sign in signs]
        things = rest(scene, *(where for where, _ in signs))
        more = f"the {noun} also shows {listing(things)}." if things else ""
        more = more or "there is nothing else to see."
        return f"Read all the text {inside(noun)}.", join(f"the text is {listing(texts)}.", more)
    else:
        question, reading = f"Which word can you read on the {name}?", f"I can read {thing.word}."
        more = f"the word is {thing.word}, and the {thing.colour} sign is {at(cell)}."
    return question, join(reading, more, neighbour(scene, cell))


def read(rng: np.random.Generator) -> Sample:
    """Stand for DocVQA, TextVQA and OCRBench."""
    signs = 1 + int(rng.random() < 0.3)
    scene = sample_scene(rng, count=max(signs, 2 + below(rng, 3)), signs=signs)
    return one_page("read", rng, scene, read_turn(rng, scene))


# exist
# -----------------------------------------------------------------------------------------------


def absent(rng: np.random.Generator, scene: Scene) -> str:
    """Return a 'red ball' that the page lacks; often only the colour or only the kind differs."""
    present = {short(thing) for _, thing in scene.things}
    while True:
        _, thing = pick(rng, scene.things)
        u = rng.random()
        kind = thing.kind if u < 0.3 and thing.kind != SIGN else pick(rng, KINDS)
        tint = thing.colour if 0.3 <= u < 0.6 else pick(rng, COLOURS)
        if f"{tint} {kind}" not in present:
            return f"{tint} {kind}"


def exist_turn(rng: np.random.Generator, scene: Scene) -> Turn:
    """Ask whether a thing is there; half of the answers are no, and say what is there instead."""
    noun, way, is_there = pick(rng, NOUNS), below(rng, 3), rng.random() < 0.5
    cell, thing = pick(rng, scene.things)
    name = short(thing) if is_there else absent(rng, scene)
    item, where, present = an(name), inside(noun), listing(rest(scene))
    question = (
        f"Is there {item} {where}?",
        f"Can you see {item} {where}?",
        f"Does the {noun} show {item}?",
    )[way]
    yes = (f"there is {item} {where}.", f"I can see {item}.", f"the {noun} shows {item}.")[way]
    no = (
        f"there is no {name} {where}. {cap(there(len(scene.things)))} {present} instead.",
        f"I can not see {item}. I see {present}.",
        f"the {noun} does not show {item}. It shows {present}.",
    )[way]
    if not is_there:
        return question, f"No, {no}"
    size = f"says {thing.word}" if thing.word else f"is {thing.size}"
    detail = f"it {size} and {STANDS[thing.kind]} {at(cell)}."
    return question, join(f"Yes, {yes}", detail, neighbour(scene, cell))


def exist(rng: np.random.Generator) -> Sample:
    """Stand for POPE and HallusionBench."""
    scene = sample_scene(rng)
    return one_page("exist", rng, scene, exist_turn(rng, scene))


# reason
# ----------------------------------------------------------------------------------------------


def _count(rng: np.random.Generator, scene: Scene) -> Turn:
    """Ask how many things share a colour, kind or size; the answer names their places."""
    noun, things = pick(rng, NOUNS), scene.things
    by = pick(rng, ("colour", "kind", "size"))
    values = {"colour": COLOURS, "kind": KINDS, "size": SIZES}[by]
    value = getattr(pick(rng, things)[1], by) if rng.random() < 0.8 else pick(rng, values)
    matches = [(cell, thing) for cell, thing in things if getattr(thing, by) == value]
    name = value if by == "kind" else f"{value} thing"
    answer = f"{there(len(matches))} {number(len(matches), name)} {inside(noun)}."
    if not matches:
        body = f"it shows only {listing(rest(scene))}."
    else:
        who = listing([f"the {short(thing)} {at(cell)}" for cell, thing in matches])
        body = f"{'it is' if len(matches) == 1 else 'they are'} {who}."
    return f"How many {plural(name)} are {inside(noun)}? Explain.", join(answer, body)


def _relative(rng: np.random.Generator, scene: Scene) -> Turn | None:
    """Ask what is next to a thing, which may be nothing; None if no thing is unique."""
    distinct = unique(scene)
    if not distinct:
        return None
    cell, _ = pick(rng, distinct)
    name, to = ref(scene, cell), cell ^ (1 + below(rng, 3))  # another of the cells 0 to 3
    where, neighbour_thing = side(cell, to), scene.cells[to]
    if neighbour_thing is None:
        answer = f"nothing is {where} the {name}."
        body = f"the {name} is {at(cell)}, and the place {at(to)} is empty."
    else:
        answer = f"{an(full(neighbour_thing))} is {where} the {name}."
        body = f"the {name} is {at(cell)}, and the {short(neighbour_thing)} is {at(to)}."
    ending = remark(scene) if neighbour_thing is None else ""
    return f"What is {where} the {name}?", join(answer, body, ending)


def _more(rng: np.random.Generator, scene: Scene) -> Turn:
    """Ask whether one colour has more things than another; the answer counts both."""
    noun, things = pick(rng, NOUNS), [thing for _, thing in scene.things]
    a, b = pick(rng, things).colour, pick(rng, things).colour
    if a == b:
        b = other(rng, COLOURS, a)
    n, m = (sum(thing.colour == tint for thing in things) for tint in (a, b))
    verdict, word = "yes, there are more" if n > m else "no, there are fewer", "than"
    if n == m:
        verdict, word = "no, there are as many", "as"
    answer = f"{verdict} {a} things {word} {b} things."
    body = f"the {noun} has {number(n, f'{a} thing')} and {number(m, f'{b} thing')}."
    question = f"Are there more {a} things than {b} things {inside(noun)}?"
    in_all = f"in all {there(len(things))} {number(len(things), 'thing')}."
    return question, join(answer, body, in_all)


def _same(rng: np.random.Generator, scene: Scene) -> Turn | None:
    distinct = unique(scene)
    if len(distinct) < 2:
        return None
    (p, a), (q, b) = distinct[0], distinct[-1]
    x, y = ref(scene, p), ref(scene, q)
    question = f"Do the {x} and the {y} have the same colour?"
    answer = (
        f"yes, both are {a.colour}." if a.colour == b.colour else "no, they have different colours."
    )
    body = f"the {a.kind} {at(p)} is {a.colour}, and the {b.kind} {at(q)} is {b.colour}."
    return question, join(answer, body)


def _take_away(rng: np.random.Generator, scene: Scene) -> Turn | None:
    """Ask what is left without a thing; None if no thing is unique."""
    distinct = unique(scene)
    if not distinct:
        return None
    cell, _ = pick(rng, distinct)
    name, remainder = ref(scene, cell), rest(scene, cell)
    question = f"What is left if you take away the {name}?"
    answer, body = "then nothing is left.", f"the {name} {at(cell)} is the only thing there."
    if remainder:
        answer = f"then {listing(remainder)} {'is' if len(remainder) == 1 else 'are'} left."
        before = f"{there(len(remainder) + 1)} {number(len(remainder) + 1, 'thing')} before"
        body = f"the {name} is {at(cell)}, and {before}."
    return question, join(answer, body)


def reason_turn(rng: np.random.Generator, scene: Scene) -> Turn:
    """Ask to count, compare, look next to a thing or take one away; the answer gives its reason."""
    while True:
        turn = pick(rng, (_count, _relative, _relative, _more, _same, _take_away))(rng, scene)
        if turn is not None:
            return turn


def reason(rng: np.random.Generator) -> Sample:
    """Stand for MM-Vet, VQAv2 and ScienceQA."""
    scene = sample_scene(rng, count=2 + below(rng, 3))
    return one_page("reason", rng, scene, reason_turn(rng, scene))


# chart
# -----------------------------------------------------------------------------------------------


def _bars(chart: Chart, *but: str) -> str:
    return " and ".join(
        f"the {colour} bar is {height} tall" for colour, height in chart.bars if colour not in but
    )


def chart_turn(rng: np.random.Generator, page: Chart) -> Turn:
    """Ask for the tallest or shortest bar, a height, a sum, a difference, or the whole chart."""
    way, noun = below(rng, 6), pick(rng, ("chart", "picture"))
    i = below(rng, 3)
    a, x = page.bars[i]
    b, y = page.bars[(i + 1 + below(rng, 2)) % 3]
    if way < 2:
        word, heights = ("tallest", "shortest")[way], [height for _, height in page.bars]
        best = (max, min)[way](heights)
        top = [colour for colour, height in page.bars if height == best]
        bars = f"the {listing(top)} {'bar is' if len(top) == 1 else 'bars are'}"
        answer = f"{bars} the {word} with a height of {best}."
        other_bars = _bars(page, *top) or "all bars have the same height"
        return f"Which bar is the {word} {inside(noun)}?", join(answer, f"{other_bars}.")
    if way == 2:
        question = f"How tall is the {a} bar? Compare it with the others."
        return question, join(f"the {a} bar {bar_at(i)} is {x} tall.", f"{_bars(page, a)}.")
    if way == 3:
        body = f"the {a} bar is {x} tall and the {b} bar is {y} tall, so {x} + {y} = {x + y}."
        question = f"What is the sum of the {a} bar and the {b} bar?"
        return question, join(f"the sum is {x + y}.", body)
    if way == 4:
        high, low = ((a, x), (b, y)) if x >= y else ((b, y), (a, x))
        answer = f"the {high[0]} bar is {high[1] - low[1]} taller than the {low[0]} bar."
        body = f"it has a height of {high[1]}, and the {low[0]} bar has a height of {low[1]}."
        if x == y:
            answer = f"they are the same, the {a} bar and the {b} bar are both {x} tall."
            body = ""
        return f"How different are the {a} bar and the {b} bar?", join(answer, body)
    bars = [
        f"the {colour} bar {bar_at(bar)} is {height} tall"
        for bar, (colour, height) in enumerate(page.bars)
    ]
    opening = f"the {noun} shows three bars on {an(page.background)} background."
    return f"Explain the {noun}.", join(opening, f"{listing(bars)}.")


def chart(rng: np.random.Generator) -> Sample:
    """Stand for ChartQA."""
    page = sample_chart(rng)
    return one_page("chart", rng, page, chart_turn(rng, page))

"""Dialogues about several pages: two and a change (edit, brush, spot), five and a story (saga,
album)."""

from __future__ import annotations

import numpy as np

from picturebook.phrases import (
    ACTIONS,
    CONNECTORS,
    NAMES,
    NOUNS,
    an,
    at,
    full,
    join,
    listing,
    rest,
    short,
    side,
)
from picturebook.rendering import render
from picturebook.samples import IMAGE, Sample
from picturebook.scenes import (
    PLACES,
    Edit,
    Scene,
    Thing,
    below,
    edit,
    pick,
    sample_scene,
    sample_thing,
    with_cell,
)

Turn = tuple[str, str]


def several(
    name: str, rng: np.random.Generator, scenes: list[Scene], question: str, answer: str
) -> Sample:
    """Return the sample of several scenes and one turn, whose question has the placeholders."""
    return Sample(
        name,
        name,
        tuple(render(scene, rng) for scene in scenes),
        ((question, answer),),
        (),
        tuple(scenes),
    )


def placeholders(n: int) -> str:
    """Return one `<image>` a line, to put in front of a question."""
    return f"{IMAGE}\n" * n


def _spot(change: Edit) -> str:
    return at(change.cell)


# edit and brush
# --------------------------------------------------------------------------------------


def plain_order(change: Edit) -> str:
    """Say the change as an editor's order."""
    before, after = change.before, change.after
    if before is None and after is not None:
        return f"add {an(full(after))} {_spot(change)}."
    assert before is not None
    if after is None:
        return f"remove the {full(before)} from the {PLACES[change.cell]}."
    if change.kind == "recolour":
        colours = f"from {before.colour} to {after.colour}"
        return f"change the colour of the {before.kind} {_spot(change)} {colours}."
    if change.kind == "resize":
        sizes = f"from {before.size} to {after.size}"
        return f"change the size of the {short(before)} {_spot(change)} {sizes}."
    return f"replace the {full(before)} {_spot(change)} with {an(full(after))}."


def painter_order(change: Edit) -> str:
    """Say the same order as to a painter."""
    before, after = change.before, change.after
    if before is None and after is not None:
        return f"please paint {an(full(after))} {_spot(change)}."
    assert before is not None
    if after is None:
        return f"please take the {full(before)} {_spot(change)} away."
    if change.kind == "recolour":
        return f"please paint the {before.colour} {before.kind} {_spot(change)} {after.colour}."
    if change.kind == "resize":
        word = "larger" if after.size == "large" else "smaller"
        return f"please make the {before.size} {short(before)} {_spot(change)} {word}."
    return f"please turn the {full(before)} {_spot(change)} into {an(full(after))}."


def _keep(scene: Scene, *cells: int) -> str:
    """Say what stays: the other things by kind and cell, and the background."""
    phrases = [
        f"the {short(thing)} {at(cell)}" for cell, thing in scene.things if cell not in cells
    ]
    if not phrases:
        return f"keep the {scene.background} background and nothing else."
    return f"keep {listing([*phrases, f'the {scene.background} background'])}."


def edit_pair(rng: np.random.Generator) -> Sample:
    """Stand for IEdit: the instruction that turns the first page into the second."""
    first = sample_scene(rng)
    second, change = edit(rng, first)
    noun, way = pick(rng, NOUNS), below(rng, 3)
    order = join(plain_order(change), _keep(first, change.cell))
    if way == 0:
        question = f"{placeholders(2)}Which edit turns the first {noun} into the second?"
        return several("edit", rng, [first, second], question, order)
    if way == 1:
        question = (
            f"First: {IMAGE}\nSecond: {IMAGE}\nHow was the {noun} edited? Give the instruction."
        )
        return several("edit", rng, [first, second], question, f"The instruction is this. {order}")
    question = f"{placeholders(2)}What must be done to get from the first {noun} to the second?"
    return several(
        "edit", rng, [first, second], question, f"To get the second {noun}, do this. {order}"
    )


def brush(rng: np.random.Generator) -> Sample:
    """Stand for MagicBrush: one or two orders to a painter."""
    first = sample_scene(rng, count=2 + below(rng, 3))
    second, change = edit(rng, first)
    changes, scenes = [change], [first, second]
    if rng.random() < 0.4:
        scenes[1], later = edit(rng, second, avoid=(change.cell,))
        changes.append(later)
    noun, way = pick(rng, NOUNS), below(rng, 2)
    question = (
        f"{placeholders(2)}Tell the painter how to make the second {noun} from the first.",
        f"Before: {IMAGE}\nAfter: {IMAGE}\nWrite what the painter was told to do.",
    )[way]
    orders = [painter_order(change) for change in changes]
    if len(orders) == 2:
        orders[1] = "then " + orders[1].removeprefix("please ")
    closing = ("the rest stays as it is: ", "do not touch the rest: ")[way]
    remainder = rest(first, *(change.cell for change in changes))
    end = f"{closing}{listing(remainder)}." if remainder else "there is nothing else to paint."
    return several("brush", rng, scenes, question, join(*orders, end))


# spot
# ------------------------------------------------------------------------------------------------


def in_each(before: str, after: str) -> str:
    """Say 'red in the first and blue in the second'."""
    return f"{before} in the first and {after} in the second"


def difference(change: Edit) -> str:
    """Say the change as a difference between two pages."""
    before, after = change.before, change.after
    if before is None and after is not None:
        return f"only the second one has {an(full(after))} {_spot(change)}."
    assert before is not None
    if after is None:
        return f"only the first one has {an(full(before))} {_spot(change)}."
    if change.kind == "recolour":
        return f"the {before.kind} {_spot(change)} is {in_each(before.colour, after.colour)}."
    if change.kind == "resize":
        return f"the {short(before)} {_spot(change)} is {in_each(before.size, after.size)}."
    return (
        f"the first has {an(full(before))} {_spot(change)}, but the second has {an(full(after))}."
    )


def spot(rng: np.random.Generator) -> Sample:
    """Stand for Spot-the-Difference: one or two differences, and the common things."""
    first = sample_scene(rng, count=2 + below(rng, 3))
    second, change = edit(rng, first)
    changes, scenes = [change], [first, second]
    if rng.random() < 0.4:
        scenes[1], later = edit(rng, second, avoid=(change.cell,))
        changes.append(later)
    noun, way, two = pick(rng, NOUNS), below(rng, 3), len(changes) == 2
    question = (
        f"{placeholders(2)}What is different between the two {noun}s?",
        f"{placeholders(2)}Find the differences between these {noun}s.",
        f"First: {IMAGE}\nSecond: {IMAGE}\nCompare the two {noun}s.",
    )[way]
    opening = (
        "",
        "I found two differences." if two else "I found one difference.",
        f"the two {noun}s are nearly the same.",
    )[way]
    phrases = [
        f"the {short(thing)}"
        for cell, thing in first.things
        if cell not in [c.cell for c in changes]
    ]
    same = f"both show {listing(phrases)} on {an(first.background)} background." if phrases else (
        f"both have {an(first.background)} background.")  # fmt: skip
    return several(
        "spot", rng, scenes, question, join(opening, *(difference(c) for c in changes), same)
    )


# saga and album
# --------------------------------------------------------------------------------------


def doing(thing: Thing) -> str:
    """Say 'played with a large red ball'."""
    if thing.word:
        return f"read {thing.word} on {an(short(thing))}"
    return f"{ACTIONS[thing.kind]} {an(full(thing))}"


def saga(rng: np.random.Generator) -> Sample:
    """Stand for PororoSV: a hero with a name is on all five pages; a sentence a page."""
    hero, name = sample_thing(rng), pick(rng, NAMES)
    scenes, sentences = [], []
    for i, connector in enumerate(CONNECTORS):
        scene = sample_scene(rng, count=1 + below(rng, 3))
        cell = pick(rng, scene.free)
        scene = with_cell(scene, cell, hero)
        near = [to for to in (cell ^ 1, cell ^ 2, cell ^ 3) if scene.cells[to] is not None]
        friend = scene.cells[near[0]]
        assert friend is not None
        who = f"{name} the {short(hero)}" if i in (0, 4) else name
        verb = ("was at", "went to", "came to", "stayed at", "slept at")[i]
        sentences.append(
            f"{connector}, {who} {verb} the {PLACES[cell]}, {side(near[0], cell)} "
            f"{an(full(friend))}."
        )
        scenes.append(scene)
    question = pick(
        rng,
        (
            f"{placeholders(5)}Tell the story of {name} the {hero.kind} in these five pictures.",
            f"{placeholders(5)}{name} is the {short(hero)}. What happens to {name}?",
        ),
    )
    return several("saga", rng, scenes, question, join(*sentences))


def album(rng: np.random.Generator) -> Sample:
    """Stand for VIST: five pages of somebody's day; a sentence a page about its first thing."""
    name, scenes, sentences = pick(rng, NAMES), [], []
    for connector in CONNECTORS:
        scene = sample_scene(rng, count=1 + below(rng, 3))
        (cell, thing), remainder = scene.things[0], rest(scene, scene.things[0][0])
        end = f" near {remainder[0]}" if remainder else f" {at(cell)}"
        sentences.append(f"{connector}, {name} {doing(thing)}{end}.")
        scenes.append(scene)
    question = pick(
        rng,
        (
            f"{placeholders(5)}These are five pictures of a day with {name}. Write the story of "
            f"the day.",
            f"{placeholders(5)}Write a story about {name}, one sentence for each picture.",
        ),
    )
    return several("album", rng, scenes, question, join(*sentences))


def story(name: str, scene: Scene) -> str:
    """Tell a short story about one page: what somebody did with each of at most three things."""
    things = scene.things[:3]
    steps = [
        f"{(CONNECTORS[0], CONNECTORS[1], CONNECTORS[-1])[i]}, {name} {doing(thing)} {at(cell)}."
        for i, (cell, thing) in enumerate(things)
    ]
    return join(f"{name} went for a walk on {an(scene.background)} page.", *steps)

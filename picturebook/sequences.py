"""Write dialogues about several pages: two and a change (edit, brush, spot), five and a story
(saga, album).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from picturebook.samples import IMAGE, Sample, drawn
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


def placeholders(n: int) -> str:
    """Return one `<image>` a line, to put in front of a question."""
    return f"{IMAGE}\n" * n


def say(change: Edit, sayings: Mapping[str, str]) -> str:
    """Fill in what is said of changes of this kind."""
    before, after = change.before, change.after
    names: dict[str, Any] = {"at": at(change.cell), "place": PLACES[change.cell]}
    if before is not None:
        names |= {"before": before, "old": full(before), "old_short": short(before)}
        names["an_old"] = an(full(before))
    if after is not None:
        names |= {"after": after, "a_new": an(full(after))}
        names["larger"] = "larger" if after.size == "large" else "smaller"
    return sayings[change.kind].format(**names)


# edit and brush
# --------------------------------------------------------------------------------------

ORDERS = {
    "add": "add {a_new} {at}.",
    "remove": "remove the {old} from the {place}.",
    "recolour": "change the colour of the {before.kind} {at} from {before.colour} to "
    "{after.colour}.",
    "resize": "change the size of the {old_short} {at} from {before.size} to {after.size}.",
    "replace": "replace the {old} {at} with {a_new}.",
}
"""An editor's orders, by the kind of change."""
PAINTER_ORDERS = {
    "add": "please paint {a_new} {at}.",
    "remove": "please take the {old} {at} away.",
    "recolour": "please paint the {before.colour} {before.kind} {at} {after.colour}.",
    "resize": "please make the {before.size} {old_short} {at} {larger}.",
    "replace": "please turn the {old} {at} into {a_new}.",
}
"""The same orders to a painter."""
DIFFERENCES = {
    "add": "only the second one has {a_new} {at}.",
    "remove": "only the first one has {an_old} {at}.",
    "recolour": "the {before.kind} {at} is {before.colour} in the first and {after.colour} in the "
    "second.",
    "resize": "the {old_short} {at} is {before.size} in the first and {after.size} in the second.",
    "replace": "the first has {an_old} {at}, but the second has {a_new}.",
}
"""The changes as differences between two pages."""


def edited(rng: np.random.Generator) -> tuple[list[Scene], list[Edit]]:
    """Draw a page of two things or more; return it and its copy with one or two changes."""
    first = sample_scene(rng, count=2 + below(rng, 3))
    second, change = edit(rng, first)
    changes = [change]
    if rng.random() < 0.4:
        second, later = edit(rng, second, avoid=(change.cell,))
        changes.append(later)
    return [first, second], changes


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
    question = (
        f"{placeholders(2)}Which edit turns the first {noun} into the second?",
        f"First: {IMAGE}\nSecond: {IMAGE}\nHow was the {noun} edited? Give the instruction.",
        f"{placeholders(2)}What must be done to get from the first {noun} to the second?",
    )[way]
    opening = ("", "the instruction is this.", f"to get the second {noun}, do this.")[way]
    order = join(opening, say(change, ORDERS), _keep(first, change.cell))
    return drawn("edit", rng, [first, second], [(question, order)])


def brush(rng: np.random.Generator) -> Sample:
    """Stand for MagicBrush: one or two orders to a painter."""
    scenes, changes = edited(rng)
    noun, way = pick(rng, NOUNS), below(rng, 2)
    question = (
        f"{placeholders(2)}Tell the painter how to make the second {noun} from the first.",
        f"Before: {IMAGE}\nAfter: {IMAGE}\nWrite what the painter was told to do.",
    )[way]
    orders = [say(change, PAINTER_ORDERS) for change in changes]
    if len(orders) == 2:
        orders[1] = "then " + orders[1].removeprefix("please ")
    closing = ("the rest stays as it is", "do not touch the rest")[way]
    remainder = rest(scenes[0], *(change.cell for change in changes))
    end = f"{closing}: {listing(remainder)}." if remainder else "there is nothing else to paint."
    return drawn("brush", rng, scenes, [(question, join(*orders, end))])


# spot
# ------------------------------------------------------------------------------------------------


def spot(rng: np.random.Generator) -> Sample:
    """Stand for Spot-the-Difference: one or two differences, and the common things."""
    scenes, changes = edited(rng)
    noun, way = pick(rng, NOUNS), below(rng, 3)
    count = "two differences" if len(changes) == 2 else "one difference"
    question = (
        f"{placeholders(2)}What is different between the two {noun}s?",
        f"{placeholders(2)}Find the differences between these {noun}s.",
        f"First: {IMAGE}\nSecond: {IMAGE}\nCompare the two {noun}s.",
    )[way]
    opening = ("", f"I found {count}.", f"the two {noun}s are nearly the same.")[way]
    first, cells = scenes[0], [change.cell for change in changes]
    phrases = [f"the {short(thing)}" for cell, thing in first.things if cell not in cells]
    shared = f"show {listing(phrases)} on" if phrases else "have"
    same = f"both {shared} {an(first.background)} background."
    differences = [say(change, DIFFERENCES) for change in changes]
    return drawn("spot", rng, scenes, [(question, join(opening, *differences, same))])


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
        where = f"the {PLACES[cell]}, {side(near[0], cell)} {an(full(friend))}"
        sentences.append(f"{connector}, {who} {verb} {where}.")
        scenes.append(scene)
    questions = (
        f"Tell the story of {name} the {hero.kind} in these five pictures.",
        f"{name} is the {short(hero)}. What happens to {name}?",
    )
    question = placeholders(5) + pick(rng, questions)
    return drawn("saga", rng, scenes, [(question, join(*sentences))])


def album(rng: np.random.Generator) -> Sample:
    """Stand for VIST: five pages of somebody's day; a sentence a page about its first thing."""
    name, scenes, sentences = pick(rng, NAMES), [], []
    for connector in CONNECTORS:
        scene = sample_scene(rng, count=1 + below(rng, 3))
        (cell, thing), remainder = scene.things[0], rest(scene, scene.things[0][0])
        end = f" near {remainder[0]}" if remainder else f" {at(cell)}"
        sentences.append(f"{connector}, {name} {doing(thing)}{end}.")
        scenes.append(scene)
    questions = (
        f"These are five pictures of a day with {name}. Write the story of the day.",
        f"Write a story about {name}, one sentence for each picture.",
    )
    question = placeholders(5) + pick(rng, questions)
    return drawn("album", rng, scenes, [(question, join(*sentences))])


def story(name: str, scene: Scene) -> str:
    """Tell a short story about one page: what somebody did with each of at most three things."""
    things = scene.things[:3]
    steps = [
        f"{(CONNECTORS[0], CONNECTORS[1], CONNECTORS[-1])[i]}, {name} {doing(thing)} {at(cell)}."
        for i, (cell, thing) in enumerate(things)
    ]
    return join(f"{name} went for a walk on {an(scene.background)} page.", *steps)

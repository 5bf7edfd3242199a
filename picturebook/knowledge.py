"""Sets without pages: plain facts (a closed list) and small sums, worked step by step."""

from __future__ import annotations

import numpy as np

from picturebook.phrases import NAMES
from picturebook.samples import Sample
from picturebook.scenes import KINDS, below, other, pick

_FACTS = """\
what colour is the sky on a clear day?
The sky is blue on a clear day. At night it is black and full of stars.
what colour is grass?
Grass is green. In a dry summer it can turn yellow.
what colour is snow?
Snow is white. It falls in winter when the air is very cold.
what colour is a ripe banana?
A ripe banana is yellow. Before that it is green, and later it turns black.
what colour do you get from blue and yellow?
Blue and yellow paint give green. Red and yellow paint give orange.
what colour do you get from red and blue?
Red and blue paint give purple. With more red it looks more pink.
what colour do you get from red and yellow?
Red and yellow paint give orange. Blue and yellow paint give green.
how many days are in a week?
A week has seven days. The first day of work is Monday and the last is Friday.
how many months are in a year?
A year has twelve months. The shortest of them is February.
how many hours are in a day?
A day has 24 hours. Each hour has 60 minutes.
how many minutes are in an hour?
An hour has 60 minutes. Each minute has 60 seconds.
how many legs does a spider have?
A spider has eight legs. An ant has only six legs.
how many legs does an ant have?
An ant has six legs. A spider has eight legs, which is two more.
how many legs does a horse have?
A horse has four legs. It can run very fast on them.
how many wings does a bird have?
A bird has two wings. Most birds can fly with them.
how many wheels does a car have?
A car has four wheels. A bike has only two wheels.
how many sides does a triangle have?
A triangle has three sides. A square has four sides, which is one more.
how many sides does a square have?
A square has four sides. All of them have the same length.
which month comes first in the year?
January is the first month of the year. The last month is December.
which month comes last in the year?
December is the last month of the year. The first month is January.
which day comes after Monday?
Tuesday comes after Monday. It is the second day of work.
which day comes after Friday?
Saturday comes after Friday. Most children have no school then.
which season is the coldest?
Winter is the coldest season. The days are short and snow can fall.
which season is the warmest?
Summer is the warmest season. The days are long and the sun is strong.
which season comes after winter?
Spring comes after winter. Flowers grow and birds build their nests.
when do leaves fall from the trees?
Leaves fall from the trees in autumn. They turn red, orange and yellow before that.
where do fish live?
Fish live in water. They swim in rivers, lakes and the sea.
where do birds lay their eggs?
Birds lay their eggs in nests. Most nests are built in trees.
where does milk come from?
Milk comes from cows. Cows live on farms and eat grass.
where does honey come from?
Honey comes from bees. Bees visit flowers and build their nests near them.
where does wood come from?
Wood comes from trees. People build houses, boats and boxes from it.
where does rain come from?
Rain comes from clouds. Clouds are made of very small drops of water.
where does the sun rise?
The sun rises in the east. In the evening it sets in the west.
where does the sun set?
The sun sets in the west. In the morning it rises in the east.
what do cows eat?
Cows eat grass. They give milk to the people on the farm.
what do bees make?
Bees make honey. They visit many flowers for it.
what is bread made of?
Bread is made of flour and water. It is baked until it is warm and brown.
what is ice?
Ice is water that is very cold. When it gets warm it turns into water again.
what is a key for?
A key opens a door. Each door needs its own key.
what is a cup for?
A cup is for drinking. People drink water, milk or tea from it.
what is a boat for?
A boat carries people over water. Some boats have a sail and need the wind.
what is a house for?
A house is a place to live in. It keeps people warm and dry.
what is a sign for?
A sign tells people what to do. It has a short word that is easy to read.
what does the moon do?
The moon goes around the earth. It needs about a month for that.
what does the earth do?
The earth goes around the sun. It needs one year for that.
what is the sun?
The sun is a star. It is much nearer than all the other stars.
what does a heart do?
A heart moves the blood. It works day and night and never stops.
what do trees need to grow?
Trees need water, light and air to grow. Some of them live for many hundred years.
what do flowers need to grow?
Flowers need water and light to grow. Most of them grow in spring and summer.
which animal is the largest?
The blue whale is the largest animal. It lives in the sea and eats very small animals.
which animal is the tallest?
The giraffe is the tallest animal. It eats the leaves of high trees.
which animal says moo?
The cow says moo. It lives on a farm and eats grass.
which animal barks?
The dog barks. It is the oldest friend of people.
which animal catches mice?
The cat catches mice. It can see very well at night.
which is faster, a car or a bike?
A car is faster than a bike. A bike needs no fuel and is good for short ways.
which is heavier, a stone or a leaf?
A stone is heavier than a leaf. The wind can carry a leaf but not a stone.
which is hotter, fire or ice?
Fire is hotter than ice. Fire turns ice into water.
why do people sleep?
People sleep to rest. Most people need about eight hours each night.
why do boats float?
Boats float because they are lighter than water. A stone is heavier and goes down.
why is it dark at night?
It is dark at night because the sun is away. The moon and the stars give only a little light.
"""

FACTS = tuple(zip(_FACTS.splitlines()[::2], _FACTS.splitlines()[1::2], strict=True))
"""(question in small letters, answer: what was asked, then one sentence of background)."""


def fact_turn(rng: np.random.Generator) -> tuple[str, str]:
    """Ask for a fact in one of four ways, each with its way of answering."""
    question, answer = pick(rng, FACTS)
    way = below(rng, 4)
    if way == 0:
        return question[0].upper() + question[1:], answer
    if way == 1:
        return f"Here is a question: {question}", f"Here is the answer: {answer}"
    if way == 2:
        return f"Please tell me, {question}", f"With pleasure. {answer}"
    return f"I want to know, {question}", f"Good question. {answer}"


PLURALS = tuple(
    kind + "es" if kind == "box" else kind + "s" for kind in KINDS if kind not in ("fish", "moon")
)


def sum_turn(rng: np.random.Generator) -> tuple[str, str]:
    """Pose a word problem of one or two steps, with numbers up to 50; the answer works it out."""
    name = pick(rng, NAMES)
    friend, what = other(rng, NAMES, name), pick(rng, PLURALS)
    steps = pick(rng, ("", " Work step by step.", " Explain your steps."))
    lead = {
        "": "",
        " Work step by step.": "Step by step: ",
        " Explain your steps.": "Here are the steps. ",
    }[steps]
    form = below(rng, 6)
    if form == 0:
        a, b = 2 + below(rng, 29), 2 + below(rng, 19)
        question = (
            f"{name} has {a} {what} and finds {b} more. How many {what} does {name} have now?"
        )
        begin = f"{name} starts with {a} {what} and gets {b} more"
        work = f"{begin}. {a} + {b} = {a + b}. The answer is {a + b}."
    elif form == 1:
        a = 10 + below(rng, 41)
        b = 1 + below(rng, a - 1)
        question = (
            f"{name} has {a} {what} and gives {b} of them to {friend}. How many {what} are left?"
        )
        begin = f"{name} starts with {a} {what} and gives {b} away"
        work = f"{begin}. {a} - {b} = {a - b}. The answer is {a - b}."
    elif form == 2:
        a, b = 2 + below(rng, 6), 2 + below(rng, 6)
        question = f"{name} has {a} bags with {b} {what} in each. How many {what} does {name} have?"
        work = (
            f"There are {a} bags with {b} {what} each. {a} x {b} = {a * b}. The answer is {a * b}."
        )
    elif form == 3:
        a, b = 2 + below(rng, 19), 2 + below(rng, 14)
        c = 1 + below(rng, a + b - 1)
        begin = f"{name} has {a} {what}, finds {b} more and loses {c}"
        question = f"{begin}. How many {what} does {name} have now?"
        d = a + b - c
        work = f"First, {a} + {b} = {a + b}. Then {a + b} - {c} = {d}. The answer is {d}."
    elif form == 4:
        a, b, c = 2 + below(rng, 4), 2 + below(rng, 5), 1 + below(rng, 20)
        begin = f"{name} has {a} bags with {b} {what} in each and {c} more in a box"
        question = f"{begin}. How many {what} are there?"
        total = a * b + c
        work = f"First, {a} x {b} = {a * b}. Then {a * b} + {c} = {total}. The answer is {total}."
    else:
        a, b = 2 + below(rng, 19), 1 + below(rng, 10)
        begin = f"{name} has {a} {what} and {friend} has {b} more"
        question = f"{begin}. How many {what} do they have together?"
        c = a + b
        work = (
            f"First, {friend} has {a} + {b} = {c}. Then {a} + {c} = {a + c}. The answer is {a + c}."
        )
    return question + steps, lead + work


def facts(rng: np.random.Generator) -> Sample:
    """Stand for NQ: a question about the plain world, its answer and a sentence of background."""
    return Sample("facts", "facts", (), (fact_turn(rng),))


def sums(rng: np.random.Generator) -> Sample:
    """Stand for GSM8K."""
    return Sample("sums", "sums", (), (sum_turn(rng),))

"""In the embedded world labels match pages, dialogues are well formed, and splits are fixed and
apart.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from picturebook import (
    SYNTHETIC_SETS,
    Sample,
    probe_set,
    sample_scene,
    test_set,
    tower_labels,
    train_sample,
)
from picturebook.lines import LINES, page_lines
from picturebook.samples import COUNT_WORDS
from picturebook.scenes import (
    BACKGROUNDS,
    BAR_PLACES,
    COLOURS,
    KINDS,
    PLACES,
    SIGN,
    SIZES,
    WORDS,
    sample_chart,
)


def digest(samples: list[Sample]) -> str:
    state = hashlib.sha256()
    for sample in samples:
        state.update(repr((sample.id, sample.turns)).encode())
        for page in sample.images:
            state.update(page.tobytes())
    return state.hexdigest()


def checksum(samples: list[Sample]) -> int:
    return zlib.crc32(digest(samples).encode())


SETS = {
    "describe": 1873657038, "read": 4112138099, "exist": 338667278, "reason": 3390117304,
    "chart": 2363498610, "edit": 585122156, "brush": 1045572030, "spot": 3471712691,
    "saga": 3020824570, "album": 3582489536, "facts": 123964091, "sums": 332551457,
}  # fmt: skip
"""Checksums of the first ten samples of each set, both turns."""


def test_the_book_is_what_it_has_always_been() -> None:
    """The book's pages, questions and answers never change: results of other years were measured on
    them.
    """
    assert {name: checksum(test_set(name, 10, turns=2)) for name in SYNTHETIC_SETS} == SETS
    assert checksum(probe_set(4)) == 1966786174
    assert checksum([train_sample(0, i) for i in range(30)]) == 2792307008


def test_labels_match_the_scene() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        scene = sample_scene(rng)
        labels = tower_labels(scene)
        assert BACKGROUNDS[labels["background"]] == scene.background
        for place, thing in enumerate(scene.cells):
            found = [int(labels[name][place]) for name in ("kind", "colour", "size", "word")]
            if thing is None:
                assert found == [0, 0, 0, 0]
                continue
            assert (*KINDS, SIGN)[found[0] - 1] == thing.kind
            assert COLOURS[found[1] - 1] == thing.colour
            assert SIZES[found[2] - 1] == thing.size
            assert thing.word == (WORDS[found[3] - 1] if found[3] else None)


def test_lines_say_what_lies_under_them() -> None:
    """Every thing, place and word of a page is in its cell's lines; other cells' are not."""
    rng = np.random.default_rng(4)
    for _ in range(100):
        scene = sample_scene(rng)
        lines = page_lines(scene)
        assert [len(line) for line in lines] == [2] * LINES
        assert lines[5] == lines[11] == (f"the background is {scene.background}", lines[5][1])
        assert COUNT_WORDS[len(scene.things)] in lines[5][1]
        for place, thing in enumerate(scene.cells):
            row, column = divmod(place, 2)
            own = [line[column] for line in lines[6 * row : 6 * row + 5]]
            assert own[0] == f"{PLACES[place]} " + (
                f"{thing.size} {thing.colour} {thing.kind}" if thing else "nothing"
            )
            assert own[1] == (f"sign says {thing.word}" if thing and thing.word else own[0])
            assert own[2:] == [own[0], own[1], own[0]]
    chart = sample_chart(rng)
    bars = tuple(
        f"{place} {colour} {height}"
        for place, (colour, height) in zip(BAR_PLACES, chart.bars, strict=True)
    )
    assert page_lines(chart) == (
        (*[bars] * 5, (f"the background is {chart.background}", "this is a chart")) * 2
    )


def test_train_and_test_streams_differ() -> None:
    """Training and test pages share no generator: no test page, down to the pixel, is a training
    page.
    """
    test = {
        page.tobytes()
        for name in SYNTHETIC_SETS
        for sample in test_set(name, 30)
        for page in sample.images
    }
    train = {page.tobytes() for i in range(600) for page in train_sample(0, i).images}
    assert not test & train

"""The embedded world: labels match pages, dialogues are well formed, splits are fixed and apart."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys

import numpy as np
import pytest
from jaxspec.errors import InputError
from picturebook import (
    FOLLOW_UPS,
    IMAGE,
    LABEL_CLASSES,
    MIXTURE,
    PROBE_KINDS,
    SYNTHETIC_SETS,
    Chart,
    Probe,
    Sample,
    Scene,
    Thing,
    edit,
    probe_set,
    render,
    sample_chart,
    sample_scene,
    test_set,
    tower_labels,
    train_sample,
)
from picturebook.__main__ import main as sheet_command
from picturebook.phrases import caption
from picturebook.rendering import RGB, text_mask
from picturebook.samples import VALUES
from picturebook.scenes import BACKGROUNDS, COLOURS, KINDS, PLACES, SIGN, SIZES, WORDS


class Still:
    """A generator that always draws the middle: no shift, no change of brightness."""

    def random(self, n: int) -> np.ndarray:
        return np.full(n, 0.5)


def still(page: Scene | Chart) -> np.ndarray:
    return render(page, Still()).astype(int)  # type: ignore[arg-type]


def digest(samples: list[Sample]) -> str:
    state = hashlib.sha256()
    for sample in samples:
        state.update(repr((sample.id, sample.turns, sample.probes, sample.scenes)).encode())
        for page in sample.images:
            state.update(page.tobytes())
    return state.hexdigest()


# pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_kinds_look_different_in_any_colour(size: str) -> None:
    pages = {
        (kind, colour): still(Scene("white", (Thing(kind, colour, size), None, None, None)))
        for kind in KINDS
        for colour in COLOURS
    }
    shapes = {kind: (np.abs(pages[kind, "red"] - RGB["white"]).sum(-1) > 60)[:24, :24] for kind in KINDS}
    for kind, shape in shapes.items():
        area = {"small": (30, 150), "large": (90, 400)}[size]
        assert area[0] < shape.sum() < area[1], kind
        for other_kind, other_shape in shapes.items():
            if kind != other_kind:
                assert (shape ^ other_shape).sum() > 0.08 * shape.sum(), (kind, other_kind)
    assert len({page.tobytes() for page in pages.values()}) == len(KINDS) * len(COLOURS)


def test_a_thing_stays_inside_its_cell_and_shows_its_colour() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        scene = sample_scene(rng, count=1)
        (place, thing), page = scene.things[0], render(scene, rng).astype(int)
        cells = page.reshape(2, 24, 2, 24, 3).swapaxes(1, 2).reshape(4, -1, 3)
        for other_place in range(4):
            flat = bool((cells[other_place] == cells[other_place][0]).all())
            assert flat == (other_place != place)
        near = np.abs(cells[place] - RGB[thing.colour]).max(-1) < 25
        assert near.sum() > 15, (thing, near.sum())


def test_sign_carries_its_word() -> None:
    for word in WORDS:
        page = still(Scene("grey", (Thing(SIGN, "blue", "large", word), None, None, None)))[:24, :24]
        bright, mask = page.min(-1) > 225, text_mask(word)
        rows, columns = np.nonzero(bright)
        box = bright[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        used = np.nonzero(mask.any(0))[0]
        assert np.array_equal(box, mask[:, used[0] : used[-1] + 1]), word


def test_bars_have_their_heights() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        chart = sample_chart(rng)
        page = still(chart)
        for (colour, height), left in zip(chart.bars, (5, 19, 33), strict=True):
            assert (np.abs(page[:45, left + 5] - RGB[colour]).max(-1) < 3).sum() == 5 * height - 1


def test_pages_jitter_and_colours_are_apart() -> None:
    scene = sample_scene(np.random.default_rng(2), count=4)
    a, b = (render(scene, np.random.default_rng(seed)) for seed in (1, 2))
    assert a.shape == (48, 48, 3)
    assert a.dtype == np.uint8
    assert not np.array_equal(a, b)
    assert np.array_equal(a, render(scene, np.random.default_rng(1)))
    names = (*COLOURS, *BACKGROUNDS)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            apart = np.abs(np.subtract(RGB[first], RGB[second])).sum()
            assert apart > (25 if first in BACKGROUNDS else 75), (first, second)


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
        chart = sample_chart(rng)
        labels = tower_labels(chart)
        assert labels["kind"].tolist() == [14] * 4
        assert not labels["colour"].any()
        bars = zip(labels["bar_colour"], labels["bar_height"], strict=True)
        assert tuple((COLOURS[colour - 1], int(height)) for colour, height in bars) == chart.bars
        assert {name: bool((value < LABEL_CLASSES[name]).all()) for name, value in labels.items()} == dict.fromkeys(
            LABEL_CLASSES, True
        )


def test_an_edit_changes_one_cell() -> None:
    rng, kinds = np.random.default_rng(4), set()
    for _ in range(300):
        scene = sample_scene(rng)
        changed, what = edit(rng, scene)
        kinds.add(what.kind)
        differing = [place for place in range(4) if scene.cells[place] != changed.cells[place]]
        assert differing == [what.place]
        assert changed.things
        assert (scene.cells[what.place], changed.cells[what.place]) == (what.before, what.after)
    assert kinds == {"recolour", "replace", "add", "remove", "resize"}


# dialogues -----------------------------------------------------------------------------------------


def well_formed(sample: Sample) -> None:
    questions = "".join(question for question, _ in sample.turns)
    assert questions.count(IMAGE) == len(sample.images) == len(sample.scenes), sample.id
    for question, answer in sample.turns:
        assert IMAGE not in answer, sample
        assert "None" not in question + answer, sample
        assert re.fullmatch(r"[A-Z].*\.", answer), answer
        assert not re.search(r"  |\.\.", answer), answer
        assert re.fullmatch(rf"({IMAGE}\n)*[A-Z](.|\n)*[.?]", question), question


@pytest.mark.parametrize("name", SYNTHETIC_SETS)
def test_synthetic_sets_are_well_formed_and_fixed(name: str) -> None:
    one, two = test_set(name), test_set(name, 24, turns=2)
    assert len(one) == 100
    assert len({sample.id for sample in one}) == 100
    assert digest(one[:20]) == digest(test_set(name, 20))
    for sample in one:
        well_formed(sample)
        assert len(sample.turns) == 1
        assert len(sample.images) == SYNTHETIC_SETS[name].images
    for first, sample in zip(one, two, strict=False):
        well_formed(sample)
        assert len(sample.turns) == 2
        assert sample.turns[0] == first.turns[0]
        assert sample.id == first.id
        for a, b in zip(first.images, sample.images, strict=False):
            assert np.array_equal(a, b)
    assert len(FOLLOW_UPS) == 6
    assert len({sample.turns[0] for sample in one}) > (50 if name != "facts" else 30)


@pytest.mark.parametrize("name", ["describe", "read", "exist", "reason", "chart", "album"])
def test_content_comes_from_the_page(name: str) -> None:
    """Every colour in an answer is in the question or on a page (the closing counts may name absent ones)."""
    for sample in test_set(name):
        question, answer = sample.turns[0]
        shown = " ".join(caption(scene) for scene in sample.scenes)
        for value in (*COLOURS, *WORDS):
            if re.search(rf"\b{value}\b", answer):
                assert re.search(rf"\b{value}\b", shown + question), (value, sample.turns, shown)


def test_describe_follows_the_style_of_the_question() -> None:
    words: dict[str, list[int]] = {"Briefly": [], "detail": []}
    for sample in test_set("describe"):
        question, answer = sample.turns[0]
        for style, lengths in words.items():
            if style in question:
                lengths.append(len(answer.split()) - 8 * len(getattr(sample.scenes[0], "things", ())))
        if "as a list" in question:
            assert all(f"{place.capitalize()}: " in answer for place in PLACES)
    assert max(words["Briefly"]) < max(words["detail"])


# probes --------------------------------------------------------------------------------------------


def test_probes_accept_their_reference_and_nothing_else() -> None:
    samples = probe_set(30)
    assert digest(samples) == digest(probe_set(30))
    assert len(samples) == 30 * len(PROBE_KINDS)
    for sample in samples:
        well_formed(sample)
        (probe,), ((_, answer),) = sample.probes, sample.turns
        assert probe.correct(answer), (probe, answer)
        assert probe.expected in VALUES[probe.kind]
        assert probe.expected not in probe.alternatives
        assert set(probe.alternatives) == set(VALUES[probe.kind]) - {probe.expected}
        assert not probe.correct("")
        assert not probe.correct("I can not say.")
        wrong = probe.alternatives[len(answer) % len(probe.alternatives)]
        assert not probe.correct(f"It is {wrong}.")
        assert not probe.correct(f"{answer} It is {wrong}.")


@pytest.mark.parametrize(
    ("probe", "answer", "right"),
    [
        (Probe("what", "box", ("ball",)), "Two boxes are there.", True),
        (Probe("what", "key", ("moon",)), "A monkey is there.", False),
        (Probe("count", "two", ("no", "one")), "There are 2 balls.", True),
        (Probe("count", "no", ("one", "two")), "None of them.", True),
        (Probe("sign", "open", ("stop",)), "It says OPEN.", True),
        (Probe("where", "top left", ("top right",)), "At the top left or the top right.", False),
        (Probe.of("colour", "red", "The red ball is beside a blue one."), "It is red, not blue.", True),
    ],
)
def test_probe_examples(probe: Probe, answer: str, right: bool) -> None:
    assert probe.correct(answer) is right


# splits --------------------------------------------------------------------------------------------


def test_train_split_is_a_pure_function_of_seed_and_index() -> None:
    samples = [train_sample(0, i) for i in range(400)]
    assert digest(samples[:50]) == digest([train_sample(0, i) for i in range(50)])
    assert digest(samples[:50]) != digest([train_sample(1, i) for i in range(50)])
    for sample in samples:
        well_formed(sample)
        for probe, (_, answer) in zip(sample.probes, sample.turns, strict=False):
            assert probe.correct(answer), (probe, answer)
        if sample.dataset == "attributes":
            assert 2 <= len(sample.turns) <= 5
            assert len(sample.probes) == len(sample.turns)
    share = sum(sample.dataset == "attributes" for sample in samples) / len(samples)
    assert 0.35 < share < 0.55
    assert abs(sum(MIXTURE.values()) - 1) < 1e-9


def test_train_kinds_can_be_left_out() -> None:
    short = tuple(kind for kind in MIXTURE if kind not in ("saga", "album"))
    assert {train_sample(0, i, short).dataset for i in range(300)} <= set(short)
    assert {train_sample(0, i, ("album",)).dataset for i in range(5)} == {"album"}


def test_train_and_test_streams_differ() -> None:
    """No generator is shared: not one test page, down to the pixel, is a training page."""
    test = {page.tobytes() for name in SYNTHETIC_SETS for sample in test_set(name, 30) for page in sample.images}
    train = {page.tobytes() for i in range(600) for page in train_sample(0, i).images}
    assert not test & train


def test_vocabulary_is_small() -> None:
    text = " ".join(" ".join(turn) for i in range(3000) for turn in train_sample(5, i).turns)
    assert len(set(re.findall(r"[A-Za-z]+|\d+", text))) < 700


def test_errors_name_the_nearest() -> None:
    with pytest.raises(InputError, match="'describe'"):
        test_set("descibe")
    with pytest.raises(InputError, match="'album'"):
        train_sample(0, 0, ("albums",))
    with pytest.raises(InputError, match="kinds is empty"):
        train_sample(0, 0, ())
    with pytest.raises(InputError, match="use 1 or 2"):
        test_set("describe", turns=3)


def test_contact_sheet_is_written_whole_or_not_at_all(tmp_path) -> None:
    from PIL import Image

    command = [sys.executable, "-m", "picturebook"]
    path = tmp_path / "sheet.png"
    subprocess.run([*command, str(path)], check=True)
    with Image.open(path) as sheet:
        assert sheet.width > 1000
        assert sheet.height > 3000
    assert [entry.name for entry in tmp_path.iterdir()] == ["sheet.png"]
    failed = subprocess.run([*command, str(path / "sheet.png")], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert len(failed.stderr.splitlines()) == 1


def test_help_writes_no_file(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, code in ((["--help"], 0), (["--out"], 2)):
        with pytest.raises(SystemExit) as ended:
            sheet_command(arguments)
        assert ended.value.code == code
    assert "OUT.png" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())

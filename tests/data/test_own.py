"""A user's own rows, in files, are evaluation data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval.lib.questions.sets import evaluation_set
from jaxspec.data.conversations import own_samples
from jaxspec.errors import InputError

LINE = {"id": "a", "image": "red.png", "turns": ["What?", "Why?"], "reference": "A page."}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    Image.new("RGB", (4, 6), "red").save(path.parent / "red.png")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_column(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 6), "blue").save(tmp_path / "photos/blue.png")
    Image.new("RGB", (2, 2), "red").save(tmp_path / "photos/red.png")
    lines = [
        LINE,
        {
            "id": 7,
            "images": ["red.png", "blue.png"],
            "turns": ["<image> or", "<image>?"],
            "reference": ["So.", "No."],
        },
        {"id": "text", "turns": ["Who?"]},
    ]
    path = write(tmp_path / "mine.jsonl", *lines)
    one, two, text = own_samples("mine", path, tmp_path / "photos")
    assert (one.id, two.id, text.id) == ("a", "7", "text")
    assert one.turns == (("<image>\nWhat?", "A page."), ("Why?", ""))
    assert two.turns == (("<image> or", "So."), ("<image>?", "No."))
    assert [image.size for image in two.images] == [(2, 2), (6, 8)]
    assert (text.images, text.turns) == ((), (("Who?", ""),))
    beside = next(own_samples("mine", write(tmp_path / "beside.jsonl", LINE)))
    assert beside.images[0].size == (6, 4)

    data, photos = {"mine": path}, tmp_path / "photos"
    assert [sample.id for sample in evaluation_set("mine", 2, data=data, images=photos)] == [
        "a",
        "7",
    ]
    assert [sample.id for sample in evaluation_set("mine", turns=2, data=data, images=photos)] == [
        "a",
        "7",
    ]
    single = {"one": write(tmp_path / "one.jsonl", {"id": "text", "turns": ["Who?"]})}
    with pytest.raises(InputError, match="set one: no sample with a second turn"):
        evaluation_set("one", turns=2, data=single)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE | {"image": "green.png"}, "line 1, image: no such image file 'green.png'"),
        (LINE | {"images": ["red.png"]}, "line 1: images in image and images; keep one"),
        (
            LINE | {"turns": ["What?", "<image> <image>"]},
            "line 1: .* an image without a source after all 1 images",
        ),
        (LINE | {"reference": ["A page."]}, "line 1: 'reference' is .*; give a text, or 2 texts"),
    ],
)
def test_what_is_wrong_is_told_by_line(line: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        list(own_samples("mine", write(tmp_path / "mine.jsonl", line)))


def test_names_and_folders_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", LINE, LINE)
    with pytest.raises(InputError, match=r"line 2: id 'a' is at .* line 1 already"):
        list(own_samples("mine", path))
    with pytest.raises(InputError, match=r"images .*: no such folder"):
        list(own_samples("mine", path, tmp_path / "photos"))

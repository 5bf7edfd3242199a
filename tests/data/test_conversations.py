"""Training data is read from files in every form of row, and prepared shards are read back as they
were written.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from jaxspec.data.conversations import Skipped, readable
from jaxspec.data.forms import read_row
from jaxspec.data.prepared import Prepared, mixture
from jaxspec.data.rows import DataRow
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from picturebook.training import Picturebook
from tests.tiny.disk import full_disk
from train.prepare import Book, Llava, Text, main, with_few_images


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [
        {"from": who, "value": text} for pair in pairs for who, text in zip(("human", "gpt"), pair)
    ]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "clip").mkdir(parents=True)
    for shade in range(5):
        Image.new("RGB", (4 + shade, 3), (shade,) * 3).save(folder / f"{shade}.png")
        Image.new("RGB", (2, 2), (shade,) * 3).save(folder / "clip" / f"frame_{8 + shade}.jpg")
    turned = Image.new("RGB", (9, 5))
    turned.getexif()[0x0112] = 6  # a quarter turn
    turned.save(folder / "turned.jpg", exif=turned.getexif())
    (folder / "broken.png").write_bytes((folder / "1.png").read_bytes()[:40])
    return folder


def read(values: dict[str, Any], folder: Path | None = None) -> Any:
    return read_row(DataRow("mix.json row 1", values, folder), frames=3)


@pytest.mark.parametrize(
    ("values", "turns"),
    [
        (
            {"conversations": said(("<image>\nWhat?", "A cup."), ("More", "Red.")),
             "image": "1.png"},
            (("<image>\nWhat?", "A cup."), ("More", "Red.")),
        ),
        (
            {"conversations": said(("Both?", "Yes.")), "image": ["1.png", "2.png"]},
            (("<image>\n<image>\nBoth?", "Yes."),),
        ),
        (
            {"conversations": said(("First", "One."), ("And <image>?", "Two.")),
             "images": ["2.png"]},
            (("First", "One."), ("And <image>?", "Two.")),
        ),
        ({"conversations": said(("<video>Who?", "A dog.")), "video": "clip"},
         (("<image>" * 3 + "Who?", "A dog."),)),
        ({"messages": [{"role": "system", "content": "Be brief."},
                       {"role": "user", "content": "Hi"},
                       {"role": "assistant", "content": "Ho"}]}, (("Hi", "Ho"),)),
        ({"conversations": [{"from": "gpt", "value": "Welcome"}, *said(("Hi", "Ho")),
                            {"from": "human", "value": "cut"}]}, (("Hi", "Ho"),)),
        ({"messages": [{"role": "user", "content": "<image>Hi"},
                       {"role": "assistant", "content": "Ho"},
                       {"role": "user", "content": "cut <image>"}],
          "images": ["1.png", "2.png"]}, (("<image>Hi", "Ho"),)),
        ({"question": "1+1?", "answer": "2"}, (("1+1?", "2"),)),
        ({"instruction": "Add", "output": "Done"}, (("Add", "Done"),)),
        ({"instruction": "Translate.", "input": "The house.", "output": "La maison."},
         (("Translate.\nThe house.", "La maison."),)),
        ({"instruction": "Name three.", "input": "", "output": "A, B, C"},
         (("Name three.", "A, B, C"),)),
        ({"input": "1+1?", "output": "2"}, (("1+1?", "2"),)),
        ({"instruction": "Who?", "context": "Ann slept.", "response": "Ann"},
         (("Who?\nAnn slept.", "Ann"),)),
        ({"system_prompt": "Be brief.", "question": "Hi", "response": "Ho"}, (("Hi", "Ho"),)),
        ({"instruction": "And?", "output": "Two", "system": "Be brief.",
          "history": [["First?", "One"]]}, (("First?", "One"), ("And?", "Two"))),
        ({"conversations": said(("Hi", "Ho")), "system": "Be brief."}, (("Hi", "Ho"),)),
        ({"text": "Once upon a time."}, (("", "Once upon a time."),)),
        ({"text": "\n<human>: 1+1?\n<bot>: 2\n<human>: Why?\n<bot>: So <bot>: it is."},
         (("1+1?", "2"), ("Why?", "So <bot>: it is."))),
        ({"prompt": {"role": "prompter", "text": "Hi", "replies": [
            {"role": "assistant", "text": "Bad", "rank": 1, "replies": []},
            {"role": "assistant", "text": "Ho", "rank": 0, "replies": [
                {"role": "prompter", "text": "So?", "rank": None, "replies": []}]}]}},
         (("Hi", "Ho"),)),
    ],
)  # fmt: skip
def test_rows(values: dict[str, Any], turns: tuple[tuple[str, str], ...], photos: Path) -> None:
    sample = read(values, photos)
    assert sample.turns == turns
    assert sample.system == ("Be brief." if "Be brief." in str(values) else "")
    assert len(sample.images) == sum(question.count("<image>") for question, _ in turns)


def test_videos_are_frames_from_first_to_last(photos: Path) -> None:
    sample = read({"conversations": said(("<video>?", "A dog.")), "video": "clip"}, photos)
    assert [round(float(np.asarray(image.load()).mean())) for image in sample.images] == [0, 2, 4]


def test_sizes_are_those_of_upright_images(photos: Path) -> None:
    sample = read(
        {"conversations": said(("<image><image>?", "Yes.")), "image": ["turned.jpg", "3.png"]},
        photos,
    )
    assert [image.size for image in sample.images] == [(9, 5), (3, 7)]
    values = {
        "conversations": said(("<image>?", "Yes.")),
        "image": {"bytes": None, "path": "3.png"},
    }
    # as the hub stores an image that is a file
    assert read(values, photos).images[0].size == (3, 7)


PARTED = [
    {"role": "user", "content": [{"type": "text", "text": "<video>\nWhat?"}]},
    {"role": "assistant", "content": "A dog."},
]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"conversations": said(("<image>", "Ho")), "image": ["1.png", "2.png"]},
            "messages: show 1 of 2 images; mark each",
        ),
        ({"conversations": said(("Hi", "see <image>"))}, "in an answer"),
        ({"conversations": said(("Hi", "Ho"))[:1] * 2}, "out of turn"),
        ({"conversations": said(("Hi", "Ho")), "image": "broken.png"}, "not one of the formats"),
        ({"conversations": said(("Hi", "Ho")), "video": "1.png"}, "no folder of frames"),
        ({"prompt": {"role": "prompter", "text": "Hi", "replies": [7]}}, "no message"),
        (
            {"messages": PARTED, "video": "clip"},
            "<video> in a part of a message; give the message as one text",
        ),
    ],
)
def test_rows_that_cannot_be_read(values: dict[str, Any], reason: str, photos: Path) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        read(values, photos)
    assert "mix.json row 1" in str(caught.value)


def lines(path: Path) -> Path:
    good = [json.dumps({"id": i, "text": f"text {i}"}).encode() for i in range(40)]
    path.write_bytes(
        b"\n".join([*good, b"{broken", b"\xff\xfe", b"[1]", b'{"id": "odd"}', b"", good[0]])
    )
    return path


def test_what_is_skipped_is_counted_and_logged_by_id(tmp_path: Path) -> None:
    skipped = Skipped(4, tmp_path / "log.jsonl")
    samples = list(readable(lines(tmp_path / "text.jsonl"), skipped))
    assert [sample.id for sample in samples] == [str(i) for i in range(40)] + ["0"]
    log = [json.loads(line) for line in skipped.log.read_text().splitlines()]
    assert [entry["id"] for entry in log] == ["40", "41", "42", "odd"]
    assert [entry["reason"].count("text.jsonl line") for entry in log] == [1] * 4
    assert skipped.count == 4


def test_what_is_not_read_is_named_once_with_its_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns that are not read are named once, except those outside of conversations and those
    that repeat what is read.
    """
    rows = [
        {"question": "1+1?", "answer": "2", "rationale": "One and one.", "id": 1,
         "source": "a book"},
        {"question": "2+2?", "answer": "4", "rationale": "Two and two.", "text": "Q: 2+2?\nA: 4"},
        {"question": "3+3?", "answer": "6", "rationale": "", "choices": ["5", "6"],
         "response": "six"},
        {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"},
                                      {"role": "assistant", "content": "Ho",
                                       "thinking": "They greet."}]},
        {"conversations": [{"from": "gpt", "value": "I am a bot.", "weight": 0},
                           {"from": "human", "value": "Hi", "weight": 0, "train": False},
                           {"from": "gpt", "value": "Ho", "weight": 1, "masked": False}]},
        {"messages": [{"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": "Ho", "train": False},
                      {"role": "user", "content": "And?"}], "loss_mask": [0, 1]},
        {"question": "Odd?", "answer": 7, "rationale": "A row that is skipped."},
    ]  # fmt: skip
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main(Text(tmp_path / "chat.jsonl", "chat", out=tmp_path))
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "not read: rationale (2 rows), choices (1 row), response (1 row), thinking (1 row); "
        "put what belongs to the conversation into its questions and answers",
        "not obeyed: weight (1 row), loss_mask (1 row), train (1 row); every answer is learned "
        "alike, so leave out what should not be",
        "left out: answers before the first question (1 row), last questions without an answer "
        "(1 row); only questions with answers are learned",
    ]


def test_too_many_skipped_rows_end_it(tmp_path: Path) -> None:
    skipped = Skipped(3, tmp_path / "log.jsonl")
    with pytest.raises(InputError, match="4 rows cannot be read, but only 3 may be skipped"):
        list(readable(lines(tmp_path / "text.jsonl"), skipped))
    with pytest.raises(InputError, match="may be skipped"):
        main(Text(tmp_path / "text.jsonl", "text", skip=3, out=tmp_path / "out"))
    left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert left == ["text.skipped.jsonl"]  # no half of a data set


def test_a_set_without_samples_says_why(tmp_path: Path) -> None:
    rows = [
        {"conversations": said(("Hi", "Ho")), "image": name} for name in ("a.png", "a.png", "b.png")
    ]
    (tmp_path / "mix.json").write_text(json.dumps(rows))
    reason = (
        r"3 rows were skipped, 2 of them: no such image file 'a\.png' in .* "
        r"\(.*mix\.skipped\.jsonl has all\)"
    )
    with pytest.raises(InputError, match=f"data mix: no sample is left; {reason}"):
        main(Llava(tmp_path / "mix.json", "mix", out=tmp_path))
    (tmp_path / "mix.json").write_text("[]")
    with pytest.raises(InputError, match="no sample is left; the file holds no rows; name another"):
        main(Llava(tmp_path / "mix.json", "mix", out=tmp_path))


def test_json_lines_under_another_name(tmp_path: Path) -> None:
    rows = [{"text": "text 0"}, {"text": "text 1"}]
    (tmp_path / "mix.json").write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n")
    skipped = Skipped(1, tmp_path / "log.jsonl")
    samples = list(readable(tmp_path / "mix.json", skipped))
    assert [sample.turns for sample in samples] == [(("", "text 0"),), (("", "text 1"),)]
    assert "mix.json line 3: not JSON" in skipped.log.read_text()
    (tmp_path / "mix.json").write_text("{\n 'no': 1}")
    with pytest.raises(InputError, match=r"mix\.json: not JSON \("):
        list(readable(tmp_path / "mix.json", skipped))


def test_prepared_llava_comes_back(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "id": f"r{i}",
            "image": [f"{k}.png" for k in range(i % 3)],
            "conversations": said((f"Q{i} é?", f"A{i}")),
        }
        for i in range(30)
    ]
    rows[7]["image"] = "broken.png"
    rows[5]["system"] = "Be brief."
    (tmp_path / "mix.json").write_text(json.dumps(rows))
    folder = main(Llava(tmp_path / "mix.json", "my_mix", images=photos, out=tmp_path))
    out = capsys.readouterr()
    assert out.out == f"wrote {folder}: 29 samples, 29 images, 29 answers\n"
    assert "skipped 1 rows" in out.err
    source = Prepared(tmp_path / "my_mix")
    assert source.metadata == {"samples": 29, "images": 29, "answers": 29, "skipped": 1}
    assert [sample.id for sample in (source[i] for i in range(len(source)))] == [
        f"r{i}" for i in range(30) if i != 7
    ]
    sample = pickle.loads(pickle.dumps(source))[5]
    assert (sample.system, source[4].system) == ("Be brief.", "")
    assert sample.turns == (("<image>\n<image>\nQ5 é?", "A5"),)
    assert [image.size for image in sample.images] == [(3, 4), (3, 5)]
    assert sample.images[1].content == (photos / "1.png").read_bytes()
    written = [
        image
        for record in tfds.data_source("my_mix", data_dir=str(tmp_path), split="train")
        for image in record["images"]
    ]
    # once, not once a row
    assert sorted(written) == sorted((photos / f"{k}.png").read_bytes() for k in range(2))
    with pytest.raises(InputError, match="holds prepared data already"):
        main(Llava(tmp_path / "mix.json", "my_mix", images=photos, out=tmp_path))
    assert "r7" in (tmp_path / "my_mix.skipped.jsonl").read_text()


def test_prepared_picturebook_is_picturebook(tmp_path: Path) -> None:
    (tmp_path / "pages" / "incomplete.ABCDEF_2.0.0").mkdir(parents=True)  # of a run that was killed
    main(Book(6, "pages", seed=3, kinds=("edit", "facts"), out=tmp_path))
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["2.0.0"]
    prepared, drawn = Prepared(tmp_path / "pages"), Picturebook(3, ("edit", "facts"))
    assert len(prepared) == len(list(prepared)) == 6
    for i in range(6):
        assert (prepared[i].id, prepared[i].turns) == (drawn[i].id, drawn[i].turns)
        for ours, theirs in zip(prepared[i].images, drawn[i].images, strict=True):
            np.testing.assert_array_equal(np.asarray(ours.load()), theirs)


def test_fewer_images_are_the_first_where_their_marks_were() -> None:
    sample = Sample("a", "spot", (1, 2), (("First: <image>\nSecond: <image>\nSame?", "No."),))
    assert with_few_images(sample, 1).turns[0][0] == "First: <image>\nSecond: \nSame?"
    assert with_few_images(sample, 1).images == (1,)
    leading = replace(sample, turns=(("<image>\n<image>\nSame?", "No."),))
    assert with_few_images(leading, 1).turns[0][0] == "<image>\nSame?"
    assert with_few_images(leading, 0).turns[0][0] == "Same?"
    later = replace(leading, turns=(("Sum?", "1"), *leading.turns))
    assert [question for question, _ in with_few_images(later, 0).turns] == ["Sum?", "Same?"]


@pytest.mark.parametrize("samples", [0, -3])
def test_a_book_has_samples(samples: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"samples: {samples}; give a whole number, 1 or more"):
        main(Book(samples, "pages", out=tmp_path))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A full disk ends preparation in one line and leaves nothing, for ArrayRecord's shards and for
    the log of skipped rows.
    """
    with (
        full_disk(1 << 12),
        pytest.raises(InputError, match=r"pages/2\.0\.0: cannot be written: File too large; "),
    ):
        main(Book(2, "pages", out=tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (tmp_path / "mix.skipped.jsonl").mkdir()
    with pytest.raises(InputError, match=r"mix\.skipped\.jsonl: cannot be written: Is a directory"):
        main(Llava(lines(tmp_path / "text.jsonl"), "mix", out=tmp_path))


def test_mixture_shuffles_all_by_seed_and_keeps_the_weights() -> None:
    parts = [(Picturebook(size=30), 3.0), (Picturebook(1, size=8), 1.0)]
    drawn = [mixture(parts, seed=5)[i].id for i in range(160)]
    assert drawn == [mixture(parts, seed=5)[i].id for i in range(160)]
    assert drawn != [mixture(parts, seed=6)[i].id for i in range(160)]
    first = [name for name in drawn if "train-0-" in name]
    assert len(first) == 120
    epochs = [first[i : i + 30] for i in range(0, 120, 30)]
    assert all(len(set(epoch)) == 30 for epoch in epochs)  # every sample once an epoch,
    assert epochs[0] != epochs[1]  # in another order

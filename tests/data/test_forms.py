"""Every form of rows on the page docs/data.md is read for training and for evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxspec.data.conversations import Skipped, own_samples, readable
from jaxspec.data.forms import FORMS
from jaxspec.data.samples import Sample
from tests import tiny
from tests.conftest import ROOT

CUP, TRAM = (4, 3), (5, 6)
SAMPLES: dict[str, tuple[tuple[str, tuple[tuple[str, str], ...], list[tuple[int, int]]], ...]] = {
    "turns": (
        ("", (("<image>\nWhat is odd here?", "The chair floats."), ("Why?", "")), [CUP]),
        ("", (("Is <image> like <image>?", "No."),), [CUP, TRAM]),
    ),
    "tree": (("", (("Hi", "Ho"),), []), ("", (("1+1?", "2"),), [])),
    "prompt and completion": (("", (("1+1?", "2"),), []), ("Be brief.", (("Hi", "Ho"),), [])),
    "messages": (
        ("Be brief.", (("<image>\nWhat?", "A cup."),), [CUP]),
        ("", (("<image>\nWhat?", "A tram."), ("Red?", "Yes.")), [TRAM]),
    ),
    "texts": (
        ("", (("<image>\nWhat?", "A cup."), ("Red?", "Yes.")), [CUP]),
        ("", (("<image>\n<image>\nAlike?", "No."),), [CUP, TRAM]),
    ),
    "question and answer": (
        ("Be brief.", (("Hi", "Ho"), ("Translate.\nThe house.", "La maison.")), []),
        ("", (("What?", "A cup."), ("And <image>?", "A tram.")), [TRAM]),
    ),
    "marked text": (("", (("1+1?", "2"), ("Why?", "So it is.")), []), ("", (("Hi", "Ho"),), [])),
    "text": (("", (("", "Once upon a time."),), []), ("", (("<image>", "A caption."),), [CUP])),
}
"""System prompt, turns and sizes of images of the page's rows."""


def rows_of_the_page() -> dict[str, str]:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("## Two rows")[2]
    return dict(re.findall(r"### ([^\n]+)\n\n```json\n(.*?)```", page, re.DOTALL))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name, (height, width) in (("cup", CUP), ("tram", TRAM)):
        Image.new("RGB", (width, height), "red").save(tmp_path / f"{name}.png")
    return tmp_path


def contents(sample: Sample) -> tuple[object, ...]:
    return sample.system, sample.turns, [image.size for image in sample.images]


def test_the_page_has_every_form() -> None:
    assert rows_of_the_page().keys() == FORMS.keys() == SAMPLES.keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_two_rows_of_a_form(form: str, suffix: str, photos: Path) -> None:
    lines, file = rows_of_the_page()[form], photos / f"rows{suffix}"
    rows = [json.loads(line) for line in lines.splitlines()]
    if suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="install the `benchmarks` extra")
        parquet = pytest.importorskip("pyarrow.parquet")
        for row in rows:  # as the hub keeps images, and as bytes
            paths = row.get("images") or []
            row |= {"images": [(photos / path).read_bytes() for path in paths]} if paths else {}
            if path := row.get("image"):
                row["image"] = {"bytes": (photos / path).read_bytes(), "path": path}
        samples = []
        for row in rows:  # columns have one type
            for message in row.get("messages", ()):
                text = message["content"]
                parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
                message["content"] = parts
            parquet.write_table(arrow.Table.from_pylist([row]), file)
            samples += list(own_samples("mine", file))
        assert tuple(map(contents, samples)) == SAMPLES[form]
        return
    file.write_text(lines if suffix == ".jsonl" else json.dumps(rows))
    skipped = Skipped(form == "turns", photos / "skipped.jsonl")
    trained = tuple(map(contents, readable(file, skipped)))
    assert trained == SAMPLES[form][form == "turns" :]  # the first has a question without answer
    assert not skipped.remarks
    assert tuple(map(contents, own_samples("mine", file))) == SAMPLES[form]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistent", "content": ""}]},
            "messages[1]: role 'assistent' is unknown; did you mean 'assistant'?",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages[0]: content[0]: {'type': 'audio'} is no part that is read; give",
        ),
        (
            {"messages": [{"role": "user", "content": "<image> <image>"}], "image": "cup.png"},
            "messages[0]: shows an image without a source after all 1 images",
        ),
        ({"texts": [{"user": "Hi"}]}, "texts: {'user': 'Hi'} is no {user, assistant}; mend"),
        (
            {"query": "Hi", "response": "Ho", "history": [["Hi"]]},
            "history: ['Hi'] is no [question, answer]; mend the row",
        ),
        ({"query": "Hi", "response": "Ho", "system": 7}, "system prompt 7 is no text; mend"),
        ({"query": "Hi", "response": "Ho", "image": 7}, "image: a int is no image; give a path"),
        (
            {"query": "Hi", "response": "Ho", "image": "https://a.org/b.png"},
            "image: 'https://a.org/b.png' is a web address; fetch it, and give the file",
        ),
        (
            {"query": "Hi", "response": "Ho", "image": "data:image/png;base64,?"},
            "image: image 'data:image/png;base64': not base64",
        ),
        ({"turns": ["Hi", ""]}, "'turns' is ['Hi', ''], not a list of questions; give one"),
        ({"title": "Hi"}, "columns ['title'] hold no conversation; give messages, texts, turns"),
    ],
)
def test_wrong_rows_are_one_line(row: dict[str, object], reason: str, photos: Path) -> None:
    (photos / "rows.jsonl").write_text(json.dumps({"text": "Hi"}) + "\n" + json.dumps(row))
    said = tiny.one_line(lambda: list(own_samples("mine", photos / "rows.jsonl")))
    assert f"rows.jsonl line 2: {reason}" in said.replace(", image: ", ": image: ")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_null_is_a_field_that_the_row_lacks(suffix: str, tmp_path: Path) -> None:
    """A null counts as a missing field: in Parquet each row has the columns of all forms."""
    said = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Rhyme."}]
    said += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    empty = dict.fromkeys(("id", "turns", "messages", "question", "instruction", "output", "topic"))
    rows: list[dict[str, Any]] = [
        empty | {"id": "a", "instruction": "Hi", "output": "Ho"},
        empty | {"messages": said, "topic": "b"},
        empty | {"turns": ["Hi"]},
    ]
    file = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        arrow = pytest.importorskip("pyarrow", reason="install the `benchmarks` extra")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), file)
    first, second, third = own_samples("mine", file, labels=("topic",))
    assert first.turns == second.turns == (("Hi", "Ho"),)
    assert (second.system, third.turns) == ("Be brief.\nRhyme.", (("Hi", ""),))
    assert [sample.id for sample in (first, second, third)] == ["a", "1", "2"]
    assert [dict(sample.labels)["topic"] for sample in (first, second, third)] == ["", "b", ""]


def test_the_messages_of_a_sample_are_its_questions_and_answers() -> None:
    turns = (("<image>\nWho?", "Me."), ("So <image>?", "No."))
    sample = Sample("a", "mine", ("first", "second"), turns, system="Be brief.")
    system, who, me, then, no = sample.messages
    assert [message.role for message in sample.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert (system.texts, me.texts, no.texts) == (("Be brief.",), ("Me.",), ("No.",))
    assert (who.parts, who.images, who.inline) == ((None, "Who?"), ("first",), False)
    assert (then.parts, then.images, then.inline) == (("So ", None, "?"), ("second",), True)
    assert [who.marked, then.marked] == [question for question, _ in turns]
    assert (sample.question(0), sample.question(1)) == ([system, who], [then])

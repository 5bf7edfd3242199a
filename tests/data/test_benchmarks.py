"""The papers' sets and their follow-ups are read from files in exactly the hub's formats."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from eval.lib.questions.sets import add_follow_ups, evaluation_set
from jaxspec.data.benchmarks import REASON, SUMMARISE, benchmark_samples, few_shot_samples
from jaxspec.data.images import StoredImage
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from picturebook import FOLLOW_UPS

pyarrow = pytest.importorskip(
    "pyarrow", reason="parquet needs pyarrow: install the `benchmarks` extra"
)
parquet = pytest.importorskip("pyarrow.parquet")


def png(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (6, 4), (shade, shade, shade)).save(out, "PNG")
    return out.getvalue()


def cell(shade: int) -> dict[str, Any]:
    """Return an image as `datasets` stores it."""
    return {"bytes": png(shade), "path": f"{shade}.png"}


def write(path: Path, rows: list[dict[str, Any]], group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def shade(image: Any) -> int:
    assert isinstance(image, StoredImage)
    return int(np.asarray(image.load())[0, 0, 0])


POPE = [
    {
        "id": str(i),
        "question_id": str(i),
        "question": f"Is there a cup, {i}?",
        "answer": "yes",
        "image": cell(i),
    }
    for i in range(5)
]
INTERLEAVED = [
    {
        "sample_id": i,
        "sub_task": ("IEdit", "VIST", "VIST", "VIST", "VIST", "IEdit")[i],
        "question": "Image 1: <image>. Image 2: <image>. What was done?",
        "answer": f"cut {i}",
        "image_10": cell(10 * i + 2) if i == 0 else None,
        "image_2": cell(10 * i + 1),
        "image_3": cell(10 * i + 2) if i != 0 else None,
    }
    for i in range(6)
]
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "docvqa": (
        {
            "questionId": "1",
            "question": "Which year?",
            "image": cell(1),
            "answers": ["1999", "'99"],
        },
        ("1999", "'99"),
        f"<image>\n{REASON}Which year?",
    ),
    "vqav2": (
        {
            "question": "Colour?",
            "image": cell(1),
            "multiple_choice_answer": "red",
            "answers": [{"answer": "blue", "answer_confidence": "yes", "answer_id": 1}],
        },
        ("red",),
        f"<image>\n{REASON}Colour?",
    ),
    "gsm8k": ({"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"}, ("2",), "1+1?"),
    "mmlu": (
        {"question": "2 is", "subject": "algebra", "choices": ["odd", "even"], "answer": 1},
        ("even",),
        "2 is\nA. odd\nB. even",
    ),
    "cnn-dm": (
        {"article": "Rain fell.", "highlights": "Rain.", "id": "1"},
        (),
        f"{SUMMARISE}Rain fell.",
    ),
    "scienceqa": (
        {
            "image": cell(1),
            "question": "Which?",
            "choices": ["sun", "moon"],
            "answer": 1,
            "hint": "",
        },
        ("moon",),
        f"<image>\n{REASON}Which?\nA. sun\nB. moon",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_the_hubs_columns(name: str, tmp_path: Path) -> None:
    row, accepted, prompt = ROWS[name]
    (sample,) = benchmark_samples(name, write(tmp_path / "data.parquet", [row]))
    assert (sample.id, sample.dataset) == (f"{name}-000", name)
    assert sample.turns[0][0] == prompt
    assert sample.accepted == accepted
    assert sample.turns[0][1]
    assert len(sample.images) == ("image" in row)


SUMS = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(6)]
FACTS = [
    {
        "question": f"{n}?",
        "subject": ("art", "law")[n % 2],
        "choices": ["no", "yes"],
        "answer": n % 2,
    }
    for n in range(10)
]


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub be a folder, with nothing in its cache."""
    monkeypatch.setattr(
        "huggingface_hub.HfFileSystem", lambda: DirFileSystem(str(folder), LocalFileSystem())
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))


def test_worked_examples_stand_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked examples precede a question: the first four of all, five of the question's own
    subject, or those of one split, as in the hub's copy.
    """
    tests, train = (
        write(tmp_path / "test.parquet", SUMS[5:]),
        write(tmp_path / "train.parquet", SUMS),
    )
    (sample,) = few_shot_samples("gsm8k", tests, train)
    shown = "".join(f"Question: {n}+1?\nAnswer: #### {n + 1}\n\n" for n in range(4))
    assert sample.turns == ((f"{shown}Question: 5+1?\nAnswer:", "#### 6"),)
    assert sample.accepted == ("6",)

    root = tmp_path / "datasets/cais/mmlu@refs/convert/parquet/all"
    write(root / "test/0000.parquet", FACTS[:2])
    write(root / "dev/0000.parquet", FACTS)
    serve(tmp_path, monkeypatch)
    art, law = few_shot_samples("mmlu")
    asked = law.turns[0][0]
    assert asked.startswith("Question: 1?\nA. no\nB. yes\nAnswer: B. yes\n\nQuestion: 3?")
    assert asked.endswith("Answer: B. yes\n\nQuestion: 1?\nA. no\nB. yes\nAnswer:")
    assert asked.count("Question") == 6
    assert (art.accepted, law.accepted) == (("no",), ("yes",))


def test_subjects_take_turns(tmp_path: Path) -> None:
    rows = [row | {"subject": subject} for row, subject in zip(FACTS, "aabbbc", strict=False)]
    path = write(tmp_path / "test.parquet", rows)
    assert [sample.turns[0][0][0] for sample in benchmark_samples("mmlu", path)] == [
        *("0", "2", "5", "1", "3", "4")
    ]


def test_an_empty_option_keeps_its_letter(tmp_path: Path) -> None:
    """An empty option keeps its letter, without which the index of the answer would name another
    option.
    """
    row = FACTS[0] | {"choices": ["no", "", "yes"], "answer": 2}
    (sample,) = benchmark_samples("mmlu", write(tmp_path / "test.parquet", [row]))
    assert sample.turns[0] == (f"{row['question']}\nA. no\nB. \nC. yes", "C. yes")
    assert sample.accepted == ("yes",)


@pytest.mark.parametrize(("choices", "answer"), [(list("ab"), "²"), (["x"] * 30, "28")])
def test_an_answer_that_names_no_letter_is_refused(
    choices: list[str], answer: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "test.parquet", [FACTS[0] | {"choices": choices, "answer": answer}])
    with pytest.raises(InputError, match=r"row 1: answer .* is no index into the"):
        list(benchmark_samples("mmlu", path))


def test_a_filter_keeps_the_task_and_images_keep_their_order(tmp_path: Path) -> None:
    edits = list(benchmark_samples("iedit", write(tmp_path / "a.parquet", INTERLEAVED)))
    assert [sample.turns[0][1] for sample in edits] == ["cut 0", "cut 5"]
    # image_2 before image_10, None left out
    assert [shade(image) for image in edits[0].images] == [1, 2]
    assert len(list(benchmark_samples("vist", tmp_path))) == 4
    with pytest.raises(InputError, match="no rows with sub_task 'PororoSV'"):
        next(benchmark_samples("pororosv", tmp_path))


def test_rows_are_streamed(tmp_path: Path) -> None:
    """A broken row is met when its turn comes and not before."""
    path = write(
        tmp_path / "pope.parquet",
        [*POPE[:4], POPE[4] | {"image": {"bytes": b"no image", "path": ""}}],
    )
    samples = benchmark_samples("pope", path)
    assert len([next(samples) for _ in range(4)]) == 4
    with pytest.raises(InputError, match=r"pope\.parquet row 5, image: not one of the formats"):
        next(samples)


def other(folder: Path) -> Path:
    (folder / "a.csv").write_text("")
    return folder / "a.csv"


def torn(folder: Path) -> Path:
    path = write(folder / "a.parquet", POPE)
    path.write_bytes(path.read_bytes()[:-30])
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other, "not a .parquet or .jsonl or .jsonl.gz file"),
        (torn, r"a\.parquet: cannot be read as parquet"),
    ],
)
def test_bad_places_are_one_line(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        list(benchmark_samples("pope", make(tmp_path)))


def sample(i: int, images: int = 1) -> Sample:
    return Sample(
        str(i),
        "pope",
        tuple(f"{i}{k}" for k in range(images)),
        ((f"{'<image>' * images}Q{i}?", f"A{i}"),),
    )


BORROWED = {
    "fact": [Sample("0", "nq", (), (("who wrote it", "Ann"),))],
    "sum": [Sample("0", "gsm8k", (), (("1+1?", "2"),))],
}


def test_follow_ups_go_through_the_kinds() -> None:
    first = [sample(i) for i in range(8)]
    second = add_follow_ups(first, tuple(FOLLOW_UPS), BORROWED)
    assert [s.turns[0] for s in second] == [s.turns[0] for s in first]
    question, caption, summary, story, fact, total = (s.turns[1] for s in second[:6])
    assert question == first[1].turns[0]
    assert second[0].images == ("00", "10")
    assert caption[0] == "Provide a detailed caption for the provided image."
    assert summary[0] == "Summarize the previous answer."
    assert story[0] == "Can you use the previous responses to write a long story for children?"
    reasons = (
        "Provide a comprehensive and detailed explanation, including the reasoning and "
        "background information."
    )
    assert fact == (f"Who wrote it. {reasons}", "Ann")
    assert total == ("1+1?. Provide a detailed explanation.\nLet's think step by step.", "2")
    assert second[6].images == ("60", "70")
    # the last asks the first's
    assert add_follow_ups(first, ("question",), {})[7].turns[1] == first[0].turns[0]
    for s in second:
        assert sum(q.count("<image>") for q, _ in s.turns) == len(s.images)


def test_captions_need_images() -> None:
    blind = [replace(sample(i, images=0), dataset="nq") for i in range(2)]
    kinds = [s.turns[1][0] for s in add_follow_ups(blind, ("caption", "summary"), {})]
    assert len(set(kinds)) == 1
    with pytest.raises(InputError, match="nq has no images to caption"):
        add_follow_ups(blind, ("caption",), {})
    with pytest.raises(InputError, match="unknown kind 'capton'"):
        add_follow_ups(blind, ("capton",), {})


def test_sets_by_name(tmp_path: Path) -> None:
    data = {"pope": write(tmp_path / "pope.parquet", POPE)}
    assert [s.id for s in evaluation_set("pope", 2, data=data)] == ["pope-000", "pope-001"]
    asked = evaluation_set("pope", 3, turns=2, kinds=("question",), data=data)[2]
    # round within the first three
    assert asked.turns[1][0] == evaluation_set("pope", 1, data=data)[0].turns[0][0]
    captions = evaluation_set("spot", 3, turns=2, kinds=("caption",))
    assert all("caption" in s.turns[1][0] for s in captions)
    assert captions[0].turns[0] == evaluation_set("spot", 1)[0].turns[0]
    with pytest.raises(InputError, match="unknown set 'poppe'; did you mean 'pope'"):
        evaluation_set("poppe")
    with pytest.raises(InputError, match="--data mmspec=PATH"):
        evaluation_set("mmspec")
    with pytest.raises(InputError, match="unknown follow-up 'capton'; did you mean 'caption'"):
        evaluation_set("spot", 3, turns=2, kinds=("capton",))

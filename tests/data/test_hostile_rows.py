"""Rows that strangers wrote are read if they are odd, and skipped or reported in one line if they
are bad.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from jaxspec.data.conversations import Skipped, own_samples, readable
from jaxspec.data.rows import LONGEST, local_rows, rows_and_errors
from jaxspec.errors import InputError
from train.prepare import Llava, main

GOOD = '{"id": "good", "question": "Is it?", "answer": "It is."}'
BAD = {
    "half a character": (r'{"question": "\ud83d", "answer": "It is."}', "surrogates not allowed"),
    "half a name": (r'{"question": "Is it?", "\ud83d": 1}', "surrogates not allowed"),
    "a data URL": (
        '{"question": "Is it?", "answer": "It is.", "image": "data:image/png;base64,'
        + "A" * 5000
        + '"}',
        "not one of the formats that are read",
    ),
    "a video of a data URL": (
        '{"question": "Is it?", "answer": "It is.", "video": "data:video/mp4;base64,'
        + "A" * 5000
        + '"}',
        "no folder of frames",
    ),
    "less nesting": ('{"question": ' + "[" * 300 + "]" * 300 + "}", "hold no conversation"),
    "no row": ("7", "a JSON int, not an object"),
}
"""Rows that are JSON."""
NO_JSON = {
    "nesting": ('{"question": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON .*recursion"),
    "digits": ('{"question": ' + "7" * 5000 + "}", "not JSON .*4300 digits"),
    "no JSON": ('{"question": }', "not JSON"),
    "no UTF-8": ('{"question": "\udcff"}', "not JSON .*can't decode byte 0xff"),
}


def as_lines(folder: Path, rows: list[str]) -> Path:
    (folder / "rows.jsonl").write_bytes("\n".join([*rows, ""]).encode(errors="surrogateescape"))
    return folder / "rows.jsonl"


def as_a_list(folder: Path, rows: list[str]) -> Path:
    (folder / "rows.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
    return folder / "rows.json"


def as_a_folder(folder: Path, rows: list[str]) -> Path:
    as_lines(folder, rows)
    return folder


@pytest.mark.parametrize("write", [as_lines, as_a_list, as_a_folder])
def test_bad_rows_are_skipped_and_those_behind_them_are_read(
    write: Callable[[Path, list[str]], Path], tmp_path: Path
) -> None:
    wrong = BAD if write is as_a_list else BAD | NO_JSON
    rows = [line for bad, _ in wrong.values() for line in (bad, GOOD)]
    (tmp_path / "data").mkdir()
    skipped = Skipped(len(wrong), tmp_path / "skipped.jsonl")
    samples = list(readable(write(tmp_path / "data", rows), skipped))
    assert [sample.id for sample in samples] == ["good"] * len(wrong)
    log = [json.loads(line) for line in skipped.log.read_text().split("\n")[:-1]]
    reasons = {entry["id"]: entry["reason"] for entry in log}
    assert len(reasons) == len(log) == len(wrong)
    for i, (_, reason) in enumerate(wrong.values()):
        assert re.search(reason, reasons[str(2 * i)])
        assert len(reasons[str(2 * i)]) < 350


@pytest.mark.parametrize("kind", ["half a character", "nesting"])
def test_where_rows_are_not_skipped_they_are_one_line(kind: str, tmp_path: Path) -> None:
    line, reason = (BAD | NO_JSON)[kind]
    with pytest.raises(InputError, match=rf"rows.jsonl line 2: .*{reason}"):
        list(local_rows(as_lines(tmp_path, [GOOD, line])))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_line_without_end_is_one_line(suffix: str, tmp_path: Path) -> None:
    path, content = tmp_path / f"rows{suffix}", f"{GOOD}\n".encode() + b" " * LONGEST
    path.write_bytes(gzip.compress(content, mtime=0) if suffix.endswith("gz") else content)
    rows = rows_and_errors(path)
    next(rows)
    with pytest.raises(InputError, match=f"line 2: {LONGEST} bytes or more; split the row"):
        next(rows)


def test_marks_and_odd_ends_of_lines_are_no_ends_of_rows(tmp_path: Path) -> None:
    said = "one\u2028two\x85three\x0c"
    row = json.dumps({"id": "odd", "text": said}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n\r\n{row}".encode())
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + f"[{row}, {row}]".encode())
    for name in ("a.jsonl", "a.json"):
        samples = list(readable(tmp_path / name, Skipped(0, tmp_path / "skipped")))
        assert [sample.turns for sample in samples] == [(("", said.strip()),)] * 2
    assert [row.values["text"] for row in local_rows(tmp_path / "a.jsonl")] == [said] * 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [('[{"text": "a"},\n{"text": ', "not JSON .*line 2 column 10"), *NO_JSON.values()],
)
def test_a_file_that_is_no_list_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=reason):
        list(readable(tmp_path / "a.json", Skipped(0, tmp_path / "skipped")))


def test_a_parquet_row_that_is_not_utf8_is_skipped(tmp_path: Path) -> None:
    arrow = pytest.importorskip(
        "pyarrow", reason="parquet needs pyarrow: install the `benchmarks` extra"
    )
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [b"one", b"two \xff", b"three"]
    column = arrow.Array.from_buffers(
        arrow.string(), 3, arrow.array(texts, arrow.binary()).buffers()
    )
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    skipped = Skipped(1, tmp_path / "skipped.jsonl")
    assert [sample.turns[0][1] for sample in readable(tmp_path, skipped)] == ["one", "three"]
    assert "a.parquet row 2: a value cannot be read" in skipped.log.read_text()


def test_images_outside_of_their_folder_are_taken_where_that_is_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in (tmp_path / "secret.png", folder / "in.png"):
        Image.new("RGB", (3, 3)).save(path)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")  # as in the hub's cache
    (folder / "far").symlink_to(tmp_path / "data")
    inside = ["in.png", str(folder / "in.png"), "link.png", "../photos/in.png"]
    outside = ["../secret.png", str(tmp_path / "secret.png"), "images/../../secret.png"]
    names = [*inside, *outside, "far/../secret.png"]
    rows = [
        {"id": i, "question": "Is it?", "answer": "It is.", "image": name}
        for i, name in enumerate(names)
    ]
    path = as_lines(tmp_path, [json.dumps(row) for row in rows])
    skipped = Skipped(4, tmp_path / "skipped.jsonl")
    assert [sample.id for sample in readable(path, skipped, folder)] == ["0", "1", "2", "3"]
    log = skipped.log.read_text()
    assert (
        log.count(f"is outside of {folder}; link to it from there, or prepare it with --outside")
        == 3
    )
    assert "no such image file 'far/../secret.png'" in log  # not what the link's own parent holds
    as_lines(tmp_path, [json.dumps(row) for row in rows[:-1]])
    main(Llava(path, "all", images=folder, outside=True, skip=0, out=tmp_path))
    own = [json.dumps({"id": "a", "image": name, "turns": ["What?"]}) for name in outside]
    for line in own:
        with pytest.raises(InputError, match="is outside of"):
            next(own_samples("mine", as_lines(tmp_path, [line]), folder))

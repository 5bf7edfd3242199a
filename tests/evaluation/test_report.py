"""Tables show all their columns in a terminal however narrow it is, and a run replaces all results
or none.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eval.lib.drafts.config import Variant
from eval.lib.output.provenance import describe_run
from eval.lib.output.report import Run, begin, finish, write_results
from eval.lib.output.tables import Table, markdown, show
from jaxspec.errors import InputError

WORDS = re.compile(r"[\w.]+")
HEADER = ["view", "turn", *(f"set {i}" for i in range(9))]
ROWS = [[view, turn, *(f"{view}{turn}.{i}0" for i in range(9))] for turn in "12" for view in "MTCP"]


@pytest.mark.parametrize("columns", [24, 40, 200])
def test_every_cell_is_there_beside_what_names_its_row(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show(Table("A title [a]", HEADER, ROWS, ["a note of '[b]' :cat:"]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "A title [a]"  # no style of rich's, and no picture
    assert " ".join(lines).rstrip().endswith("a note of '[b]' :cat:")
    assert max(map(len, lines)) <= columns
    for row in ROWS:
        of_row = [words for words in map(WORDS.findall, lines) if words[:2] == row[:2]]
        assert {cell for words in of_row for cell in words} == set(row)
    assert all(any(name in line for line in lines) for name in HEADER)


def test_names_do_not_break_a_table() -> None:
    text = markdown(Table("a\nb", ["set", "m|x", "n\ny"], [["a|b", "c\r\nd", "e"]], ["left\nout"]))
    assert text.splitlines() == [
        *("# a b", "", r"| set | m\|x | n y |", "|---|---:|---:|", r"| a\|b | c d | e |", ""),
        "left out",
    ]


def run_into(
    out: Path, options: dict[str, object], text: str, figures: tuple[str, ...], stop: bool = False
) -> None:
    fresh = begin(out, options)
    write_results(fresh, describe_run("tiny", options), [{"row": text}], [], text)
    for name in figures:
        (fresh / name).write_text(text)
    if not stop:
        finish(fresh, out)


def test_a_run_replaces_all_of_its_files_or_none(tmp_path: Path) -> None:
    out, options = (
        tmp_path / "a" / "out",
        {"rows": (Variant("MT", ("M", "T")),), "gamma": 3, "out": tmp_path},
    )
    run_into(out, options, "first", ("sweep.png", "overlap.png"))
    (out / "README.md").write_text("mine")
    before = {file.name: file.read_text() for file in out.iterdir()}
    run_into(out, options, "stopped", ("sweep.png",), stop=True)
    (out.with_name("out.unfinished") / ".table.md.7.tmp").write_text(
        "half, of a run that was killed"
    )
    assert {file.name: file.read_text() for file in out.iterdir()} == before
    assert (tmp_path / "a" / "out.unfinished" / "table.md").read_text() == "stopped"
    run_into(out, options, "second", ("sweep.png",))
    assert {file.name for file in out.iterdir()} == before.keys() - {"overlap.png"}
    assert (out / "table.md").read_text() == (out / "sweep.png").read_text() == "second"
    assert (out / "README.md").read_text() == "mine"
    assert list(out.parent.iterdir()) == [out]


def test_a_stopped_run_goes_on_behind_its_whole_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"dataset": name, "turn": 1, "row": row} for name in "ab" for row in "MT"]
    failed = {"dataset": "b", "turn": 1, "row": "C", "error": "no room"}
    run = Run("tiny", {"gamma": 3}, tmp_path / "out")
    run.add(rows, [row | {"text": ""} for row in rows], [failed])
    run.write(Table("A title", ["set"], []))
    # the records of a group are written before its rows
    with (run.folder / "records.jsonl").open("a") as records:
        records.write('{"dataset": "c", "turn": 1, "row": "M"}\n')
    run = Run("tiny", {"gamma": 3}, tmp_path / "out")
    run.restore()
    assert run.rows == rows[:2]
    assert run.records == [row | {"text": ""} for row in rows[:2]]
    assert not run.failed
    assert (
        "out.unfinished: 2 rows are measured already; measuring the rest" in capsys.readouterr().err
    )
    with pytest.raises(
        InputError,
        match=r"unfinished: holds results of gamma 3, but now it is 2; give another --out",
    ):
        Run("tiny", {"gamma": 2}, tmp_path / "out")
    elsewhere = run.about | {"device": "TPU v5e (tpu)"}
    write_results(run.folder, elsewhere, run.rows, run.records, "")
    with pytest.raises(
        InputError, match=r"was measured on TPU v5e \(tpu\), but this is .* \(cpu\); continue there"
    ):
        run.restore()


def test_times_of_two_processors_stay_apart(tmp_path: Path) -> None:
    """Times of two processors stay apart, but counts go on anywhere."""
    run = Run("tiny", {}, tmp_path / "out")
    run.add([{"dataset": "a", "turn": 1, "row": "M"}])
    run.write(Table("A title", ["set"], []))
    write_results(run.folder, run.about | {"processor": "Cray-1"}, run.rows, [], "")
    counted, timed = (Run("tiny", {}, tmp_path / "out", times) for times in ("", "the median"))
    counted.restore()
    assert counted.rows == run.rows
    with pytest.raises(InputError, match=r"was measured on .*, Cray-1, but this is "):
        timed.restore()


INPUTS = {
    "draft": "draft",
    "adapter": "draft",
    "target": "replay:rows.jsonl",
    "captioner": "file:rows.jsonl",
    "data": ["read", "mine=rows.jsonl"],
    "images": "photos",
    "drafts": ["mine=draft:P36"],
    "pairings": [{"models": ["other", "draft"]}],
}


@pytest.mark.parametrize("option", INPUTS)
def test_a_stopped_run_does_not_go_on_with_other_models_or_data(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run does not go on with other models or data under the same names, as after `export
    --overwrite draft`.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("draft", "other", "photos"):
        Path(name).mkdir()
        Path(name, "config.json").write_text("{}")
    files = Path("rows.jsonl"), Path("draft/adapter_model.safetensors"), Path("photos/a.png")
    for file in files:
        file.write_bytes(bytes(1000))

    def run() -> Run:
        run = Run("tiny", {option: INPUTS[option]}, tmp_path / "out")
        run.restore()
        return run

    stopped = run()
    stopped.add([{"dataset": "a", "turn": 1, "row": "M"}])
    stopped.write(Table("A title", ["set"], []))
    Path("other/notes.txt~").write_text("unread")
    assert len(run().rows) == 1
    for file in files:
        file.write_bytes(bytes(999) + b"1" * (2 if option == "images" else 1))
    with pytest.raises(
        InputError, match=r"unfinished: .*, whose content is another now .*; give"
    ) as error:
        run()
    assert "\n" not in str(error.value)


DAMAGES = ["{", '{"run": {"options": {}}, "rows": [1]}', ("gamma", "gamna"), ("0.5", "0.7")]


@pytest.mark.parametrize("name", ["results.json", "records.jsonl"])
@pytest.mark.parametrize("damage", DAMAGES, ids=range(4))
def test_damaged_files_are_named(name: str, damage: str | tuple[str, str], tmp_path: Path) -> None:
    run = Run("tiny", {}, tmp_path / "out")
    rows = [{"set": "a", "row": "M", "gamma": 5, "share": 0.5, "more": None}]
    run.add(rows, [row | {"text": ""} for row in rows])
    run.write(Table("A title", ["set"], []))
    file = run.folder / name
    text = file.read_text().replace(*damage) if isinstance(damage, tuple) else damage
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=rf"{name}: cannot be read \(.*\); remove it"):
        Run("tiny", {}, tmp_path / "out").restore()


def test_a_run_in_which_something_failed_is_written_and_ends_with_1(tmp_path: Path) -> None:
    def measure() -> None:
        with Run("tiny", {}, tmp_path / "out") as run:
            run.add([{"row": "M"}], [], [{"row": "C", "error": "no room"}])
            run.write(Table("A title", ["row"], [["M"]]))

    with pytest.raises(SystemExit) as caught:
        measure()
    assert caught.value.code == 1
    assert '"error": "no room"' in (tmp_path / "out" / "results.json").read_text()


def test_a_run_that_measured_nothing_replaces_nothing(tmp_path: Path) -> None:
    def measure(*rows: dict[str, str]) -> None:
        with Run("tiny", {}, tmp_path / "out") as run:
            run.add(
                rows,
                [],
                [] if rows else [{"row": "C", "dataset": "a", "turn": 1, "error": "no room"}],
            )
            run.write(Table("A title", ["row"], []))

    measure({"row": "M"})
    with pytest.raises(
        InputError, match=r"nothing could be measured; C failed on a \(turn 1\): no room"
    ):
        measure()
    assert '"row": "M"' in (tmp_path / "out" / "results.json").read_text()


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        Run("tiny", {}, out),
        pytest.raises(InputError, match=r"out\.lock: held by process"),
        Run("tiny", {}, out),
    ):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_trial_replaces_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("runs/debug/eval/mini")
    run_into(out, {"gamma": 3}, "first", ("sweep.png",))
    run_into(out, {"gamma": 4}, "stopped", (), stop=True)
    with Run("mini", {"gamma": 5}, out) as run:
        assert list(run.folder.iterdir()) == []
        run.write(Table("A title", HEADER[:1], [["M"]]))
    assert not (out / "sweep.png").exists()
    assert '"gamma": 5' in (out / "results.json").read_text()


def test_results_of_other_options_are_not_replaced(tmp_path: Path) -> None:
    for stop in (True, False):  # what a run has left that was stopped, and a whole one
        run_into(tmp_path / "out", {"gamma": 3, "data": ("a=b",)}, "mine", (), stop)
        with pytest.raises(
            InputError,
            match=r"holds results of data \['a=b'\], but now it is .*; give another --out",
        ):
            begin(tmp_path / "out", {"gamma": 3, "data": ()})
        with pytest.raises(
            InputError, match=r"holds results of data \['a=b'\], but now it is None"
        ):
            begin(tmp_path / "out", {"gamma": 3})  # of a script without this option
    (tmp_path / "out" / "results.json").write_text("[]")
    with pytest.raises(InputError, match=r"results\.json: cannot be read \(.*\); remove it"):
        begin(tmp_path / "out", {"gamma": 3})
    with pytest.raises(InputError, match="is a file; give a directory"):
        begin(tmp_path / "out" / "results.json" / "deep", {})

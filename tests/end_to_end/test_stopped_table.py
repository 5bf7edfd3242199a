"""A table that is stopped goes on; a row that fails, or whose captioner cannot run, costs only
itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from eval import block_efficiency, draft_quality, mmspec
from eval.lib.drafts.config import EvalConfig, Variant
from jaxspec.decoding.speculative import Speculator
from jaxspec.engine.engine import Engine
from jaxspec.errors import InputError
from tests.end_to_end.conftest import Calls

pytestmark = pytest.mark.full

SETS = ("one", "two")
PLACE = ("dataset", "turn", "row")
MEASURED = (*PLACE, "samples", "tokens_per_pass", "acceptance_histogram", "token_identity_rate")


@pytest.fixture
def preset(tiny_preset: Callable[..., EvalConfig], tmp_path: Path) -> EvalConfig:
    Image.new("RGB", (28, 28), "red").save(tmp_path / "a.png")
    for name in SETS:
        row = {"id": name, "image": "a.png", "turns": [f"What is {name}?", "Why?"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "captions.jsonl").write_text('{"image": "a.png", "caption": "red"}\n')
    return tiny_preset(
        rows=(Variant("M", ("M",)), Variant("T", ("T",)), Variant("C", ("C",))),
        captioner=f"file:{tmp_path / 'captions.jsonl'}",
        sets=SETS,
        data=tuple(f"{name}={tmp_path / name}.jsonl" for name in SETS),
        **{"gamma": 2, "max_new_tokens": 4, "batch_size": 1, "prompt_buckets": (96,)},
    )


def measure(out: Path, *options: str) -> dict[str, Any]:
    block_efficiency.main(["tiny", "--out", str(out), *options])
    return results(out)


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def measured(found: dict[str, Any]) -> list[Any]:
    return [[row[field] for field in MEASURED] for row in found["rows"]]


def breaking(monkeypatch: pytest.MonkeyPatch, view: str, words: str, error: BaseException) -> None:
    """Make engines of the view raise the error at prompts that hold the words."""
    generate = Engine.generate

    def broken(self: Engine, requests: Any) -> Any:
        asked = " ".join(
            self.encoder.tokenizer.decode(request.prompt.tokens) for request in requests
        )
        if (
            self.config.views == (view,)
            and isinstance(self.assembly.program, Speculator)
            and words in asked
        ):
            raise error
        return generate(self, requests)

    monkeypatch.setattr(Engine, "generate", broken)


def test_a_stopped_table_goes_on_and_ends_as_one_that_was_not(
    preset: EvalConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    straight = measure(tmp_path / "straight")
    with monkeypatch.context() as patch:
        breaking(patch, "T", "two", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path / "out")
    assert {
        (row["dataset"], row["turn"]) for row in results(tmp_path / "out.unfinished")["rows"]
    } == {("one", 1), ("one", 2)}
    with pytest.raises(InputError, match="holds results of gamma 2, but now it is 3; give another"):
        measure(tmp_path / "out", "--gamma", "3")
    with monkeypatch.context() as patch:
        breaking(patch, "M", "one", AssertionError("measured again"))
        again = measure(tmp_path / "out", "--against", "T")
    assert (
        "| views | turn | over | tokens per pass | 95 % | more than T |"
        in (tmp_path / "out" / "table.md").read_text()
    )
    assert all(row["low"] <= row["tokens_per_pass"] <= row["high"] for row in again["rows"])
    assert measured(again) == measured(straight)
    assert {row["row"]: row["target_ms"] for row in again["rows"][:3]} == {
        row["row"]: row["target_ms"] for row in again["rows"][-3:]
    }  # passes are timed once a row, before the stop
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(again["rows"])
    prompts, whole = (
        (tmp_path / name / "prompts.jsonl").read_text().splitlines() for name in ("out", "straight")
    )
    assert prompts == whole
    assert len(set(prompts)) == len(prompts) > 0
    assert "6 rows are measured already" in capsys.readouterr().err


def test_a_table_that_is_stopped_in_its_first_part_keeps_its_answers(
    preset: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is stopped in its first part keeps each engine's answers of each run, and goes
    on only with the same options.
    """
    options = ("--sets", "one", "--turns", "1")
    straight = measure(tmp_path / "straight", *options)
    with monkeypatch.context() as patch:
        breaking(patch, "T", "one", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path / "out", *options)
    with pytest.raises(InputError, match="holds results of gamma 2, but now it is 3"):
        measure(tmp_path / "out", "--gamma", "3", *options)
    with monkeypatch.context() as patch:
        breaking(patch, "M", "one", AssertionError("asked again"))
        again = measure(tmp_path / "out", *options)
    assert measured(again) == measured(straight)
    names = ({file.name for file in (tmp_path / name).iterdir()} for name in ("out", "straight"))
    assert len({*map(frozenset, names)}) == 1


def conversations(preset: EvalConfig, folder: Path) -> EvalConfig:
    rows = [
        {"id": name, "turns": [f"What is {name}?"], "category": "x", "topic": name} for name in SETS
    ]
    (folder / "mmspec.jsonl").write_text(
        "".join(json.dumps(row | {"image": "a.png"}) + "\n" for row in rows)
    )
    return replace(preset, sets=("mmspec",), data=(f"mmspec={folder / 'mmspec.jsonl'}",))


@pytest.mark.parametrize("script", [draft_quality, mmspec])
def test_other_scripts_go_on_too(
    script: Any, preset: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    """A script that is stopped in its last call of an engine repeats that call and its preparations
    only.
    """
    config = conversations(preset, tmp_path) if script is mmspec else preset
    monkeypatch.setattr("eval.lib.drafts.command_line.load_preset", lambda kind, name: config)
    monkeypatch.setattr(mmspec, "PART", 1)

    def run(name: str) -> int:
        calls.count = 0
        script.main(["tiny", "--rows", "T", "--out", str(tmp_path / name)])
        return calls.count

    calls.last = run("straight")
    with pytest.raises(KeyboardInterrupt):
        run("out")
    calls.last = 0
    assert run("out") == 1
    clock = ("total_wall_time", "speedup_paired", "speedup_global")
    straight, again = (results(tmp_path / name)["rows"] for name in ("straight", "out"))
    assert [row | dict.fromkeys(clock) for row in again] == [
        row | dict.fromkeys(clock) for row in straight
    ]
    lines = [
        (tmp_path / name / "records.jsonl").read_text().count("\n") for name in ("straight", "out")
    ]
    assert lines[0] == lines[1] > 0


def test_a_failing_row_costs_only_itself(
    preset: EvalConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    straight = measure(tmp_path / "straight", "--turns", "1")
    breaking(monkeypatch, "T", "two", InputError("no room for it"))
    with pytest.raises(SystemExit) as caught:
        measure(tmp_path / "out", "--turns", "1")
    assert caught.value.code == 1
    found = results(tmp_path / "out")
    assert measured(found) == [row for row in measured(straight) if row[:3] != ["two", 1, "T"]]
    (failed,) = found["run"]["failed"]
    assert (failed["dataset"], failed["row"], failed["error"]) == ("two", "T", "no room for it")
    table = (tmp_path / "out" / "table.md").read_text()
    assert "\nT failed on two (turn 1): no room for it\n" in table
    (line,) = (line for line in table.splitlines() if line.startswith("| T |"))
    number = f"{found['rows'][1]['tokens_per_pass']:.2f}"
    assert line == f"| T | 1 | {number} | - | - | - | - | - | - |"


def test_drawn_answers_are_compared_with_none(preset: EvalConfig, tmp_path: Path) -> None:
    found = measure(
        tmp_path / "out", "--temperature", "1", "--rows", "M", "--sets", "one", "--turns", "1"
    )
    assert [row["token_identity_rate"] for row in found["rows"]] == [None]
    assert "identical" not in json.loads(
        (tmp_path / "out/records.jsonl").read_text().splitlines()[0]
    )
    assert (tmp_path / "out/table.md").read_text().splitlines()[4].endswith("| - |")

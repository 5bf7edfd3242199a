"""Answers are written anew chunk by chunk, the same after a stop and from any shard, and each the
engine's own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxspec.data.prepared import Prepared, prepare
from jaxspec.engine.engine import Engine, EngineConfig, Request
from jaxspec.errors import InputError
from jaxspec.training.regenerate import (
    Regeneration,
    losses,
    regenerate,
    regenerated,
)
from tests import tiny
from tests.tiny import Talk
from train.distill_data import Options, main

pytestmark = pytest.mark.full

# A quarter of all tokens end an answer, so that some do before the limit and some do not.
TEXT = replace(
    tiny.CONFIG.text_config, eos_token_id=tuple(range(5, 30)), max_position_embeddings=60
)
CONFIG = replace(tiny.CONFIG, text_config=TEXT)
WORK = Regeneration("tiny", "talk", samples=7, temperature=1.0, max_new_tokens=6, chunk=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny.loaded(tiny.random_params(CONFIG), CONFIG)
    config = EngineConfig(batch_size=4, prompt_buckets=(64,), image_buckets=(2,), new_buckets=(6,))
    return Engine(target, config=config)


def chunks(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*.jsonl"))]


@pytest.fixture(scope="module")
def straight(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    assert regenerate(engine, Talk(), WORK, folder) == 3
    return folder


def test_answers_are_the_engines(engine: Engine, straight: Path) -> None:
    rows = [json.loads(line) for text in chunks(straight) for line in text.splitlines()]
    assert [row["sample"] for row in rows] == list(range(7))
    for i, row in enumerate(rows):
        sample = Talk()[i]
        prompt = engine.encoder.prompt(sample.turns[0][0], sample.images)
        (first,) = engine.generate([Request(prompt, 6, 1.0, seed=64 * i)])
        ended = first.tokens[-1] in TEXT.eos_token_id and bool(first.text)  # type: ignore[operator]
        assert row["turns"][:1] == ([[sample.turns[0][0], first.text]] if ended else [])
        assert row["cut"] or row["refused"] or len(row["turns"]) == 2
    assert any(len(row["turns"]) == 2 for row in rows)
    assert any(row["cut"] for row in rows)


def test_a_stopped_run_and_shards_give_the_same(
    engine: Engine, straight: Path, tmp_path: Path
) -> None:
    assert regenerate(engine, Talk(), WORK, tmp_path, (1, 2)) == 1
    kept = (tmp_path / "000001.jsonl").stat().st_mtime_ns
    (tmp_path / ".000002.jsonl.123.tmp").write_text("half of a ch")  # of a run that was killed
    assert regenerate(engine, Talk(), WORK, tmp_path) == 3
    assert (tmp_path / "000001.jsonl").stat().st_mtime_ns == kept
    assert chunks(tmp_path) == chunks(straight)
    for place in ("here", "there"):  # a target that was moved
        moved = replace(WORK, target=f"{place}/tiny, fingerprint 1")
        assert regenerate(engine, Talk(), moved, tmp_path / "moved", (3, 4)) == 0
    for change, told in (
        ({"temperature": 0.0}, "temperature 1.0, but now it is 0.0"),
        ({"data": "x"}, "data 'talk'"),
    ):
        with pytest.raises(InputError, match=told):
            regenerate(engine, Talk(), replace(WORK, **change), tmp_path)


def test_the_beginnings_of_long_answers_are_kept_if_asked(straight: Path) -> None:
    rows = [json.loads(line) for text in chunks(straight) for line in text.splitlines()]
    begun = {
        row["id"]: row["turns"] + [row["cut"]]
        for row in rows
        if row["cut"] and row["cut"][1].strip()
    }
    kept = {sample.id: sample for sample in regenerated(Talk(), WORK, straight, keep_cut=True)}
    assert begun
    for identity, turns in begun.items():
        assert kept[identity].turns == tuple(map(tuple, turns))
        assert len(kept[identity].images) == sum(asked.count("<image>") for asked, _ in turns)
    whole = {sample.id: sample.turns for sample in regenerated(Talk(), WORK, straight)}
    assert all(kept[i].turns[: len(turns)] == turns for i, turns in whole.items())


def options(path: Path, **changes: Any) -> Options:
    """Write a target and questions, and return what asks it the questions."""
    tiny.save(path / "target", CONFIG, tiny.random_params(CONFIG))
    prepare("talk", path, [Talk()[i] for i in range(7)])
    asked = Options(
        str(path / "target"),
        str(path / "talk"),
        "talk_t1",
        temperature=1.0,
        max_new_tokens=6,
        batch_size=4,
        prompt_buckets=(64,),
        image_buckets=(2,),
        chunk=3,
        out=path,
    )
    return replace(asked, **changes)


def test_the_command_prepares_when_all_shards_are_there(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = options(tmp_path, shard="0/2")
    assert main(first) is None
    assert capsys.readouterr().out == (
        "2 of 3 chunks are there; when all are, run shard 0 again to prepare talk_t1\n"
    )
    assert main(replace(first, shard="1/2")) is None
    folder = main(first)
    assert folder is not None
    assert chunks(tmp_path / "talk_t1.answers") == chunks(straight)
    source = Prepared(folder)
    assert source.metadata["temperature"] == 1.0
    assert [source[i].turns for i in range(len(source))] == [
        s.turns for s in regenerated(Talk(), WORK, straight)
    ]
    capsys.readouterr()
    assert main(first) == folder
    assert capsys.readouterr().out == f"{folder} holds these answers already\n"
    line = "prepared without --keep-cut; go on with that, or remove it"
    with pytest.raises(InputError, match=line):
        main(replace(first, keep_cut=True))
    # before anything is answered
    for name, told in (("talk", "holds other data"), ("Talk", "lower-case words")):
        with pytest.raises(InputError, match=told):
            main(replace(first, name=name))
    shutil.rmtree(tmp_path / "talk")
    prepare("talk", tmp_path, [Talk()[i + 1] for i in range(7)])
    with pytest.raises(
        InputError,
        match=r"holds answers of data '.*/talk, fingerprint \w+', but now it is '.*/talk, ",
    ):
        main(first)


def test_what_the_target_cannot_be_asked_is_told(engine: Engine, tmp_path: Path) -> None:
    class Long(Talk):
        def __getitem__(self, i: int):
            sample = super().__getitem__(i)
            return (
                replace(sample, turns=((sample.turns[0][0] + " please" * 9 * i, ""),))
                if i
                else sample
            )

    regenerate(engine, Long(), replace(WORK, samples=2), tmp_path)
    rows = [json.loads(line) for line in chunks(tmp_path)[0].splitlines()]
    assert rows[0]["refused"] is None
    assert "over the" in rows[1]["refused"]
    counts, summary = losses(replace(WORK, samples=2), tmp_path)
    assert counts == {"refused": 1, "cut": 1}
    assert summary.startswith("1 were refused and 1 cut at ")
    assert f"such as: {rows[1]['refused']} ({tmp_path} has all)" in summary


def test_a_temperature_that_no_request_has_is_refused_before_any_answer() -> None:
    """A temperature that no request has is refused before any answer; otherwise every conversation
    would be refused, and the folder would hold that.
    """
    with pytest.raises(InputError, match=r"temperature: -1\.0; give a number from 0"):
        replace(WORK, temperature=-1.0)


def test_an_empty_answer_is_not_counted_as_cut(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that ends at once is not counted as cut at the limit; the line says what it is."""
    generate = engine.generate

    def silent(requests: list[Request]) -> list[Any]:
        return [replace(result, text="", tokens=(5,)) for result in generate(requests)]

    monkeypatch.setattr(engine, "generate", silent)
    regenerate(engine, Talk(), WORK, tmp_path)
    counts, summary = losses(WORK, tmp_path)
    assert counts == {"refused": 7, "cut": 0}
    assert f"such as: sample {Talk()[0].id}: the answer is empty" in summary

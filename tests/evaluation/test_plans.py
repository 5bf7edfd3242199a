"""The table of `auto` and each of its plans says what is hindsight, and what share of it `auto`
reaches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from configs.eval.mini import config
from eval.plans import COLD, PLAIN, WARM, rows_of, tables
from jaxspec.errors import InputError

MS = {
    PLAIN: (100, 100),
    "lookup 7": (50, 200),
    "draft 5": (80, 80),
    WARM: (80, 100),
    COLD: (100, 100),
}
"""Milliseconds of the loop of each engine, by question."""


def test_hindsight_is_the_best_plan_of_each_set_or_of_each_request() -> None:
    records: list[dict[str, Any]] = [
        {"row": row, "sample": sample, "identical": True, "emitted": 10, "steps": 5}
        | {"decode_ms": ms + slow, "call_ms": ms + slow + 100}
        for slow in (0, 90, 0)  # of three runs the median counts
        for row, times in MS.items()
        for sample, ms in enumerate(times)
    ]
    ended = {"sample": 2, "emitted": 0, "steps": 0, "decode_ms": 0.0}  # at its first token
    records += [record | ended for record in records if record["sample"] == 0]
    rows = rows_of(records, {"dataset": "describe", "turn": 1}, config)
    (table,) = tables(config, rows)
    cells = {line[0]: line[1:] for line in table.cells}
    assert cells["lookup 7"][0].startswith("0.80")
    assert cells["hindsight: best a set"][0] == "1.25"  # draft 5
    assert cells["hindsight: best a request"][0] == "1.54"  # lookup 7, then draft 5
    first, second = (line for line in table.cells if line[0] == f"{WARM}: share of it")
    assert (first[1], second[1]) == ("89%", "72%")
    assert cells[WARM][2:] == ["1.11", "1.05", "100.0%"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampled_answer_is_compared_with_plain_decoding_of_as_many_tokens(
    temperature: float,
) -> None:
    records: list[dict[str, Any]] = [
        {"row": row, "sample": 0, "identical": row == PLAIN, "emitted": tokens, "steps": tokens}
        | {"decode_ms": ms, "call_ms": ms}
        for row, tokens, ms in ((PLAIN, 10, 100), (WARM, 20, 100))
    ]
    settings = replace(config, temperature=temperature)
    rows = rows_of(records, {"dataset": "describe", "turn": 1}, settings)
    assert [row["speedup_measured"] for row in rows] == [1, 2]
    assert rows[1]["identical"] == (None if temperature else 0.0)


def test_each_kind_of_second_turn_has_a_column() -> None:
    """Each kind of second turn has a column, as every row of the table must have one cell for each
    name in the header.
    """
    record = {"sample": 0, "identical": True, "emitted": 10, "steps": 5}
    records = [
        record | {"row": row, "decode_ms": ms, "call_ms": ms}
        for row, ms in ((PLAIN, 100), ("lookup 7", 50), (COLD, 80), (WARM, 60))
    ]
    parts: list[dict[str, Any]] = [{"dataset": "read", "turn": 1}]
    parts += [{"dataset": "read", "turn": 2, "follow_up": kind} for kind in ("summary", "story")]
    rows = [row for part in parts for row in rows_of(records, part, config)]
    (table,) = tables(config, rows)
    assert table.header[1:4] == ["read, turn 1", "read, turn 2, summary", "read, turn 2, story"]
    assert {len(line) for line in table.cells} == {len(table.header)}


def test_answers_without_a_loop_have_no_speed() -> None:
    record = {"row": PLAIN, "sample": 0, "identical": True, "emitted": 0, "steps": 0}
    records = [record | {"row": row, "decode_ms": 0.0, "call_ms": 9.0} for row in (PLAIN, WARM)]
    with pytest.raises(InputError, match="set describe: each answer ends at its first token"):
        rows_of(records, {"dataset": "describe", "turn": 1}, config)

"""What tables say of their rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from configs.eval.llava15 import config as LLAVA15
from configs.eval.llava15_trees import config as TREES
from configs.eval.mini import config as MINI
from eval.block_efficiency import averaged, block_efficiency_table
from jaxspec.decoding.weighting import PRESETS, Grid, InverseErrorPower, parse_weighting
from jaxspec.evaluation.config import EvalConfig
from jaxspec.evaluation.report import Record, Table


def made_up(config: EvalConfig) -> list[Record]:
    return [
        {"dataset": name, "turn": turn, "row": row.name, "samples": samples, "device": "cpu"}
        | {"mean_acceptance_length": 2.0, "token_identity_rate": 1.0}
        for name, samples in zip(config.sets, (3, *[7] * len(config.sets)))
        for turn in config.turns
        for row in config.rows
    ]


def table(config: EvalConfig) -> Table:
    return block_efficiency_table(config, made_up(config))


def test_notes_tell_the_rules_and_the_samples() -> None:
    *_, notes = table(MINI)
    assert notes[0].startswith("target mini/target, draft mini/draft. 3 to 7 samples a set")
    assert notes[-1] == "Weights: MT* by mt-paper, MTCP* by mtcp-paper."


def test_notes_tell_the_time_of_captions_and_what_was_left_out() -> None:
    config = replace(MINI, rows=MINI.rows[:3], left_out={"MTCP static": "no torch", "MTCP*": "no torch"})
    rows = made_up(config)
    for row in rows:
        row |= {"caption_ms_per_image": 12.34} if row["row"] == "C" else {}
    *_, notes = block_efficiency_table(config, rows)
    assert "Captions: 12.3 ms an image, made once for all rows; not in the speed-ups." in notes
    assert notes[-1] == "Left out: MTCP static, MTCP*: no torch."


def test_the_rules_are_those_of_the_released_code() -> None:
    """Its scripts run MT* and MTCP* alike with a grid; inverse KL is another of their rules."""
    assert PRESETS["mt-release"] == Grid(measure="matches_kl")
    assert PRESETS["mtcp-release"] == InverseErrorPower(measure="kl")
    learned = {row.name: row for row in LLAVA15.rows if row.name.endswith("*")}
    assert list(learned) == ["MT*", "MTCP*"]
    for row in learned.values():
        assert parse_weighting(row.weighting) == Grid(measure="matches_kl")
    *_, notes = table(LLAVA15)
    assert notes[-1] == "Weights: MT random by random, MT* by mt-release, MTCP* by mt-release."


@pytest.mark.parametrize(
    "config", [LLAVA15, replace(LLAVA15, gamma=3), replace(LLAVA15, gamma=7), TREES], ids=["5", "3", "7", "trees"]
)
def test_the_paper_s_own_numbers_give_the_paper_s_lines(config: EvalConfig) -> None:
    """Measure what the paper measured of every set: the line above the paper's is the same, averages too.

    Those of PororoSV and VIST to a hundredth: the paper has them from numbers that it does not print in full. Of random
    weights it prints means alone.
    """
    (paper,) = (one for one in config.published if one.is_of(config))
    rows = [
        row | {"mean_acceptance_length": printed[row["dataset"]]}
        for row in made_up(config)
        if row["dataset"] in (printed := paper.numbers.get(row["turn"], {}).get(row["row"], {}))
    ]
    # Second turns are printed of the seven sets alone.
    lines = block_efficiency_table(config, rows)
    _, _, *columns, _, _, _ = lines.header
    assert columns == [*config.sets, "avg", "OOD"]
    compared = 0
    for ours, theirs in pairwise(lines.cells):
        if theirs[0] != f"{ours[0]}, paper" or ours[0] == "MT random":
            continue
        for column, mine, printed in zip(columns, ours[2:], theirs[2:]):
            if printed != "-":
                assert float(mine) == pytest.approx(float(printed), abs=0.0101 if column == "OOD" else 1e-6), column
                compared += 1
    printed = [numbers for turn in paper.numbers.values() for row, numbers in turn.items() if row != "MT random"]
    assert compared == sum(map(len, printed))
    assert f"paper: {paper.source}." in lines.notes


@pytest.mark.parametrize(
    "other",
    [
        {"target": "llava-hf/llava-1.5-13b-hf"},
        {"draft": "my-draft"},
        {"gamma": 4},
        {"dtype": "bfloat16"},
        {"temperature": 1.0},
        {"max_new_tokens": 64},
        {"sets": LLAVA15.sets[:3]},
        {"follow_ups": ("fact",)},
    ],
    ids=str,
)
def test_the_paper_s_numbers_are_not_shown_beside_other_settings(other: dict[str, Any]) -> None:
    def shows(config: EvalConfig) -> bool:
        found = table(config)
        return "paper" in " ".join([*(line[0] for line in found.cells), *found.notes])

    assert shows(LLAVA15)
    assert shows(replace(LLAVA15, sets=LLAVA15.sets[::-1]))
    assert not shows(replace(LLAVA15, **other))


def test_means_are_over_the_sets_of_their_group() -> None:
    def columns(*sets: str) -> dict[str, list[str]]:
        return averaged(replace(LLAVA15, sets=sets, data=("mine=x.jsonl",)), sets)

    assert columns("pope", "vist", "docvqa") == {"avg": ["pope", "docvqa"], "OOD": ["vist"]}
    assert columns("pope", "docvqa") == {"avg": ["pope", "docvqa"]}
    assert columns("pope", "mine") == {"avg": ["pope", "mine"]}

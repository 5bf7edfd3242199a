"""What tables say of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from configs.eval.llava15 import config as LLAVA15
from configs.published import ibed, tabed_next
from eval.block_efficiency import averaged, block_efficiency_table
from eval.lib.config import EvalConfig
from eval.lib.tables import Record, Table
from jaxspec.command import load_preset, preset_names
from jaxspec.decoding.weighting import PRESETS, Grid, InverseErrorPower, parse_weighting
from jaxspec.errors import InputError


def made_up(config: EvalConfig) -> list[Record]:
    return [
        {"dataset": name, "turn": turn, "row": row.name, "samples": samples, "device": "cpu"}
        | {"tokens_per_pass": 2.0, "token_identity_rate": 1.0}
        for name, samples in zip(config.sets, (3, *[7] * len(config.sets)))
        for turn in config.turns
        for row in config.rows
    ]


def table(config: EvalConfig) -> Table:
    return block_efficiency_table(config, made_up(config))


def test_the_rules_are_of_the_paper_s_kinds_in_the_released_code_s_form() -> None:
    """Its scripts run MT* and MTCP* alike with a grid, with inverse KL and with inverse L1."""
    assert PRESETS["mt-release"] == Grid(measure="matches_kl")
    assert PRESETS["mtcp-release"] == InverseErrorPower(measure="kl")
    learned = {row.name: parse_weighting(row.weighting) for row in LLAVA15.rows if row.name.endswith("*")}
    assert learned == {"MT*": Grid(measure="matches_kl"), "MTCP*": InverseErrorPower(measure="kl")}
    *_, notes = table(LLAVA15)
    assert "Weights: MT random by random, MT* by mt-release, MTCP* by mtcp-release." in notes


def presets() -> Iterator[tuple[str, EvalConfig]]:
    """Every preset that shows a paper's numbers, as it is and with the options that show others; not AASD's, whose
    numbers stand in the table of `eval.kv_head`."""
    options: dict[str, tuple[dict[str, Any], ...]] = {
        "llava15": ({"gamma": 3}, {"gamma": 7}),
        "llava_next_base": (
            {"draft": ("mjbooo/lvlm160m-bf16",), "dtype": "bfloat16"},
            {"draft": ("mjbooo/lvlm68m-ov",)},
            {"target": tabed_next.LARGE},
        ),
        "ibed": (
            *({"captioner": f"blip:Salesforce/{name}"} for name in ("blip-image-captioning-base", "blip2-opt-2.7b")),
            {"captioner": ibed.LONG},
            {"draft": ("JackFram/llama-68m",)},
        ),
        "ibed_weights": ({"captioner": ibed.LONG},),
    }
    for name in preset_names("eval"):
        config = load_preset("eval", name)
        if isinstance(config, EvalConfig) and config.published and len(config.draft) == 1:
            for other in ({}, *options.pop(name, ())):
                yield " ".join([name, *map(str, other.values())]), replace(config, **other)
                for kind in ("fact", "sum") if 2 in config.turns and "gamma" not in other else ():
                    some = other | {"turns": (2,), "follow_ups": (kind,)}
                    yield " ".join([name, *map(str, other.values()), kind]), replace(config, **some)
    assert not options


PRESETS_OF_PAPERS = dict(presets())


@pytest.mark.parametrize("config", PRESETS_OF_PAPERS.values(), ids=PRESETS_OF_PAPERS)
def test_the_paper_s_own_numbers_give_the_paper_s_lines(config: EvalConfig) -> None:
    """Measure what the paper measured of every set: the line above the paper's is the same, averages too.

    Averages are the paper's to half of its last digit. Where theirs is a half of that digit, it may be rounded either
    way: TABED makes 1.175 to 1.18, and IbED to 1.17.
    """
    papers = [one for one in config.published if one.is_of(config) and set(one.numbers) & set(config.turns)]
    told = {
        (turn, row): (printed, paper)
        for paper in papers
        for turn, rows in paper.numbers.items()
        for row, printed in rows.items()
    }
    assert papers
    rows = [
        row | {"tokens_per_pass": printed[row["dataset"]]}
        for row in made_up(config)
        if row["dataset"] in (printed := told.get((row["turn"], row["row"]), ({},))[0])
    ]
    lines = block_efficiency_table(config, rows)
    _, _, *columns, _, _, _ = lines.header
    compared = set()
    for ours, theirs in pairwise(lines.cells):
        if theirs[0] != f"{ours[0]}, paper":
            continue
        printed, paper = told[int(ours[1]), ours[0]]
        for column, mine, paper_s in zip(columns, ours[2:], theirs[2:], strict=False):
            assert paper_s == (f"{printed[column]:.2f}" if column in printed else "-")
            if paper_s != "-" and mine != "-":
                group = config.averages.get(column, (column,))
                exact = sum((Decimal(str(printed[name])) for name in group), Decimal(0)) / len(group)
                assert abs(exact - Decimal(paper_s)) <= Decimal("0.005"), (paper.source, ours[0], column)
                assert abs(Decimal(mine) - exact) <= Decimal("0.005")
                compared.add((paper.source, ours[0], column))
    full = {
        (paper.source, row, column)
        for (_, row), (printed, paper) in told.items()
        if row in {one.name for one in config.rows} and set(printed) & set(config.sets)
        for column in printed
    }
    assert compared == full
    assert {f"paper: {paper.source}." for paper in papers} <= set(lines.notes)


def test_every_number_of_a_paper_is_of_a_row() -> None:
    """A preset has a line for each of a paper's rows, and a set or a mean for each of its columns."""
    shown = {
        (id(paper), turn, row.name): {*config.sets, *config.averages}
        for config in PRESETS_OF_PAPERS.values()
        for paper in config.published
        if paper.is_of(config)
        for turn in config.turns
        for row in config.rows
    }
    for config in PRESETS_OF_PAPERS.values():
        for paper in config.published:
            for turn, rows in paper.numbers.items():
                for row, printed in rows.items():
                    assert set(printed) <= shown[id(paper), turn, row], (paper.source, row)


@pytest.mark.parametrize(
    "other",
    [
        {"target": "llava-hf/llava-1.5-13b-hf"},
        {"draft": ("my-draft",)},
        {"gamma": 4},
        {"sets": LLAVA15.sets[:3]},
        {"captioner": "blip:Salesforce/blip-image-captioning-base"},
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


def test_second_turns_are_the_mean_over_what_follows() -> None:
    config = replace(LLAVA15, rows=LLAVA15.rows[:2], sets=("pope", "docvqa", "vist"), published=())
    asked = [(place["dataset"], place["turn"], place.get("follow_up")) for place in config.parts()]
    kinds = ("question", "caption", "summary", "story")
    seconds = [(name, 2, kind) for name in ("pope", "docvqa") for kind in kinds]
    assert sorted(asked, key=str) == sorted([*seconds, *((name, 1, None) for name in config.sets)], key=str)
    rows = [
        row
        | {
            "dataset": name,
            "turn": turn,
            "follow_up": kind,
            "tokens_per_pass": 1.0 + kinds.index(kind or "question"),
        }
        for name, turn, kind in asked
        for row in made_up(replace(config, sets=("pope",), turns=(1,)))
    ]
    lines = {(name, turn): cells for name, turn, *cells in block_efficiency_table(config, rows).cells}
    assert lines["M", "1"][:5] == ["1.00"] * 5
    assert lines["M", "2"][:5] == ["2.50", "2.50", "-", "2.50", "-"]
    lost = {"dataset": "pope", "turn": 2, "row": "M", "follow_up": "story", "error": "no room", "device": "cpu"}
    kept = [row for row in rows if not lost.items() - {"error": "no room"}.items() <= row.items()]
    (line,) = (one for one in block_efficiency_table(config, kept, [lost]).cells if one[:2] == ["M", "2"])
    assert line[2:7] == ["-", "2.50", "-", "-", "-"]


def test_turns_that_no_set_has_are_refused() -> None:
    with pytest.raises(InputError, match="turns: only the first turn of vist is asked"):
        replace(LLAVA15, sets=("vist",), turns=(2,))

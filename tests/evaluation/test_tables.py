"""Tables say of their rows what was measured, and show the papers' numbers next to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest

from configs.eval.llava15 import config as LLAVA15
from configs.published import ibed, tabed_next
from eval.block_efficiency import averaged, block_efficiency_table
from eval.collaborative import methods_table
from eval.draft_quality import quality_table
from eval.kv_head import draft_table
from eval.lib.drafts.config import EvalConfig
from eval.lib.drafts.published import Published
from eval.lib.output.tables import Record, Table
from eval.lib.questions.quality import METRICS
from jaxspec.command import load_preset, preset_names
from jaxspec.decoding.drafting.rules import PRESETS, Grid, InverseErrorPower, parse_weighting
from jaxspec.errors import InputError
from tests.evaluation.test_collaborative_table import row_of


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
    """The learned rules are of the paper's kinds in the form of its released code, which runs MT*
    and MTCP* alike with a grid, with inverse KL and with inverse L1.
    """
    assert PRESETS["mt-release"] == Grid(measure="matches_kl")
    assert PRESETS["mtcp-release"] == InverseErrorPower(measure="kl")
    learned = {
        row.name: parse_weighting(row.weighting) for row in LLAVA15.rows if row.name.endswith("*")
    }
    assert learned == {"MT*": Grid(measure="matches_kl"), "MTCP*": InverseErrorPower(measure="kl")}
    *_, notes = table(LLAVA15)
    assert "Weights: MT random by random, MT* by mt-release, MTCP* by mtcp-release." in notes


def presets() -> Iterator[tuple[str, EvalConfig]]:
    """Yield every preset that shows a paper's numbers, as it is and with the options that show
    others; not AASD's, whose numbers stand in the table of `eval.kv_head`.
    """
    options: dict[str, tuple[dict[str, Any], ...]] = {
        "llava15": ({"gamma": 3}, {"gamma": 7}),
        "llava_next_base": (
            {"draft": ("mjbooo/lvlm160m-bf16",), "dtype": "bfloat16"},
            {"draft": ("mjbooo/lvlm68m-ov",)},
            {"target": tabed_next.LARGE},
        ),
        "ibed": (
            *(
                {"captioner": f"blip:Salesforce/{name}"}
                for name in ("blip-image-captioning-base", "blip2-opt-2.7b")
            ),
            {"captioner": ibed.LONG},
            {"draft": ("JackFram/llama-68m",)},
            *(
                {"draft": (f"runs/train/{name}/hf",)}
                for name in ("text_68m", *(f"pooled_{n}" for n in ibed.POOLED))
            ),
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
    """Measuring what the paper measured of every set gives the paper's line, averages too.

    Averages are the paper's to half of its last digit. Where theirs is a half of that digit, it may
    be rounded either way: TABED makes 1.175 to 1.18, and IbED to 1.17.
    """
    papers = [
        one
        for one in config.published
        if one.is_of(config) and set(one.numbers) & set(config.turns)
    ]
    assert papers
    for suffix in {paper.suffix for paper in papers}:
        check_lines(config, [paper for paper in papers if paper.suffix == suffix])


def check_lines(config: EvalConfig, papers: list[Published]) -> None:
    told = {
        (turn, row): (printed, paper)
        for paper in papers
        for turn, rows in paper.numbers.items()
        for row, printed in rows.items()
    }
    rows = [
        row | {"tokens_per_pass": printed[row["dataset"]]}
        for row in made_up(config)
        if row["dataset"] in (printed := told.get((row["turn"], row["row"]), ({},))[0])
    ]
    lines = block_efficiency_table(replace(config, published=tuple(papers)), rows)
    _, _, *columns, _, _, _ = lines.header
    compared = set()
    for ours, theirs in pairwise(lines.cells):
        if theirs[0] != f"{ours[0]}, {papers[0].suffix}":
            continue
        printed, paper = told[int(ours[1]), ours[0]]
        for column, mine, paper_s in zip(columns, ours[2:], theirs[2:], strict=False):
            assert paper_s == (f"{printed[column]:.2f}" if column in printed else "-")
            if paper_s != "-" and mine != "-":
                group = config.averages.get(column, (column,))
                exact = sum((Decimal(str(printed[name])) for name in group), Decimal(0)) / len(
                    group
                )
                assert abs(exact - Decimal(paper_s)) <= Decimal("0.005"), (
                    paper.source,
                    ours[0],
                    column,
                )
                assert abs(Decimal(mine) - exact) <= Decimal("0.005")
                compared.add((paper.source, ours[0], column))
    full = {
        (paper.source, row, column)
        for (_, row), (printed, paper) in told.items()
        if row in {one.name for one in config.rows} and set(printed) & set(config.sets)
        for column in printed
    }
    assert compared == full
    assert {f"paper: {source}." for source, _, _ in full} <= set(lines.notes)


def test_every_number_of_a_paper_is_of_a_row() -> None:
    """A preset has a line for each of a paper's rows, and a set or a mean for each of its
    columns.
    """
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


def of_papers(table: Table) -> set[tuple[str, ...]]:
    """Return the labels of the papers' lines, and their notes."""
    lines = {
        tuple(cells[:3]) for cells in table.cells if any("paper" in cell for cell in cells[:3])
    }
    return lines | {(note,) for note in table.notes if note.startswith("paper: ")}


def aasd_table(config: EvalConfig, **directories: str) -> Table:
    drafts = ("FT-LLaVA", "KV head", *directories)
    rows = [
        {"dataset": name, "row": draft, "gamma": gamma, "samples": 4, "device": "cpu"}
        | {"token_identity_rate": 1.0}
        for name in config.sets
        for draft in drafts
        for gamma in (3, 5)
    ]
    return draft_table(config, rows, (), directories)


def scores_table(config: EvalConfig, **directories: str) -> Table:
    models = ("target", "draft", "draft, text-only", *directories)
    rows = [
        {"dataset": name, "model": model, "samples": 4}
        | dict.fromkeys(("accuracy", "rouge_l", "meteor"), 0.1)
        | {f"{metric}_interval": (0.0, 0.2) for metric in ("accuracy", "rouge_l", "meteor")}
        for name in config.sets
        for model in models
    ]
    return quality_table(config, rows, directories)


AASD, COS = load_preset("eval", "aasd_7b"), load_preset("eval", "cos")
OCR = replace(LLAVA15, sets=("ocrbench",), limit=1000)
TABLES: dict[str, tuple[Callable[[Any], Table], Any]] = {
    "llava15": (table, LLAVA15),
    "ibed_weights": (table, load_preset("eval", "ibed_weights")),
    "pooled": (table, replace(load_preset("eval", "ibed"), draft=("runs/train/pooled_36/hf",))),
    "aasd": (aasd_table, AASD),
    "scores": (scores_table, OCR),
    "cos": (lambda config: methods_table(config, [row_of("Qwen 3B", "gsm8k", "CoS")]), COS),
}
EVERYWHERE: tuple[dict[str, Any], ...] = (
    {"target": "llava-hf/llava-1.5-13b-hf"},
    {"target_weights": "int8"},
    {"adapter": "lora"},
    {"draft": ("my-draft",)},
    {"draft": ("my-draft", "runs/train/kv_llava15_7b_paper/hf")},
    {"draft": ("runs/train/ft_llava/hf", "my-head")},
    {"dtype": "float32"},
    {"temperature": 1.0},
    {"max_new_tokens": 16},
    {"limit": 3},
    {"width": 8},
)
OTHERS = {
    "llava15": (
        *EVERYWHERE,
        {"gamma": 4},
        {"sets": LLAVA15.sets[:3]},
        {"captioner": "blip:Salesforce/blip-image-captioning-base"},
        {
            "rows": tuple(
                replace(row, weights=tuple(range(1, 1 + len(row.views)))) for row in LLAVA15.rows
            )
        },
        {"rows": tuple(replace(row, weighting="hard_match") for row in LLAVA15.rows)},
        {"rows": tuple(replace(row, tree="2") for row in LLAVA15.rows)},
    ),
    "ibed_weights": (
        {
            "rows": tuple(
                replace(row, weights=None) for row in load_preset("eval", "ibed_weights").rows
            )
        },
    ),
    "pooled": ({"draft": ("runs/train/pooled_37/hf",)},),
    "aasd": (*EVERYWHERE, {"sets": ("coco", "scienceqa")}),
    "scores": tuple(other for other in EVERYWHERE if len(other.get("draft", ("",))) == 1),
    "cos": (
        {"dtype": "float32"},
        {"limit": 3},
        {"max_new_tokens": 16},
        {"shots": ()},
        *(
            {"pairings": tuple(replace(one, **other) for one in COS.pairings)}
            for other in (
                {"models": ("a", "b")},
                {"temperature": 0.5},
                {"combination": "weighted:0.9,0.1"},
                {"gammas": (2, 1)},
            )
        ),
        {
            "pairings": tuple(
                replace(one, chat_template=not one.chat_template) for one in COS.pairings
            )
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "other"),
    [(name, other) for name in OTHERS for other in OTHERS[name]],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_paper_s_numbers_need_all_its_settings(name: str, other: dict[str, Any]) -> None:
    made, config = TABLES[name]
    assert of_papers(made(config))
    assert not of_papers(made(replace(config, **other)))


def test_the_order_of_sets_is_free_and_copies_are_named() -> None:
    turned, own = (
        of_papers(table(replace(LLAVA15, sets=LLAVA15.sets[::step]))) for step in (-1, 1)
    )
    assert {line[:2] for line in turned} == {line[:2] for line in own}
    notes = table(replace(LLAVA15, data=("pope=x.jsonl",))).notes
    assert "Taken for the paper's sets: read from pope=x.jsonl." in notes


def test_models_may_have_any_revision() -> None:
    pinned = {"target": f"{LLAVA15.target}@a272c74", "draft": (f"{LLAVA15.draft[0]}@main",)}
    assert of_papers(table(replace(LLAVA15, **pinned))) == of_papers(table(LLAVA15))
    assert not of_papers(table(replace(LLAVA15, target="llava-hf/llava-1.5-13b-hf@a272c74")))


def test_models_that_rows_bring_along_are_the_recipes_own() -> None:
    own = {
        "- projector": "runs/train/kv_llava15_7b_paper_noprojector/hf",
        "FT-LLaMA": "runs/train/ft_llama/hf",
    }
    lines = {("avg", f"{name}, paper") for name in ("KV head", "FT-LLaVA", *own)}
    assert {line[:2] for line in of_papers(aasd_table(AASD, **own)) if len(line) > 1} == lines
    strange = dict.fromkeys(own, "other/hf")
    assert {line[:2] for line in of_papers(aasd_table(AASD, **strange)) if len(line) > 1} == {
        ("avg", "KV head, paper"),
        ("avg", "FT-LLaVA, paper"),
    }
    pooled = {"pool (36, ft)": "runs/train/pooled_36/hf:P36"}
    assert ["pool (36, ft), paper", "accuracy", "2.5"] in scores_table(OCR, **pooled).cells
    other = scores_table(OCR, **{"pool (36, ft)": "runs/train/pooled_36/hf:P9"})
    assert not any(line[0].startswith("pool (36, ft), paper") for line in other.cells)


def test_programs_that_did_not_run_are_left_out_with_a_note() -> None:
    row = {"dataset": "humaneval", "model": "target", "samples": 4} | dict.fromkeys(METRICS)
    note = "pass@1 is left out: only --run-code runs the programs."
    config = replace(LLAVA15, sets=("humaneval",))
    assert note in quality_table(config, [row]).notes
    judged = row | {"pass@1": 0.5, "pass@1_interval": (0.0, 1.0)}
    assert note not in quality_table(config, [judged]).notes


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
    assert sorted(asked, key=str) == sorted(
        [*seconds, *((name, 1, None) for name in config.sets)], key=str
    )
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
    lines = {
        (name, turn): cells for name, turn, *cells in block_efficiency_table(config, rows).cells
    }
    assert lines["M", "1"][:5] == ["1.00"] * 5
    assert lines["M", "2"][:5] == ["2.50", "2.50", "-", "2.50", "-"]
    lost = {
        "dataset": "pope",
        "turn": 2,
        "row": "M",
        "follow_up": "story",
        "error": "no room",
        "device": "cpu",
    }
    kept = [row for row in rows if not lost.items() - {"error": "no room"}.items() <= row.items()]
    (line,) = (
        one for one in block_efficiency_table(config, kept, [lost]).cells if one[:2] == ["M", "2"]
    )
    assert line[2:7] == ["-", "2.50", "-", "-", "-"]


def test_a_table_of_speed_has_decoding_and_whole_calls() -> None:
    """A table of speed has decoding and whole calls, as means over sets; results of before whole
    calls were timed show a dash.
    """
    config = replace(LLAVA15, turns=(1,), averages={})
    speeds = {"speedup_measured": 2.0, "speedup_predicted_with_verify": 2.1, "speedup_call": 1.25}
    for lost, cells in (set(), ["2.00", "1.25", "2.10"]), ({"speedup_call"}, ["2.00", "-", "2.10"]):
        speed = {name: value for name, value in speeds.items() if name not in lost}
        shown = block_efficiency_table(config, [row | speed for row in made_up(config)])
        start = shown.header.index("speed-up")
        assert shown.header[start : start + 3] == ["speed-up", "whole calls", "predicted"]
        assert shown.cells[0][start : start + 3] == cells


def test_turns_that_no_set_has_are_refused() -> None:
    with pytest.raises(InputError, match="turns: only the first turn of vist is asked"):
        replace(LLAVA15, sets=("vist",), turns=(2,))

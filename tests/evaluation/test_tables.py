"""What tables say of their rows."""

from __future__ import annotations

from dataclasses import replace

from configs.eval.llava15 import config as LLAVA15
from configs.eval.mini import config as MINI
from eval.block_efficiency import block_efficiency_table
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


def test_published_averages_stand_beside_the_rule_of_the_released_code() -> None:
    """Its scripts run MT* and MTCP* alike with a grid; inverse KL is another of their rules."""
    assert PRESETS["mt-release"] == Grid(measure="matches_kl")
    assert PRESETS["mtcp-release"] == InverseErrorPower(measure="kl")
    learned = {row.name: row for row in LLAVA15.rows if row.name.endswith("*")}
    assert list(learned) == ["MT*", "MTCP*"]
    for row in learned.values():
        assert row.published
        assert parse_weighting(row.weighting) == Grid(measure="matches_kl")
    *_, notes = table(LLAVA15)
    assert notes[-1] == "Weights: MT* by mt-release, MTCP* by mt-release."

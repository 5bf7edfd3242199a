"""AASD's Table 1 has its rows from the command line, and its cells from the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from configs.eval.aasd import config
from eval.kv_head import ablations, draft_table
from eval.lib.drafts.loading import named_places, split_view
from jaxspec.command import load_preset
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedHead
from tests import tiny


def row(dataset: str, draft: str, gamma: int, tau: float, **fields: Any) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "row": draft,
        "gamma": gamma,
        "samples": 4,
        "speedup_measured": tau / 2,
        "draft_acceptance_rate": (tau - 1) / gamma,
        "tokens_per_pass": tau,
        "decode_tokens_per_second": 50 * tau,
        "plain_tokens_per_second": 100.0,
        "speedup_call": tau / 4,
        "call_tokens_per_second": 20 * tau,
        "plain_call_tokens_per_second": 80.0,
        "prefill_ms": 9.0 if draft == "T" else 7.0,
        "plain_prefill_ms": 7.0,
        "token_identity_rate": 1.0,
        "device": "cpu",
    } | fields


@pytest.mark.full
def test_a_line_holds_whole_calls_and_loops_of_each_draft_length() -> None:
    rows = [
        row("describe", "T", 3, 2.5),
        row("describe", "T", 5, 3.0),
        row("describe", "KV head", 3, 3.0),
        row("describe", "KV head", 5, 4.0),
        row("reason", "T", 3, 1.3),
        row("reason", "T", 5, 2.0),
        row("reason", "KV head", 3, 2.0),
        row("reason", "KV head", 5, 3.0, token_identity_rate=0.9),
    ]
    _, header, cells, notes = draft_table(config, rows)
    names = ("omega", "omega, loop", "alpha", "tau", "delta", "delta, loop")
    assert header[2:] == [
        *(f"{name} gamma={gamma}" for gamma in (3, 5) for name in names),
        "prefill ms",
    ]
    assert [line[:2] for line in cells] == [
        [p, d] for p in ("describe", "reason", "avg") for d in ("T", "KV head")
    ]
    first = [
        *("0.62", "1.25", "0.50", "2.50", "50.00", "125.00", "0.75", "1.50", "0.40", "3.00"),
        *("60.00", "150.00"),
    ]
    assert cells[0][2:] == [*first, "9.00"]
    last = [
        *("0.62", "1.25", "0.50", "2.50", "50.00", "125.00", "0.88", "1.75", "0.50", "3.50"),
        *("70.00", "175.00"),
    ]
    assert cells[-1][2:] == [*last, "7.00"]
    text = " ".join(notes)
    assert "at least 90.0 %" in text
    assert "describe 80.00, reason 80.00 tokens/s of whole calls" in text
    assert "describe 7.00, reason 7.00 ms of prefill" in text
    alone = draft_table(replace(config, sets=("describe",)), rows[:4])[2]
    assert [line[0] for line in alone] == ["describe"] * 2


def test_a_name_of_two_rows_is_refused() -> None:
    assert named_places("heads", ["- projector=a", "T=b"], ["KV head"]).keys() == {
        *("- projector", "T")
    }
    for entries in (["KV head=a"], ["T=a", "T=b"]):
        with pytest.raises(InputError, match=r"heads: there is a row .* already; give another nam"):
            named_places("heads", entries, ["KV head"])


def test_ablations_leave_out_what_the_head_reads() -> None:
    target, params = tiny.lvlm(16, 2, seed=0)
    head = LoadedHead(*tiny.kv_head(target, params))
    found = {name: one.config for name, one in ablations(head).items()}
    assert [c.pooling for c in found.values()] == ["drop", "none", "linear", "drop"]
    assert [c.reads_text for c in found.values()] == [True, True, False, False]
    assert list(ablations(LoadedHead(replace(head.config, pooling="drop"), head.params))) == [
        "- text KV, untrained"
    ]


@pytest.mark.parametrize("size", ["7b", "13b"])
def test_the_papers_means_stand_below_ours_of_its_target_and_sets(size: str) -> None:
    config = load_preset("eval", f"aasd_{size}")
    rows = [row(name, "KV head", gamma, 2.0) for name in config.sets for gamma in (3, 5)]
    table = draft_table(config, rows)
    *_, ours, printed = table.cells
    assert (ours[1], printed[1]) == ("KV head", "KV head, paper")
    told = dict(zip(table.header, printed, strict=True))
    names = [
        f"{name} gamma={gamma}" for gamma in (3, 5) for name in ("omega", "alpha", "tau", "delta")
    ]
    assert [told.pop(name) for name in names] == {
        "7b": ["2.02", "0.62", "2.72", "63.59", "2.06", "0.62", "3.92", "65.02"],
        "13b": ["2.14", "0.63", "2.74", "67.78", "2.24", "0.62", "3.99", "70.45"],
    }[size]
    # of loops it prints none
    assert {value for name, value in told.items() if name not in ("set", "draft")} == {"-"}
    assert any("Visual Instruction Tuning', which is not LLaVA-1.5" in note for note in table.notes)
    other = draft_table(replace(config, sets=("coco", "scienceqa")), rows)[2]
    assert not any("paper" in line[1] for line in other)


def test_drafts_are_named() -> None:
    assert named_places("heads", ["FT-LLaVA=runs/ft:T"], ()) == {"FT-LLaVA": "runs/ft:T"}
    assert split_view("runs/ft:P36") == ("runs/ft", "P36")
    assert split_view("runs/a:b/ft") == ("runs/a:b/ft", "")
    assert split_view("owner/name") == ("owner/name", "")
    for wrong in ("runs/ft", "=runs/ft", "FT="):
        with pytest.raises(InputError, match=f"heads: '{wrong}' is not NAME=DIRECTORY"):
            named_places("heads", [wrong], ())

"""A collaborative evaluation takes its options, and its table shows the papers' numbers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.eval.cos import config as COS
from eval.collaborative import methods_table
from eval.lib.collaborative import pairings
from eval.lib.collaborative.config import CollaborativeEvalConfig, Point
from eval.lib.collaborative.pairings import JUDGED, METHODS, methods_of
from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.comparison import Group, Kept, first_prompt
from eval.lib.output.tables import Record
from eval.lib.times.passes import call_interval
from jaxspec.data.samples import Sample
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel
from jaxspec.engine.requests import Request, Result
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import PromptEncoder
from tests import tiny


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs")


def parse(*words: str) -> CollaborativeEvalConfig:
    return parse_command(Options, "", ["cos", *words], CollaborativeEvalConfig)[1]


def row_of(pairing: str, dataset: str, name: str) -> Record:
    known: dict[str, Any] = dict.fromkeys(("tokens_per_cycle", "quality", "token_identity_rate"))
    known |= {
        key: [1.0]
        for key in ("alpha", "calls_per_token", "calls_per_token_predicted", "held_out_nats_alone")
    }
    known |= dict.fromkeys(
        (
            "decode_tokens_per_second",
            "speedup_measured",
            "speedup_predicted",
            "held_out_nats",
            "speedup_call",
            "speedup_call_low",
            "speedup_call_high",
            "speedup_theorem",
            "speedup_corollary_3_4",
            "speedup_corollary_3_5",
        ),
        1.0,
    )
    known |= dict.fromkeys(("speedup_predicted_with_verify", "speedup_parallel_at_most"), 1.0)
    known |= {
        "call_tokens_per_second": 9.0,
        "left_out": 0,
        "samples": 100 if name in JUDGED else 8,
        "method": "naive",
        "gammas": [5],
        "default_proposer": 0,
        "device": "cpu",
    }
    return known | {"pairing": pairing, "dataset": dataset, "row": name}


def test_a_speed_up_has_an_interval_over_samples() -> None:
    """A speed-up's interval is over samples: two that are twice and four times as fast give 2 to 4,
    also if one wrote fewer tokens.
    """

    def answer(tokens: int, ms: float) -> Any:
        return Result("", (1,) * tokens, None, prefill_ms=ms / 2, decode_ms=ms / 2, batch=1)

    base = [answer(4, 400), answer(4, 400)]
    low, high = call_interval(base, [answer(4, 200), answer(2, 50)])
    assert (low, high) == (2, 4)
    assert call_interval(base, base) == (1, 1)


@pytest.mark.parametrize("rows", [1, 2])
def test_each_answer_has_a_time_of_its_own_if_batches_have_one_row(
    rows: int, target: LoadedModel
) -> None:
    """Intervals over samples compare times, and the answers of a call share its time."""
    engine = Engine(target, None, EngineConfig(batch_size=rows))
    kept = Kept(engine, lambda place, answer: answer(), {})
    answers = kept.generate([Request("a", 4), Request("b", 4)])
    assert [answer.batch for answer in answers] == [rows] * 2
    assert len({answer.decode_ms for answer in answers}) == 3 - rows


def test_no_run_of_a_sweep_is_kept_as_one_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep of draft lengths decodes from the methods' own combination, by turns of its own."""
    config = parse("--pairings", "Qwen 3B", "--sweep", "gamma:2,3")
    (pairing,) = config.pairings
    places: list[str] = []

    def program(self: Any, *way: Any) -> Any:
        assembly = SimpleNamespace(forms=(), params={"combination": None})
        settings = config.collaboration(pairing, *way)
        return SimpleNamespace(config=settings, assembly=assembly, encoder=None)

    def interleaved(programs: Sequence[Kept], requests: Sequence[Request], *_: Any) -> None:
        places.extend(json.dumps(each.key) for each in programs)
        raise StopIteration

    monkeypatch.setattr(pairings._Measurement, "program", program)
    monkeypatch.setattr(pairings, "interleaved", interleaved)
    unused: Any = None
    fields = config, pairing, pairing.models, "gsm8k", unused, unused, unused
    part: Any = pairings._Measurement(*fields)  # type: ignore[arg-type]
    references: Any = SimpleNamespace(alphas=lambda *_: [0.5, 0.5])
    programs = {name: part.program(*way) for name, way in methods_of(pairing).items()}
    with pytest.raises(StopIteration):
        part.by_turns(programs, [], JUDGED)
    with pytest.raises(StopIteration):
        part.sweep(references, [], [])
    assert len(places) == len(programs) + 3  # standard decoding, and CoS of two lengths
    assert len(places) == len(set(places))


def test_models_of_one_pairing_are_gone_before_the_next_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Model:
        pass

    models: dict[str, weakref.ref[Model]] = {}
    alive: list[set[str]] = []

    def load(name: str, *_: Any, **__: Any) -> Model:
        alive.append({other for other, each in models.items() if each() is not None})
        model = Model()
        models[name] = weakref.ref(model)
        return model

    monkeypatch.setattr(pairings, "load_model", load)
    monkeypatch.setattr(pairings._Measurement, "group", lambda _: Group([], [], []))
    config = parse("--pairings", "Qwen 3B", "OPT, T=1", "--sets", "gsm8k")
    assert len(list(pairings.measure(config, lambda *_: None))) == 2
    qwen, opt = (pairing.models for pairing in config.pairings)
    assert alive == [set(), {qwen[0]}, set(), {opt[0]}]


def test_every_number_is_of_a_pairing_and_a_method() -> None:
    paper, _ = COS.published  # of the two forms in which questions are asked
    known = {
        f"{pair.name}, {name}, {dataset}"
        for pair in COS.pairings
        for name in METHODS
        for dataset in COS.sets
    }
    assert paper.numbers[1].keys() <= known
    table = methods_table(COS, [row_of("Qwen 3B", "gsm8k", "CoS")])
    assert paper.columns <= set(table.header)


def test_raw_speeds_give_the_printed_ratios() -> None:
    """The papers' raw speeds give the ratios that they print, except in two places that the preset
    names.
    """
    paper, _ = COS.published  # of the two forms in which questions are asked
    lines, bad = paper.numbers[1], set()
    for row, line in lines.items():
        if line.keys() == {"whole calls", "tokens/s, whole calls"}:
            pairing, _, dataset = row.rsplit(", ", 2)
            standard = lines[f"{pairing}, standard, {dataset}"]["tokens/s, whole calls"]
            if abs(line["tokens/s, whole calls"] / standard - line["whole calls"]) > 0.0101:
                bad.add(row)
    swapped = {
        f"Qwen 1.5B, three, {name}, {dataset}"
        for name in ("speculative", "CoS")
        for dataset in ("gsm8k", "cnn-dm")
    }
    assert bad - swapped == {f"OPT, T=0, {name}, humaneval" for name in ("speculative", "CoS")}


def test_the_paper_s_line_stands_below_ours_at_its_length() -> None:
    rows = [row_of("Qwen 3B", "gsm8k", name) for name in ("standard", "naive", "CoS")]
    table = methods_table(COS, rows)
    assert [line[2] for line in table.cells] == [
        *("standard", "standard, paper", "naive", "naive, paper", "CoS", "CoS, paper")
    ]
    at, speed = (
        list(table.header).index(name) for name in ("whole calls", "tokens/s, whole calls")
    )
    assert [line[at] for line in table.cells] == ["1.00", "-", "1.00", "1.32", "1.00", "1.52"]
    assert [line[speed] for line in table.cells] == ["9.0", "49.02", "9.0", "-", "9.0", "74.52"]
    assert any(note.startswith("paper: CoS, Tables 2 to 8") for note in table.notes)
    counts = "standard and CoS answer {} samples a set, the other methods the first 8, and"
    assert counts.format(100) in table.notes[0]
    rows[0]["samples"] = rows[2]["samples"] = 97  # where three prompts are too long
    assert counts.format(97) in methods_table(COS, rows).notes[0]
    assert len(methods_table(replace(COS, max_new_tokens=8), rows).cells) == 3


def test_raw_text_is_the_question_after_bos() -> None:
    encoder = PromptEncoder(tiny.tokenizer())
    code = Sample("0", "humaneval", (), (("def add(a, b):", ""),))
    raw, chat = (
        encoder.text(first_prompt(encoder, code, templated).tokens) for templated in (False, True)
    )
    assert (raw, chat) == ("def add(a, b):", "USER: def add(a, b): ASSISTANT:")


def test_pairings_by_name() -> None:
    assert [pairing.name for pairing in parse("--pairings", "OPT, T=1", "Qwen 3B").pairings] == [
        "OPT, T=1",
        "Qwen 3B",
    ]
    assert parse().pairings == COS.pairings
    with pytest.raises(
        InputError, match="pairings: no pairing 'Qwen3B' in the preset; did you mean 'Qwen 3B"
    ):
        parse("--pairings", "Qwen3B")


def test_points_of_a_sweep() -> None:
    """Lambda is the proposer's weight, whichever model that is; each weight counts with both draft
    lengths.
    """
    qwen, llama = (
        next(p for p in COS.pairings if p.name == name) for name in ("Qwen 3B", "Llama-3, T=1")
    )
    assert qwen.points() == []
    assert qwen.points("lambda:0.2") == [
        Point("lambda", 0.2, "weighted:0.2,0.8", run) for run in ((1, 1), (5, 1))
    ]
    assert llama.points("lambda:0.2") == [
        Point("lambda", 0.2, "weighted:0.8,0.2", run) for run in ((1, 1), (1, 5))
    ]
    chosen = replace(llama, default_proposer="auto")
    assert chosen.points("lambda:0.2")[1].combination == "weighted:0.2,0.8"
    assert llama.points("mu:0.3")[1] == Point("mu", 0.3, "contrastive:mu=0.3", (1, 5))
    assert [point.gammas for point in llama.points("gamma:1,4")] == [(1, 1), (1, 4)]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("lambda:0.5,2", "weights: 2,-1 sum to 1; give non-negative numbers"),
        ("gamma:1e10", "gammas: .*; give each model 1 or more"),
    ],
)
def test_a_point_that_no_models_can_decode_is_refused_before_they_load(
    sweep: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        parse("--pairings", "Qwen 3B", "--sweep", sweep)

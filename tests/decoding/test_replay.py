"""A recorded target gives what the target itself gave."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.lib.standins.replay import RecordedEngine, RecordedTarget
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.errors import InputError
from tests import tiny

CONFIG = EngineConfig(
    views=("M", "T"),
    weights=(0.3, 0.7),
    weighting="grid:measure=matches",
    gamma=3,
    batch_size=4,
    prompt_buckets=(64,),
    image_buckets=(1,),
    new_buckets=(16,),
)
LENGTHS = (16, 9, 1)


@pytest.fixture(scope="module")
def requests(target: LoadedModel) -> list[Request]:
    encoder = Engine(target).encoder
    prompts = [
        encoder.prompt("What?", [tiny.page()]),
        encoder.prompt("Hi"),
        encoder.prompt("Tell me"),
    ]
    return [Request(replace(p, sample=f"s{i}"), LENGTHS[i]) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def results(target: LoadedModel, draft: LoadedModel, requests: list[Request]) -> list[Result]:
    """Answer the requests with a weighting that learns from hard labels, so that the recorded
    tokens matter.
    """
    return Engine(target, draft, CONFIG).generate(requests)


def record(path: Path, results: list[Result]) -> Path:
    lines = [
        {"sample": f"s{i}", "token_ids": list(result.tokens)} for i, result in enumerate(results)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def recorded(tmp_path: Path, results: list[Result], draft: LoadedModel) -> RecordedTarget:
    return RecordedTarget.read(record(tmp_path / "answers.jsonl", results), draft)


def test_tokens_and_counts_are_those_of_the_target_itself(
    recorded: RecordedTarget, draft: LoadedModel, requests: list[Request], results: list[Result]
) -> None:
    assert any(result.stats.accepted_at.sum() for result in results)
    # ends where the record does
    longer = [replace(request, max_new_tokens=16) for request in requests]
    for given in (requests, longer):
        for ours, theirs in zip(
            RecordedEngine(recorded, draft, CONFIG).generate(given), results, strict=True
        ):
            assert ours.tokens == theirs.tokens
            for name, counts in vars(theirs.stats).items():
                np.testing.assert_array_equal(getattr(ours.stats, name), counts, err_msg=name)


@pytest.mark.full
def test_a_text_model_drafts_for_a_recorded_text_target(
    target: LoadedModel, draft: LoadedModel, requests: list[Request], tmp_path: Path
) -> None:
    alone, small = (
        tiny.loaded(params, text.config)
        for model in (target, draft)
        for text, params in [tiny.text_only(model.model, model.params)]
    )
    config = replace(CONFIG, views=("T",), weights=None, image_buckets=(0,))
    asked = [
        replace(request, prompt=replace(request.prompt, sample=f"s{i}"))
        for i, request in enumerate(requests[1:])
    ]
    expected = Engine(alone, small, config).generate(asked)
    said = RecordedTarget.read(record(tmp_path / "answers.jsonl", expected), small)
    for ours, theirs in zip(
        RecordedEngine(said, small, config).generate(asked), expected, strict=True
    ):
        assert (ours.tokens, ours.stats.steps) == (theirs.tokens, theirs.stats.steps)


def test_what_needs_probabilities_is_refused(
    recorded: RecordedTarget, draft: LoadedModel, requests: list[Request]
) -> None:
    engine = RecordedEngine(recorded, draft, CONFIG)
    with pytest.raises(InputError, match=r"temperature 0\.5: recorded answers are greedy"):
        engine.generate([replace(requests[0], temperature=0.5)])
    unknown = replace(requests[0], prompt=replace(requests[0].prompt, turn=2))
    with pytest.raises(InputError, match="no answer of turn 2 to sample 's0'"):
        engine.generate([unknown])
    for rule in ("grid", "inverse_error_power:measure=tvd", "mt-release", "inverse_error_power"):
        with pytest.raises(InputError, match="learns from probabilities"):
            RecordedEngine(recorded, draft, replace(CONFIG, weighting=rule))


def read(
    path: Path, lines: list[dict[str, Any]], draft: LoadedModel
) -> dict[tuple[str, int], tuple[int, ...]]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return dict(RecordedTarget.read(path, draft).answers)


def test_texts_and_mmspecs_lines(tmp_path: Path, draft: LoadedModel) -> None:
    ids, eos = draft.tokenizer.encode("So.", add_special_tokens=False), draft.tokenizer.eos_token_id
    choice = {"turns": ["So.", "So."], "new_tokens": [len(ids) + 1, len(ids)]}
    lines = [
        {"question_id": "m", "choices": [choice]},
        {"sample": "a", "turn": 2, "text": "So.", "row": "M"},
        {"sample": "a", "turn": 2, "text": "So.", "row": "T"},
    ]
    found = read(tmp_path / "a.jsonl", lines, draft)
    assert found == {
        ("m", 1): (*ids, eos),
        ("m", 2): tuple(ids),  # cut by the limit of its run
        ("a", 2): (*ids, eos),
    }


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no answers in it"),
        (
            [{"sample": "a", "text": "So"}, {"sample": "a", "text": "No"}],
            "line 2: an earlier line answers a, turn 1",
        ),
        ([{"sample": "a", "text": "So", "temperature": 1.0}], "line 1: drawn at temperature 1.0"),
        (
            [{"question_id": "m", "choices": [{"turns": ["So."], "new_tokens": [2]}]}],
            "line 1: new_tokens 2, but",
        ),
    ],
)
def test_bad_records(
    lines: list[dict[str, Any]], message: str, tmp_path: Path, draft: LoadedModel
) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.jsonl", lines, draft)

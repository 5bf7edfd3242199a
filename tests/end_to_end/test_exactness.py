"""eval/exactness.py runs on tiny checkpoints; its records, and the tests it rests on, hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from eval.exactness import chi_square, main
from eval.lib.drafts.comparison import first_prompt
from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.drafts.forward import divergence
from jaxspec.engine.engine import Engine, LoadedModel, Request
from tests.tiny.files import read_json, read_lines


@pytest.fixture(scope="module")
def target(pair: tuple[Path, Path]) -> LoadedModel:
    return LoadedModel.load(pair[0])


def test_script_writes_records_and_table(
    tiny_preset: Callable[..., EvalConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_preset(
        rows=(Variant("MT", ("M", "T"), (0.3, 0.7)),),
        sets=("describe", "facts"),
        gamma=3,
        prompt_buckets=(256,),
    )
    own = "--gammas 3 --batches 10 --draws 40 --tokens 2"
    main(f"tiny --out {tmp_path / 'out'} {own} --limit 3 --sets facts".split())
    results = read_json(tmp_path / "out/results.json")
    assert results["run"]["preset"] == "tiny"
    *rows, whole, warm, nucleus = results["rows"]
    assert [(row["dataset"], row["turn"], row["samples"]) for row in rows] == [
        ("facts", 1, 3),
        ("facts", 2, 3),
    ]
    assert all(row["token_identity_rate"] == 1.0 for row in rows)
    assert all(row["first_divergence"] is row["largest_logit_gap"] is None for row in rows)
    assert all(row["tokens_per_pass"] > 1 for row in rows)
    for row, options in ((whole, (1.0, 1.0)), (warm, (2.0, 1.0)), (nucleus, (2.0, 0.9))):
        assert (row["dataset"], row["samples"]) == ("sampling", 40)
        assert (row["temperature"], row["top_p"]) == options
        assert row["p_value"] > 1e-3
        assert row["degrees"] > 1
    records = read_lines(tmp_path / "out/records.jsonl")
    assert [record["divergence"] for record in records] == [None] * 6
    table = (tmp_path / "out/table.md").read_text()
    assert table.count("100.00 %") == 1
    assert "p-value" in table
    assert "p-value" in capsys.readouterr().out
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.full
def test_int8_answers_are_compared_with_those_of_the_full_weights(
    tiny_preset: Callable[..., EvalConfig], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = (Variant("T", ("T",)),)
    preset = tiny_preset(
        target_weights="int8",
        rows=rows,
        sets=("facts",),
        limit=8,
        turns=(1,),
        max_new_tokens=24,
        prompt_buckets=(256,),
    )
    shares = {}
    for option in ("--full-weights", "--no-full-weights"):
        main(f"tiny --out {tmp_path / option} --gammas 2 --batches 8 --draws 0 {option}".split())
        (row,) = read_json(tmp_path / option / "results.json")["rows"]
        shares[option] = row["token_identity_rate"]
    answers = []
    for weights in (None, "int8"):
        engine = Engine(LoadedModel.load(pair[0], weights=weights), config=preset.plain())
        prompts = [first_prompt(engine.encoder, sample) for sample in preset.samples("facts")]
        answers.append(
            [
                result.tokens
                for result in engine.generate([Request(prompt, 24) for prompt in prompts])
            ]
        )
    equal = np.mean([full == half for full, half in zip(*answers, strict=True)])
    assert shares == {"--full-weights": equal, "--no-full-weights": 1}
    assert equal < 1, "int8 changes no answer, which proves little"


def test_divergence_tells_place_and_gap(target: LoadedModel) -> None:
    engine = Engine(target)
    prompt = engine.encoder.prompt("Hi", [np.full((28, 28, 3), 90, np.uint8)])
    tokens = engine.generate([Request(prompt, 8)])[0].tokens
    assert divergence(target, prompt, tokens, tokens) is None
    other = (*tokens[:5], (tokens[5] + 1) % 100, *tokens[6:])
    found = divergence(target, prompt, tokens, other)
    assert found is not None
    assert (found.index, found.expected, found.actual) == (5, tokens[5], other[5])
    assert found.logit_gap is not None
    assert found.logit_gap > 0  # greedy decoding took the likelier token
    # type: ignore[union-attr]
    assert divergence(target, prompt, other, tokens).logit_gap == -found.logit_gap
    short = divergence(target, prompt, tokens, tokens[:6])
    assert short is not None
    assert (short.index, short.expected, short.actual, short.logit_gap) == (
        6,
        tokens[6],
        None,
        None,
    )


def test_chi_square_is_scipys() -> None:
    ours, theirs = ["a"] * 50 + ["b"] * 30 + ["c"] * 20, ["a"] * 80 + ["b"] * 70 + ["c"] * 50
    test = chi_square(ours, theirs)
    expected = stats.chi2_contingency([[50, 30, 20], [80, 70, 50]], correction=False)
    assert test.degrees == expected.dof == 2
    assert test.statistic == pytest.approx(expected.statistic)
    assert test.p_value == pytest.approx(expected.pvalue, rel=1e-4)

"""MMSpec's conversations: answers of every method and the summary, in MMSpec's own files.

    python -m eval.mmspec llava15 --data mmspec=PATH --limit 600 --batch-size 1 \
        --max-new-tokens 1024
    python -m eval.mmspec llava15 --data mmspec=PATH --target replay:ANSWERS.jsonl

Writes METHOD-temperature-T.jsonl for plain decoding (`baseline`) and for each row of the preset,
summary.csv, results.json, records.jsonl and table.md into --out; the same command continues a
stopped run. A batch's time is shared evenly by its answers; MMSpec's own times are of batch 1. With
a recorded target there are no times, and the acceptance is exact.

An answer is a line {question_id, topic, category, choices: [{turns, idxs, new_tokens, wall_time,
acceptance_length}]} with lists by turn (arXiv 2603.14989); this project adds `token_ids`, for
replay. `idxs` are target passes after prefill, `new_tokens` include prefill's token, and
`acceptance_length` is the mean number of accepted drafted tokens a pass, as MMSpec stores MSD;
plain decoding has none. MMSpec's draft_time and target_time are left out, since one compiled loop
does not separate them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.lib.command_line import parse_command
from eval.lib.comparison import first_prompt, next_prompt, row_engines
from eval.lib.config import EvalConfig
from eval.lib.loading import load_models
from eval.lib.replay import RecordedTarget, engine_of
from eval.lib.report import Run
from eval.lib.sets import MMSPEC
from eval.lib.tables import Table
from jaxspec.command import input_errors, script_name
from jaxspec.data.samples import Sample
from jaxspec.decoding.engine import Engine, Request, Result
from jaxspec.files import write_text
from jaxspec.prompts.encoder import Prompt

BASELINE = "baseline"
PART = 64
"""Number of conversations that are saved together."""
SHOWN = (
    "method",
    "group",
    "n_turns",
    "total_new_tokens",
    "MAT",
    "draft_accept_mean",
    "speedup_paired",
)
SUMMARY = (
    *("method", "group", "n_samples", "n_turns", "total_new_tokens", "total_wall_time"),
    *("total_draft_time", "total_target_time", "MAT", "draft_accept_mean"),
    *("speedup_paired", "speedup_global"),
)


@dataclass(frozen=True)
class Turn:
    """One answer and its cost."""

    text: str
    tokens: tuple[int, ...]
    steps: int
    """Target passes after prefill."""
    accepted: int | None
    """Accepted drafted tokens; None without a draft."""
    wall_time: float | None
    """Seconds, this answer's share of its batch; None for a recorded target."""


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/mmspec/PRESET")
    """Directory for the answers and summary.csv."""


def main(args: Sequence[str] | None = None) -> None:
    """Answers MMSpec's conversations with and without the draft.

    Every turn follows the method's own answers to earlier turns, as in MMSpec; greedy answers are
    the
    target's, whichever draft is used.
    """
    preset, config, options = parse_command(Options, __doc__, args)
    config = replace(config, sets=(MMSPEC,), turns=(1,))
    with Run(preset, vars(config) | vars(options), options.out) as run:
        target, draft, captioner = load_models(config)
        samples = config.samples(MMSPEC)
        engines = {BASELINE: engine_of(target, None, config.plain())} | row_engines(
            config, target, draft, captioner
        )
        run.restore(("method",))
        answers: dict[str, list[tuple[Sample, list[Turn]]]] = {}
        known = {sample.id: sample for sample in samples}
        for record in run.records:
            turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in record["turns"]]
            answers.setdefault(record["method"], []).append((known[record["sample"]], turns))
        with tqdm(
            total=len(engines) * len(samples), unit="conversation", desc="MMSpec", delay=1
        ) as bar:
            for method, engine in engines.items():
                bar.set_postfix_str(method, refresh=False)
                done = answers.setdefault(method, [])
                bar.update(len(done))
                for start in range(len(done), len(samples), PART):
                    part = converse(config, engine, samples[start : start + PART])
                    done += part
                    run.records += [
                        {
                            "method": method,
                            "sample": sample.id,
                            "turns": [vars(turn) for turn in turns],
                        }
                        for sample, turns in part
                    ]
                    name = f"{method.replace(' ', '-')}-temperature-{config.temperature:g}.jsonl"
                    lines = [json.dumps(answer_row(sample, turns)) + "\n" for sample, turns in done]
                    write_text(run.folder / name, "".join(lines))
                    _write_summary(run, answers)
                    bar.update(len(part))
        _write_summary(run, answers)


def _write_summary(run: Run, answers: dict[str, list[tuple[Sample, list[Turn]]]]) -> None:
    run.rows = summary_rows(answers, BASELINE)
    write_text(run.folder / "summary.csv", summary_csv(run.rows))
    cells = [
        [f"{row[k]:.2f}" if isinstance(row[k], float) else str(row[k]) for k in SHOWN]
        for row in run.rows
    ]
    run.write(Table("MMSpec", SHOWN, cells))


def converse(
    config: EvalConfig, engine: Engine, samples: Sequence[Sample]
) -> list[tuple[Sample, list[Turn]]]:
    """Answer all turns of every sample, one turn of all samples at a time."""
    answered: list[tuple[Sample, list[Turn]]] = [(sample, []) for sample in samples]
    asked: dict[int, Prompt] = {}
    said: dict[int, Result] = {}
    for depth in range(max(len(sample.turns) for sample in samples)):
        open_ = [i for i, sample in enumerate(samples) if len(sample.turns) > depth]
        for i in open_:
            if depth == 0:
                asked[i] = first_prompt(engine.encoder, samples[i])
            else:
                asked[i] = next_prompt(
                    engine.encoder, asked[i], said[i], samples[i].turns[depth][0], samples[i]
                )
        results = engine.generate(
            [
                Request(asked[i], config.max_new_tokens, config.temperature, seed=config.seed + i)
                for i in open_
            ]
        )
        said = dict(zip(open_, results, strict=True))
        for i, result in said.items():
            answered[i][1].append(_turn(result, engine))
    return answered


def _turn(result: Result, engine: Engine) -> Turn:
    drafts, timed = (
        engine.program.drafts,
        not isinstance(engine.lead, RecordedTarget),
    )
    return Turn(
        text=result.text,
        tokens=result.tokens,
        steps=result.stats.steps,
        accepted=int(result.stats.accepted_at.sum()) if drafts else None,
        wall_time=(result.prefill_ms + result.decode_ms) / result.batch / 1e3 if timed else None,
    )


def answer_row(sample: Sample, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return one line of an answer file."""
    choice: dict[str, Any] = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "idxs": [turn.steps for turn in turns],
        "new_tokens": [len(turn.tokens) for turn in turns],
        "token_ids": [list(turn.tokens) for turn in turns],
    }
    if all(turn.wall_time is not None for turn in turns):
        choice["wall_time"] = [turn.wall_time for turn in turns]
    if all(turn.accepted is not None for turn in turns):
        choice["acceptance_length"] = [(turn.accepted or 0) / max(turn.steps, 1) for turn in turns]
    return {"question_id": sample.id, **dict(sample.labels), "choices": [choice]}


def summary_rows(
    answers: dict[str, list[tuple[Sample, list[Turn]]]], baseline: str
) -> list[dict[str, Any]]:
    """Return MMSpec's summary: each method over all samples and each topic.

    MAT is new tokens over target passes after prefill (over new tokens for the baseline, hence 1).
    Prefill's token is counted, so MAT is a little above `tokens_per_pass`. speedup_paired is the
    mean
    over turns of the ratio of tokens/s to the baseline's, speedup_global the ratio of the totals.
    """
    plain = {
        (sample.id, i): turn for sample, turns in answers[baseline] for i, turn in enumerate(turns)
    }
    rows = []
    for method, answered in answers.items():
        for group in ("ALL", *dict.fromkeys(_topic(sample) for sample, _ in answered)):
            chosen = [
                (sample, turns) for sample, turns in answered if group in ("ALL", _topic(sample))
            ]
            pairs = [
                (turn, plain[sample.id, i])
                for sample, turns in chosen
                for i, turn in enumerate(turns)
            ]
            named = {"method": method, "group": group, "n_samples": len(chosen)}
            rows.append(
                dict.fromkeys(SUMMARY, "")
                | named
                | _counts([turn for turn, _ in pairs])
                | _times(pairs)
            )
    return rows


def _topic(sample: Sample) -> str:
    return dict(sample.labels).get("topic", "")


def _counts(turns: Sequence[Turn]) -> dict[str, Any]:
    tokens = sum(len(turn.tokens) for turn in turns)
    passes = sum(len(turn.tokens) if turn.accepted is None else turn.steps for turn in turns)
    stood = [turn.accepted for turn in turns if turn.accepted is not None]
    counts = {
        "n_turns": len(turns),
        "total_new_tokens": tokens,
        "MAT": tokens / passes if passes else "",
    }
    return counts | ({"draft_accept_mean": sum(stood) / max(passes, 1)} if stood else {})


def _times(pairs: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    """Return seconds and speed-ups from pairs of a method's turn and the baseline's."""
    timed = [
        (len(turn.tokens), turn.wall_time, len(plain.tokens), plain.wall_time)
        for turn, plain in pairs
        if turn.wall_time and plain.wall_time
    ]
    if not timed:
        return {}
    tokens, seconds, plain_tokens, plain_seconds = (sum(column) for column in zip(*timed))
    return {
        "total_wall_time": seconds,
        "speedup_paired": sum(n / t / (m / u) for n, t, m, u in timed) / len(timed),
        "speedup_global": tokens / seconds / (plain_tokens / plain_seconds),
    }


def summary_csv(rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, SUMMARY, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


if __name__ == "__main__":
    with input_errors(script_name()):
        main()

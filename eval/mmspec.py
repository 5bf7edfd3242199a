"""Answer MMSpec's conversations by every method, and write MMSpec's own files.

    python -m eval.mmspec llava15 --data mmspec=PATH --limit 600 --batch-size 1 \\
        --max-new-tokens 1024
    python -m eval.mmspec llava15 --data mmspec=PATH --target replay:ANSWERS.jsonl
    python -m eval.mmspec recorded --data mmspec=PATH

Writes METHOD-temperature-T.jsonl for plain decoding (`baseline`) and for each row of the preset,
summary.csv, results.json, records.jsonl and table.md into --out; the same command continues a
stopped run. A batch's time is shared evenly by its answers; MMSpec's own times are of batch 1. With
a recorded target there are no times, and the acceptance is exact.

An answer is a line {question_id, topic, category, choices: [{turns, idxs, new_tokens, wall_time,
acceptance_length}]} with lists by turn (arXiv 2603.14989); this project adds `token_ids`, for
replay. `idxs` are target passes after prefill, `new_tokens` include prefill's token, and
`acceptance_length` is the mean number of accepted drafted tokens per pass, as MMSpec stores MSD;
plain decoding has none. MMSpec's draft_time and target_time are left out, since one compiled loop
does not separate them.

The preset `recorded` needs no model: it replays LLaVA-1.5-7B's recorded answers with drafts made of
n-grams, next to the recorded counts of published methods, and draws bars.svg
(results/mmspec_recorded/README.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.comparison import first_prompt, next_prompt
from eval.lib.drafts.config import EvalConfig
from eval.lib.drafts.loading import load_models
from eval.lib.output.report import Run, progress
from eval.lib.output.tables import Table
from eval.lib.questions.mmspec_files import (
    BASELINE,
    SHOWN,
    Turn,
    answer_row,
    summary_csv,
    summary_rows,
)
from eval.lib.questions.sets import MMSPEC
from eval.lib.recorded.config import RecordedConfig
from eval.lib.recorded.table import replay_recorded
from eval.lib.standins.replay import RecordedTarget, engine_of
from jaxspec.command import input_errors, script_name
from jaxspec.data.samples import Sample
from jaxspec.engine.engine import Engine, Request, Result
from jaxspec.engine.requests import nth_seed
from jaxspec.files import write_text
from jaxspec.prompts.encoder import Prompt

PART = 64
"""Number of conversations that are saved together."""


@dataclass(frozen=True)
class Options:
    unread: ClassVar = (
        *("sets", "images", "turns", "follow_ups", "each_follow_up", "one_turn"),
        *("repeats", "times", "trace"),
    )
    out: Path = Path("runs/mmspec/PRESET")
    """Directory for the answers and summary.csv."""


def main(args: Sequence[str] | None = None) -> None:
    """Answer MMSpec's conversations with and without the draft, or replay recorded answers."""
    kinds = EvalConfig, RecordedConfig
    preset, config, options = parse_command(Options, __doc__, args, kinds)
    timed = ""
    if isinstance(config, EvalConfig):
        config = replace(config, sets=(MMSPEC,), turns=(1,))
        timed = "of one run, method after method"
    with Run(preset, vars(config) | vars(options), options.out, timed) as run:
        if isinstance(config, RecordedConfig):
            replay_recorded(config, run)
        else:
            answer_conversations(config, run)


def answer_conversations(config: EvalConfig, run: Run) -> None:
    """Answer MMSpec's conversations by plain decoding and by each row of the preset.

    Every turn follows the method's own answers to earlier turns, as in MMSpec; greedy answers are
    the target's, whichever draft is used.
    """
    models = load_models(config)
    samples = config.samples(MMSPEC)
    plain = engine_of(models.target, None, config.plain())
    engines = {BASELINE: plain} | models.engines(config)
    run.restore()
    answers: dict[str, list[tuple[Sample, list[Turn]]]] = {}
    by_id = {sample.id: sample for sample in samples}
    for record in run.records:
        turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in record["turns"]]
        answers.setdefault(record["method"], []).append((by_id[record["sample"]], turns))
    with progress(len(engines) * len(samples), "MMSpec", "conversation") as bar:
        for method, engine in engines.items():
            bar.set_postfix_str(method, refresh=False)
            done = answers.setdefault(method, [])
            bar.update(len(done))
            for start in range(len(done), len(samples), PART):
                part = converse(config, engine, samples[start : start + PART], start)
                done += part
                run.records += [
                    {"method": method, "sample": sample.id, "turns": list(map(vars, turns))}
                    for sample, turns in part
                ]
                name = f"{method.replace(' ', '-')}-temperature-{config.temperature:g}.jsonl"
                lines = [json.dumps(answer_row(sample, turns)) + "\n" for sample, turns in done]
                write_text(run.folder / name, "".join(lines))
                _write_summary(run, answers)
                bar.update(len(part))
    _write_summary(run, answers)


def _write_summary(run: Run, answers: dict[str, list[tuple[Sample, list[Turn]]]]) -> None:
    run.rows = summary_rows(answers)
    write_text(run.folder / "summary.csv", summary_csv(run.rows))
    cells = [
        [f"{row[k]:.2f}" if isinstance(row[k], float) else str(row[k]) for k in SHOWN]
        for row in run.rows
    ]
    run.write(Table("MMSpec", SHOWN, cells))


def converse(
    config: EvalConfig, engine: Engine, samples: Sequence[Sample], first: int = 0
) -> list[tuple[Sample, list[Turn]]]:
    """Answer all turns of every sample, one turn of all samples at a time.

    Args:
      first: Place of the first sample in its set; a sample's place gives its seed.
    """
    answered: list[tuple[Sample, list[Turn]]] = [(sample, []) for sample in samples]
    prompts: dict[int, Prompt] = {}
    answers: dict[int, Result] = {}
    for depth in range(max(len(sample.turns) for sample in samples)):
        open_ = [i for i, sample in enumerate(samples) if len(sample.turns) > depth]
        for i in open_:
            if depth == 0:
                prompts[i] = first_prompt(engine.encoder, samples[i])
            else:
                prompts[i] = next_prompt(engine.encoder, prompts[i], answers[i], samples[i])
        fields = config.max_new_tokens, config.temperature
        seeds = {i: nth_seed(config.seed, first + i) for i in open_}
        requests = [Request(prompts[i], *fields, seed=seeds[i]) for i in open_]
        with config.named(MMSPEC):
            answers = dict(zip(open_, engine.generate(requests), strict=True))
        for i, result in answers.items():
            answered[i][1].append(_turn(result, engine))
    return answered


def _turn(result: Result, engine: Engine) -> Turn:
    drafts = engine.assembly.program.sources
    timed = not isinstance(engine.assembly.lead, RecordedTarget)
    return Turn(
        text=result.text,
        tokens=result.tokens,
        steps=result.stats.steps,
        accepted=int(result.stats.accepted_at.sum()) if drafts else None,
        wall_time=(result.prefill_ms + result.decode_ms) / result.batch / 1e3 if timed else None,
    )


if __name__ == "__main__":
    with input_errors(script_name()):
        main()

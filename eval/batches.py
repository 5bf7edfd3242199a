"""Throughput against the batch: plain and speculative decoding, adaptive block lengths, what refill and growth save.

    python -m eval.batches mini --out runs/batches
    python -m eval.batches llava15 --batches 1 4 16 64 --samples 64
    python -m eval.planted && python -m eval.batches mini --target runs/planted/target --draft runs/planted/draft

The same requests at every batch size. Where speculation stops paying is the crossover; `--adaptive-gamma` is meant to
hold the better of both lines. Rows that are done while their batch is not are the waste of decoding batch after batch;
refill gives them to the requests that wait. Caches with room for --long answers are read whole in every pass; those
that grow are not. Writes results.json and table.md into --out.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from tqdm import tqdm

from jaxspec.command import run_script
from jaxspec.data.prompts import bucket
from jaxspec.data.sets import evaluation_set
from jaxspec.decoding.engine import Engine, EngineConfig, Request, Result
from jaxspec.decoding.requests import BATCH_BUCKETS
from jaxspec.errors import check_counts
from jaxspec.evaluation.block_efficiency import first_question
from jaxspec.evaluation.command import eval_preset, eval_presets, load_models
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.evaluation.timing import by_turns

HEADER = ["B", "plain tok/s", "speculative", "adaptive J", "x plain", "adaptive x plain", "waste plain", "speculative"]
HEADER += ["refill x plain", "refill x speculative", "growth x plain", "growth x speculative"]


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    out: Path = Path("runs/batches"),
    target: str | None = None,
    draft: str | None = None,
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    dataset: str = "describe",
    samples: int = 32,
    new: int = 64,
    long: int = 1024,
    gamma: int = 5,
    view: str = "M",
    repeats: int = 8,
) -> None:
    """Times the target and draft of an evaluation preset.

    Args:
      preset: one of those named above, from configs/eval.
      out: directory for results.json and table.md.
      target: directory or hub id, in place of the preset's.
      draft: likewise.
      batches: rows that decode at once.
      dataset: of the preset's, whose first questions are asked.
      samples: requests, the same for every batch.
      new: most new tokens of an answer.
      long: new tokens that caches have room for, or grow to: answers might have been so long.
      gamma: drafted tokens a block.
      view: of the draft.
      repeats: runs of each way, by turns; the fastest of each counts, as what else a machine does only adds.
    """
    given = dict(locals())
    check_counts(samples=samples, new=new, long=long, repeats=repeats)
    fresh = begin(out, given)
    config = eval_preset(preset)
    config = replace(config, target=target or config.target, draft=draft or config.draft)
    reader, drafter, captioner = load_models(config, (view,))
    encoder = Engine(reader).encoder
    requests = [Request(first_question(encoder, s).prompt, new) for s in evaluation_set(dataset, samples)]
    rows: list[dict[str, Any]] = []
    runs = 3 + 2 * 4  # three ways to decode; of two of them, with and without refill, and growth
    with tqdm(total=len(batches) * runs * (repeats + 1), desc="batches", unit="run") as bar:
        for batch in batches:
            options = EngineConfig((view,), gamma=gamma, batch_size=batch, new_buckets=(new,))
            engines = [Engine(reader, None, options), Engine(reader, drafter, options, captioner)]
            engines.append(Engine(reader, drafter, replace(options, adaptive_gamma=True), captioner))
            by_turns(engines, requests, 1, bar)  # compiles
            answers, rates = by_turns(engines, requests, repeats, bar)
            rates = rates.max(axis=1)
            row = {"batch": batch} | dict(zip(("plain", "speculative", "adaptive"), rates.tolist()))
            others = []
            for name, engine, own in zip(("plain", "speculative"), engines, answers):
                row[f"{name}_waste"] = waste(own, batch)
                spacious = replace(options, new_buckets=(long,))
                for way, without in (("refill", options), ("grow", replace(spacious, grow=False))):
                    both = (replace(without, **{way: on}) for on in (False, True))
                    ways = [Engine(reader, engine.draft, one, captioner) for one in both]
                    row[f"{name}_{way}"], found = saved(ways, requests, repeats, bar)
                    others += found
            pairs = [pair for other in answers[1:] + others for pair in zip(answers[0], other, strict=True)]
            row["identical"] = all(ours.tokens == theirs.tokens for ours, theirs in pairs)
            rows.append(row)
    cells = [
        [str(row["batch"]), *(f"{row[name]:.0f}" for name in ("plain", "speculative", "adaptive"))]
        + [f"{row[name] / row['plain']:.2f}" for name in ("speculative", "adaptive")]
        + [f"{row[f'{name}_waste']:.0%}" for name in ("plain", "speculative")]
        + [f"{row[f'{name}_{way}']:.2f}" for way in ("refill", "grow") for name in ("plain", "speculative")]
        for row in rows
    ]
    same = "the same" if all(row["identical"] for row in rows) else "NOT the same"
    notes = [
        f"{samples} requests of `{dataset}`, at most {new} new tokens, greedy, view {view}, J = {gamma}; decode tokens "
        f"a second, the fastest of {repeats} runs by turns; load {os.getloadavg()[0]:.1f}. All answers are {same} "
        "tokens.",
        "waste: share of a batch's row-steps that were computed for rows already done, when batch follows batch. "
        "refill: time of batch after batch over time with refill, prefill and host included; growth: time with whole "
        f"caches, of room for {long} new tokens, over that with caches that grow to it.",
    ]
    table = (f"Batches of {preset}", HEADER, cells, notes)
    write_results(fresh, describe_run(preset, given), rows, [], markdown(*table))
    finish(fresh, out)
    show(*table)
    print(f"wrote results.json, table.md to {out}", file=sys.stderr)


def waste(answers: list[Result[Any]], batch: int) -> float:
    """The share of row-steps that were computed for rows already done, in batch after batch."""
    steps = [result.stats.steps for result in answers]
    groups = [steps[i : i + batch] for i in range(0, len(steps), batch)]
    return 1 - sum(steps) / sum(bucket(len(group), BATCH_BUCKETS, "batch") * max(group) for group in groups)


def saved(
    engines: list[Engine], requests: list[Request], repeats: int, bar: tqdm
) -> tuple[float, list[list[Result[Any]]]]:
    """How many times as long as the second engine the first takes, and the answers of each."""
    times = np.zeros((2, repeats + 1))  # the first compiles
    answers: list[list[Result[Any]]] = []
    for turn in range(repeats + 1):
        answers = []
        for i, way in enumerate(engines):
            begun = time.perf_counter()
            answers.append(way.generate(requests))
            times[i, turn] = time.perf_counter() - begun
            bar.update()
    ours, theirs = times[:, 1:].min(axis=1)
    return float(ours / theirs), answers


if __name__ == "__main__":
    run_script(main, f"{__doc__}\nPresets: {', '.join(eval_presets())}.")

"""Latency of a pair of given shapes and random weights: passes, images, mixtures, and loops at forced acceptance.

    python -m eval.latency mini --out runs/latency_mini
    python -m eval.latency llava7b_68m --parts passes forced --batches 1 8

Nothing is read from files: weights are made on the device. Writes results.json, table.md and figures into --out.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro

from jaxspec.command import run_script
from jaxspec.evaluation.latency import (
    LatencyConfig,
    Pair,
    measure_forced,
    measure_images,
    measure_mixtures,
    measure_passes,
)
from jaxspec.evaluation.latency_report import draw_latency, latency_tables
from jaxspec.evaluation.limits import probe
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.presets import load_preset, preset_names
from jaxspec.runtime import setup_runtime

Part = Literal["passes", "images", "forced", "mixtures"]


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    out: Path = Path("runs/latency"),
    parts: tuple[Part, ...] = ("passes", "images", "forced", "mixtures"),
    batches: tuple[int, ...] = (1,),
    views: tuple[int, ...] = (1, 4),
    rules: tuple[str, ...] = ("mt-paper", "mt-release", "mtcp-paper", "mtcp-release", "hard_match", "em"),
    clock: Literal["wall", "cpu"] = "wall",
) -> None:
    """Times what the preset under configs/latency names.

    Args:
      preset: one of those named above, from configs/latency.
      out: directory for results.json, table.md and figures.
      parts: what to time.
      batches: rows of the loops at forced acceptance.
      views: draft views of those loops.
      rules: weightings of the blocks whose cost is told, on as many views as the preset names.
      clock: wall time, or the processor's, for CPUs that others use as well.
    """
    given = dict(locals())
    fresh = begin(out, given)
    config: LatencyConfig = replace(load_preset("latency", preset), clock=clock)
    setup_runtime()
    limits = probe(jnp.dtype(config.dtype), config.probe_megabytes, config.probe_side, clock=clock)
    pair = Pair(config)
    rows = []
    if "passes" in parts:
        rows += measure_passes(pair, limits)
    if "images" in parts:
        rows += measure_images(pair)
    if "forced" in parts:
        rows += [row for batch in batches for r in views for row in measure_forced(pair, batch, r)]
    if "mixtures" in parts:
        rows += [row for batch in batches for row in measure_mixtures(pair, rules, batch)]
    run = describe_run(preset, given) | {"limits": vars(limits), "clock": clock, "load": os.getloadavg()[0]}
    title = preset if clock == "wall" else f"{preset}, processor time"
    tables = latency_tables(title, rows, limits)
    write_results(fresh, run, rows, [], "\n".join(markdown(*table) for table in tables))
    figures = draw_latency(title, rows, fresh)
    finish(fresh, out)
    for table in tables:
        show(*table)
    print(f"wrote {', '.join(['results.json', 'table.md', *(f.name for f in figures)])} to {out}", file=sys.stderr)


if __name__ == "__main__":
    run_script(main, f"{__doc__}\nPresets: {', '.join(preset_names('latency'))}.")

"""Latency of a pair with random weights: passes, images, mixtures, loops at forced acceptance.

    python -m eval.latency mini --out runs/latency_mini
    python -m eval.latency llava7b_68m --parts passes forced --batches 1 8
    python -m eval.latency llava7b_68m --parts flops
    python -m eval.latency mini --parts startup

No weights are read: they are made on one device. Passes on a mesh are timed by block_efficiency,
with --model-parallel; more hosts would time no more than one. The part `startup` is of the shipped
pair instead, whatever the preset: `jaxspec generate` as a process of its own, cold and with its
programs cached on disk, and what the host adds to a call. Writes results.json and table.md into
--out, part for part; the same command goes on where one was stopped.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from PIL import Image
from tqdm import tqdm

from eval.lib.random_pair import (
    LatencyConfig,
    Pair,
    count_flops,
    measure_forced,
    measure_images,
    measure_mixtures,
    measure_passes,
)
from eval.lib.report import Run, results_folder
from eval.lib.tables import Record, Table, number, percent
from jaxspec.command import load_preset, preset_names, run_script
from jaxspec.data.images import to_rgb
from jaxspec.decoding.captioners import CachedCaptions, load_captioner
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.files import ASSETS
from jaxspec.runtime import setup_runtime
from picturebook import test_set

Part = Literal["passes", "images", "captions", "forced", "mixtures", "flops", "startup"]
CAPTIONERS = (
    "blip:Salesforce/blip-image-captioning-base",
    "florence2:florence-community/Florence-2-large-ft",
)
"""TABED's, in its Table 11."""
STARTS, CALLS = 3, 50
"""Warm starts after a cold one, and warm calls, whose medians count."""


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    out: Path = Path("runs/latency/PRESET"),
    parts: tuple[Part, ...] = ("passes", "images", "forced", "mixtures"),
    batches: tuple[int, ...] = (1,),
    views: tuple[int, ...] = (1, 4),
    captioners: tuple[str, ...] = CAPTIONERS,
    dtype: str | None = None,
    rules: tuple[str, ...] = (
        "mt-paper",
        "mt-release",
        "mtcp-paper",
        "mtcp-release",
        "hard_match",
    ),
    debug: bool = False,
) -> None:
    """Times what the preset under configs/latency names.

    Args:
      preset: one of those named above, from configs/latency.
      out: directory for results.json and table.md.
      parts: what to time.
      batches: rows of the loops at forced acceptance.
      views: draft views of those loops.
      captioners: what captions images in the part `captions`, as `--captioner` elsewhere.
      dtype: of weights and caches, such as float16; by default the preset's.
      rules: weightings of the blocks to time, on as many views as the preset names.
      debug: try the command out: one run of everything, eight new tokens, into runs/debug. All else
        is as it would be.
    """
    given = dict(locals())
    config: LatencyConfig = load_preset("latency", preset)
    starts, calls = STARTS, CALLS
    config = replace(config, dtype=dtype or config.dtype)
    if debug:
        config, starts, calls = replace(config, repeats=1, new=min(8, config.new)), 1, 1
    timed = f"the least of {config.repeats} runs; of start-up medians"
    with Run(preset, given, results_folder(out, preset, debug), timed) as run:
        setup_runtime()
        run.restore(("part",))
        done = {row["part"] for row in run.rows}
        for name, measure in measures(
            config, parts, batches, views, captioners, rules, starts, calls
        ).items():
            if name not in done:
                run.add([{"part": name} | row for row in measure()], [])
            run.write(*latency_tables(preset, run.rows, config.papers))


def measures(
    config: LatencyConfig,
    parts: Sequence[Part],
    batches: Sequence[int],
    views: Sequence[int],
    captioners: Sequence[str],
    rules: Sequence[str],
    starts: int,
    calls: int,
) -> dict[str, Callable[[], Sequence[Record]]]:
    """Return what is timed apart, by name, in its order: rows of one are saved together."""
    models = str(ASSETS / "mini" / "target"), str(ASSETS / "mini" / "draft")
    pair = Pair(config)
    found: dict[str, dict[str, Callable[[], Sequence[Record]]]] = {
        "passes": {"passes": partial(measure_passes, pair)},
        "images": {"images": partial(measure_images, pair)},
        "captions": {
            f"captions, {text}": partial(measure_captions, text, config.images, config.repeats)
            for text in captioners
        },
        "forced": {
            f"forced, B={b}, R={r}": partial(measure_forced, pair, b, r)
            for b in batches
            for r in views
        },
        "mixtures": {
            f"mixtures, B={b}": partial(measure_mixtures, pair, rules, b) for b in batches
        },
        "flops": {"flops": partial(count_flops, config)},
        "startup": {"host": partial(measure_host, *models, calls)},
    }
    # Before this process takes the device's memory.
    first = {"starts": partial(measure_starts, *models, starts)} if "startup" in parts else {}
    return first | {
        name: measure for part in found if part in parts for name, measure in found[part].items()
    }


def measure_starts(target: str, draft: str, warm: int = STARTS) -> list[Record]:
    """Time whole processes in wall-clock and CPU seconds; a failing one is an InputError."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.png"
        Image.new("RGB", (64, 64), "white").save(page)
        command = [
            sys.executable,
            "-m",
            "jaxspec",
            "generate",
            "--target",
            target,
            "--draft",
            draft,
        ]
        command += ["--image", str(page), "--prompt", "What is this?", "--max-new-tokens", "16"]
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        times = []
        for _ in tqdm(range(warm + 1), "starts", unit="start"):
            used, begun = _children(), time.perf_counter()
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, env=environment
            )
            if done.returncode != 0:
                last = done.stderr.strip().rpartition("\n")[2].rpartition("error: ")[2]
                raise InputError(last or f"jaxspec generate: exit code {done.returncode}")
            times.append((time.perf_counter() - begun, _children() - used))
    found = {"cold": times[0], "warm": np.median(times[1:] or times, axis=0).tolist()}
    return [
        {
            "kind": "startup",
            "what": f"start to answer, {name}",
            "seconds": wall,
            "cpu_seconds": cpu,
            "runs": runs,
        }
        for (name, (wall, cpu)), runs in zip(found.items(), (1, warm), strict=True)
    ]


def _children() -> float:
    """Return the CPU seconds of all finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_captions(text: str, images: Sequence[int], repeats: int) -> list[Record]:
    """Time a captioner on 1, 2 ... pages of a story, none of whose captions it finds on disk."""
    captioner = load_captioner(text)
    if isinstance(captioner, CachedCaptions):
        captioner = captioner.captioner
    pages = [to_rgb(page) for page in test_set("album", 1)[0].images]
    rows = []
    for count in (count for count in images if count):
        times = []
        for _ in tqdm(range(repeats + 1), f"captions, n = {count}", unit="call"):
            begun = time.perf_counter()
            captioner.caption((pages * count)[:count])
            times.append(time.perf_counter() - begun)
        least = min(times[1:])  # the first call compiles
        rows.append({"kind": "captions", "captioner": text, "images": count, "seconds": least})
    return rows


def measure_host(target: str, draft: str, calls: int = CALLS) -> list[Record]:
    """Time what a warm call takes beyond prefill and decoding, text only and with an image."""
    exact = jnp.dtype("float32")
    engine = Engine(
        LoadedModel.load(target, exact),
        LoadedModel.load(draft, exact),
        EngineConfig(new_buckets=(16,)),
    )
    rows = []
    for name, images in (("text", []), ("one image", [Image.new("RGB", (64, 64), "white")])):
        request = Request(engine.encoder.prompt("What is this?", images), 16)
        engine.generate([request])
        spent = []
        for _ in tqdm(range(calls), f"host, {name}", unit="call"):
            begun = time.perf_counter()
            (result,) = engine.generate([request])
            spent.append(time.perf_counter() - begun - (result.prefill_ms + result.decode_ms) / 1e3)
        what = f"host time of a call, {name}"
        row = {
            "kind": "startup",
            "what": what,
            "seconds": float(np.median(spent)),
            "cpu_seconds": None,
        }
        rows.append(row | {"runs": calls})
    return rows


def latency_tables(
    name: str, rows: Sequence[Record], papers: Mapping[str, str] | None = None
) -> list[Table]:
    """Return a table for each kind of rows that there are, and below it what papers print."""
    makers = {
        "passes": lambda rows: passes_table(name, rows),
        "images": lambda rows: images_table(name, rows),
        "captions": captions_table,
        "forced": lambda rows: forced_table(name, rows),
        "mixtures": lambda rows: mixtures_table(name, rows),
        "flops": lambda rows: flops_table(name, rows),
        "startup": startup_table,
    }
    tables = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        table = makers[kind]([row for row in rows if row["kind"] == kind])
        printed = [f"paper: {papers[kind]}"] if papers and kind in papers else []
        tables.append(table._replace(notes=[*table.notes, *printed]))
    return tables


def passes_table(name: str, rows: Sequence[Record]) -> Table:
    """Return a line per shape: T_p, blocks and drafts in T_p, and the share of the roofline."""
    roofline = rows[0]["roofline"]
    gammas, views = (list(rows[0][field]) for field in ("verify_ms", "draft_ms"))
    header = ["B", "S", "T_p ms"]
    header += [f"T_p({int(gamma) + 1})/T_p" for gamma in gammas]
    header += [f"T_q/T_p, {r} view{'s' * (r != '1')}" for r in views]
    header += ["GB/s", "of copy", "of read", "of matmul"]
    cells = [
        [
            *(str(row["batch"]), str(row["slots"]), f"{row['target_ms']:.3g}"),
            *(number(row["verify_ms"][gamma] / row["target_ms"]) for gamma in gammas),
            *(number(row["draft_ms"][r] / row["target_ms"], 3) for r in views),
            number(row["effective_gbps"], 1),
            *(percent(row[share]) for share in ("copy_share", "read_share", "matmul_share")),
        ]
        for row in rows
    ]
    notes = [
        "What the papers' Eq. (1) takes for granted: that a pass over a block costs what one over "
        "a token does, that "
        "views in one batch cost what one view does, and that a draft pass costs next to nothing.",
        "Passes inside compiled loops, the least of interleaved runs. GB/s: weights and cache "
        "read once a pass over "
        f"one token, beside {roofline['copy_gbps']:.1f} GB/s copied, {roofline['read_gbps']:.1f} "
        "GB/s read by a vector "
        f"times a matrix, and {roofline['matmul_tflops']:.3g} Tflop/s of square matrices in the "
        "same run.",
    ]
    return Table(f"Passes of {name}", header, cells, notes)


def images_table(name: str, rows: Sequence[Record]) -> Table:
    """Return a line per number of images."""
    fields = [field for field in rows[0] if field.endswith("_ms")]
    header = ["images", *(f"{field[:-3].replace('_', ' ')} ms" for field in fields)]
    cells = [
        [
            str(row["images"]),
            *("-" if row[field] is None else f"{row[field]:.3g}" for field in fields),
        ]
        for row in rows
    ]
    return Table(
        f"Images before the first token, {name}",
        header,
        cells,
        ["Batch 1; towers and prefill apart."],
    )


def captions_table(rows: Sequence[Record]) -> Table:
    """Return a line per captioner, with a column per number of images."""
    counts = list(dict.fromkeys(row["images"] for row in rows))
    seconds = {(row["captioner"], row["images"]): row["seconds"] for row in rows}
    cells = [
        [name, *(f"{seconds[name, count]:.3g}" for count in counts)]
        for name in dict.fromkeys(row["captioner"] for row in rows)
    ]
    header = ["captioner", *(f"n = {count}, s" for count in counts)]
    notes = [
        "Seconds to caption all n images of a prompt in one batch; the least of the runs. torch "
        "runs BLIP and Florence-2 "
        "on the host's CPU. Tower and prefill of the target are in the table of images.",
    ]
    return Table("Captions by images", header, cells, notes)


def forced_table(name: str, rows: Sequence[Record]) -> Table:
    """Return a line per batch, views and forced tokens a pass."""
    header = [
        "B",
        "views",
        "forced tau",
        "J",
        "plain tok/s",
        "tok/s",
        "speed-up",
        "Eq. (1)",
        "with T_p(J+1)",
    ]
    header += ["efficiency", "block ms", "its passes"]
    cells = [
        [
            *(
                str(row["batch"]),
                str(row["views"]),
                f"{row['forced_tokens_per_pass']:g}",
                str(row["gamma"]),
            ),
            *(number(row[field], 1) for field in ("plain_tokens_per_second", "tokens_per_second")),
            *(
                number(row[field])
                for field in (
                    "speedup_measured",
                    "speedup_predicted",
                    "speedup_predicted_with_verify",
                )
            ),
            *(number(row["loop_efficiency"]), f"{row['block_ms']:.3g}"),
            f"{row['gamma'] * row['draft_ms'] + row['verify_ms']:.3g}",
        ]
        for row in rows
    ]
    notes = [
        "FORCED ACCEPTANCE: random weights; draft and target compute all of a real block, and the "
        "number of accepted "
        "tokens is given, not earned. These are times of loops, and say nothing about any draft's "
        "quality.",
        "speed-up: over plain decoding in the same run; efficiency: measured over predicted with "
        "T_p(J+1).",
    ]
    return Table(f"Loops at forced acceptance, {name}", header, cells, notes)


def mixtures_table(name: str, rows: Sequence[Record]) -> Table:
    """Return a line per number of views and weighting."""
    header = [
        "views, weighting",
        "B",
        "block ms",
        "x one view",
        "weighting's share",
        "state bytes a row",
    ]
    cells = [
        [
            *(f"{row['views']} {row['rule']}", str(row["batch"]), f"{row['block_ms']:.3g}"),
            number(row["times_one_view"]),
            "-" if row["rule"] == "static" else percent(row["share"], 1),
            str(row["state_bytes"]),
        ]
        for row in rows
    ]
    notes = [
        "A block is drafting, the target's pass, verification and learning, inside a compiled "
        "loop; the least of "
        "interleaved runs. share: over a block of the same views with static weights.",
    ]
    return Table(f"Blocks by views and weighting, {name}", header, cells, notes)


def flops_table(name: str, rows: Sequence[Record]) -> Table:
    """Return a line per pass."""
    header = ["model", "views", "tokens", "GFLOPs of weights", "with attention"]
    cells = [
        [
            row["model"],
            str(row["views"]),
            str(row["tokens"]),
            *(f"{row[f]:.2f}" for f in ("weights_gflops", "gflops")),
        ]
        for row in rows
    ]
    notes = ["Counted from shapes, two a weight and token, embeddings that are looked up left out."]
    return Table(f"Operations of {name}", header, cells, notes)


def startup_table(rows: Sequence[Record]) -> Table:
    """Return a line per kind of start and call."""
    cells = [
        [
            *(row["what"], f"{row['seconds']:.4g}"),
            *("-" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.3g}", str(row["runs"])),
        ]
        for row in rows
    ]
    notes = ["The shipped pair; medians of so many runs, of warm ones after a cold one."]
    return Table("Start-up and host time", ["", "seconds", "CPU seconds", "runs"], cells, notes)


if __name__ == "__main__":
    run_script(main, f"{__doc__}\nPresets: {', '.join(preset_names('latency'))}.")

"""Time a pair with random weights: passes, images, mixtures, loops at forced acceptance.

    python -m eval.latency mini --out runs/latency_mini
    python -m eval.latency llava7b_68m --parts passes forced --batches 1 8
    python -m eval.latency llava7b_68m --parts flops
    python -m eval.latency mini --parts startup

The weights are random, on one device; no checkpoint is read. To time passes on a mesh, run
block_efficiency with --model-parallel. The part `startup` always times the shipped pair: processes
of `jaxspec generate`, cold and with programs cached on disk, and the host's part of a call. Each
part is written to results.json and table.md in --out when it is done; the same command continues a
stopped run. With the `plots` extra the part `images` also draws inference_times.png.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import tyro

from eval.lib.output.report import Run, results_folder
from eval.lib.output.tables import Record, has
from eval.lib.times.figures import draw_inference_times
from eval.lib.times.forced import measure_forced
from eval.lib.times.random_pair import (
    LatencyConfig,
    Pair,
    count_flops,
    measure_images,
    measure_mixtures,
    measure_passes,
)
from eval.lib.times.startup import measure_captions, measure_host, measure_starts
from eval.lib.times.tables import latency_tables
from jaxspec.cli.options import run_script
from jaxspec.command import load_preset, preset_names
from jaxspec.errors import check_all_counts
from jaxspec.runtime import setup_runtime
from jaxspec_demo import ASSETS

Part = Literal["passes", "images", "captions", "forced", "mixtures", "flops", "startup"]
CAPTIONERS = (
    "blip:Salesforce/blip-image-captioning-base",
    "florence2:florence-community/Florence-2-large-ft",
)
"""The captioners of TABED's Table 11."""
STARTS, CALLS = 3, 50
"""Warm starts after a cold one, and warm calls; tables show their medians."""
RULES = "mt-paper", "mt-release", "mtcp-paper", "mtcp-release", "hard_match"
"""Weightings of the part `mixtures`."""


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    out: Path = Path("runs/latency/PRESET"),
    parts: tuple[Part, ...] = ("passes", "images", "forced", "mixtures"),
    batches: tuple[int, ...] = (1,),
    views: tuple[int, ...] = (1, 4),
    gammas: tuple[int, ...] | None = None,
    captioners: tuple[str, ...] = CAPTIONERS,
    dtype: str | None = None,
    debug: bool = False,
) -> None:
    """Time the shapes of a preset in configs/latency.

    Args:
      preset: A preset of configs/latency, listed above.
      out: Directory for results.json and table.md.
      parts: What to time.
      batches: Batch sizes of the loops at forced acceptance and of the mixtures.
      views: Numbers of draft views in the loops at forced acceptance.
      gammas: Draft lengths of the passes over blocks; the default is the preset's.
      captioners: Captioners of the part `captions`, written as for `--captioner`.
      dtype: Data type of weights and caches, such as float16; the default is the preset's.
      debug: Try the command out: one run, at most eight new tokens, written to runs/debug.
    """
    options = dict(locals())
    check_all_counts(batches=batches, views=views, gammas=gammas or ())
    config: LatencyConfig = load_preset("latency", preset)
    starts, calls = STARTS, CALLS
    config = replace(config, dtype=dtype or config.dtype, gammas=gammas or config.gammas)
    if debug:
        config, starts, calls = replace(config, repeats=1, new=min(8, config.new)), 1, 1
    timed = f"the least of {config.repeats} runs; of start-up medians"
    with Run(preset, options, results_folder(out, preset, debug), timed) as run:
        setup_runtime()
        run.restore()
        models = str(ASSETS / "mini" / "target"), str(ASSETS / "mini" / "draft")
        pair = Pair(config)
        works: list[tuple[Part, str, Callable[[], Sequence[Record]]]] = [
            # Starts come first, before this process takes the device's memory.
            ("startup", "starts", partial(measure_starts, *models, starts)),
            *(
                ("passes", f"passes, B={b}, S={slots}", partial(measure_passes, pair, b, slots))
                for b, slots in config.shapes
            ),
            ("images", "images", partial(measure_images, pair)),
        ]
        for text in captioners:
            work = partial(measure_captions, text, config.images, config.repeats)
            works.append(("captions", f"captions, {text}", work))
        for b, r in product(batches, views):
            works.append(("forced", f"forced, B={b}, R={r}", partial(measure_forced, pair, b, r)))
        for b in batches:
            work = partial(measure_mixtures, pair, RULES, b)
            works.append(("mixtures", f"mixtures, B={b}", work))
        works.append(("flops", "flops", partial(count_flops, config)))
        works.append(("startup", "host", partial(measure_host, *models, calls)))
        for part, name, measure in works:
            if part not in parts:
                continue
            if not has(run.rows, part=name):
                run.add([{"part": name} | row for row in measure()])
            run.write(*latency_tables(preset, run.rows, config.papers))
        draw_inference_times(run.rows, run.folder, preset)


if __name__ == "__main__":
    run_script(main, f"{__doc__}\nPresets: {', '.join(preset_names('latency'))}.")

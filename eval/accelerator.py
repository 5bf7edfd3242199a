"""Measure what needs an accelerator: passes and forced loops of LLaVA-1.5 with its drafts.

    python -m eval.accelerator --out results/accelerator --page docs/performance.md
    python -m eval.accelerator --out results/accelerator --page docs/performance.md --parts

The weights are random and made on the device; nothing is downloaded. Each part runs as its own
process, one after the other, so that a part that fails or runs out of time does not affect the
others; finished parts are in --out at once. The exit code is 1 if a part did not finish.

--out/table.md shows the measurements, and for TPUs the compiler's estimates, which are made after
all parts. The second command measures nothing and writes the table again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.lib.output.report import read_results
from eval.lib.output.tables import Record, Table, digits, markdown, percent, put_between, show
from jaxspec.cli.options import run_script
from jaxspec.engine.plan import CHIPS
from jaxspec.errors import InputError, nearest
from jaxspec.files import trial_of, write_text

PARTS = {
    "llava7b_68m": "eval.latency llava7b_68m --parts forced --views 2 1",
    "throughput": "eval.latency llava7b_68m --parts forced --batches 4 16 --views 1",
    "llava7b_passes": "eval.latency llava7b_68m --parts passes --gammas 5",
    "startup": "eval.latency mini --parts startup",
    "llava7b_images": "eval.latency llava7b_68m --parts images",
    "llava7b_160m": "eval.latency llava7b_160m --parts forced --views 1",
    "llava13b_68m": "eval.latency llava13b_68m --parts forced passes --views 1 --gammas 5",
}
"""The most important part comes first."""
ESTIMATED = "--programs plain chain --batches 1 4 --prompt 1024 --new 128"
SLOTS = 1024


def main(
    out: Path = Path("runs/accelerator"),
    minutes: float = 9.5,
    parts: tuple[str, ...] = tuple(PARTS),
    page: Path | None = None,
    debug: bool = False,
) -> None:
    """Run the parts until the time is spent.

    Args:
      out: Directory; each part gets a folder in it.
      minutes: Time limit; the running part is stopped then, and later parts are skipped.
      parts: Parts to run; an empty list only writes the table of the results in --out.
      page: Page that gets the table, between its markers <!-- accelerator: --> and <!--
        /accelerator -->.
      debug: Try the parts out on a tiny pair, in runs/debug, each with its own --debug.
    """
    for name in parts:
        if name not in PARTS:
            raise InputError(f"parts: no part {name!r}; {nearest(name, list(PARTS))}")
    if page is not None and not page.is_file():
        raise InputError(f"page {page}: no such file; give one with the markers of the table")
    end = time.monotonic() + 60 * minutes
    failed = []
    for name in parts:
        script, preset, *options = PARTS[name].split()
        argv = ["tiny", *options, "--debug"] if debug else [preset, *options]
        start = time.monotonic()
        code = run_module([script, *argv, "--out", str(out / name)], end - start)
        if code != 0:
            failed.append(name)
        print(f"{name}: {code}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    folder = trial_of(out) if debug else out
    if parts and not debug:
        failed += [f"{preset}'s estimate" for preset in estimate(folder)]
    table = summary(folder)
    show(table)
    if table.cells:
        write_text(folder / "table.md", markdown(table))
        if page is not None:
            put_between(page, "accelerator", markdown(table).partition("\n")[2].strip())
    if failed:
        sys.exit(f"accelerator: not done: {', '.join(failed)}")


def run_module(command: list[str], seconds: float, **environment: str) -> int | str:
    """Run `python -m` with these words; return its exit code, or that its time ran out."""
    argv = [sys.executable, "-m", *command]
    if seconds <= 0:
        return "out of time"
    try:
        return subprocess.run(
            argv, timeout=seconds, check=False, env=os.environ | environment
        ).returncode
    except subprocess.TimeoutExpired:
        return "out of time"


def results(out: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield preset and results of the parts that are done."""
    for name in PARTS:
        if (out / name / "results.json").exists():
            contents = read_results(out / name)
            yield contents["run"]["preset"], contents  # of a trial: tiny


def estimate(out: Path) -> list[str]:
    """Compile each preset for the measured TPU; return the presets that failed."""
    devices = {preset: contents["run"]["device"] for preset, contents in results(out)}
    failed = []
    for preset, device in devices.items():
        tpus = (name for name, chip in CHIPS.items() if name[0] == "v" and chip.kind in device)
        kind, folder = next(tpus, None), out / "estimated" / preset
        if preset == "mini" or kind is None or (folder / "results.json").exists():
            continue
        argv = ["eval.compiled", preset, "--chips", f"{kind}:1x1", *ESTIMATED.split()]
        if run_module([*argv, "--out", str(folder)], 1200, JAX_PLATFORMS="cpu") != 0:
            failed.append(preset)
    return failed


def summary(out: Path) -> Table:
    """Return a line per figure, next to the compiler's estimates if there are any."""
    cells, devices = [], []
    for preset, contents in results(out):
        devices.append(contents["run"]["device"])
        estimated = out / "estimated" / preset
        done = (estimated / "results.json").exists()
        rows = read_results(estimated)["rows"] if done else []
        least = {(row["program"], row["batch"]): row["least_ms"] for row in rows if row["fits"]}
        cells += [[preset, *figures(row, least)] for row in contents["rows"]]
    columns = ["pair", "what", "measured", "estimated ms"]
    note = (
        f"These figures were measured on {', '.join(dict.fromkeys(devices))}, with random "
        "weights. We set how many guesses the decoding loop accepts."
    )
    if any(estimate != "-" for *_, estimate in cells):
        note += (
            f" Estimated by the compiler, for {SLOTS:,} + 128 slots: the larger of its cycles and "
            "of reading the weights once."
        )
    else:
        columns, cells = columns[:-1], [cell[:-1] for cell in cells]
    return Table("On an accelerator", columns, cells, [note])


def figures(row: Record, least: Mapping[tuple[str, int], float]) -> list[str]:
    """Return a row's label, its figure, and the compiler's estimate."""

    def expected(program: str, same: bool) -> str:
        return digits(least.get((program, row["batch"])) if same else None)

    if row["kind"] == "passes":
        what = f"a pass, B={row['batch']}, {row['slots']} slots"
        share = f"{row['target_ms']:.3g} ms, {percent(row['read_share'])} of bandwidth"
        return [what, share, expected("plain", row["slots"] == SLOTS)]
    if row["kind"] == "forced":
        tau, batch, views = (row[name] for name in ("forced_tokens_per_pass", "batch", "views"))
        what = f"{tau:g} tokens a block, B={batch}, {views} view{'s' * (views > 1)}"
        speed = f"{row['speedup_measured']:.2f} x plain, {row['block_ms']:.3g} ms a block"
        return [what, speed, expected("chain", row["views"] == 2)]
    if row["kind"] == "images":
        fields = ("target_tower_ms", "target_prefill_ms")
        times = " + ".join(digits(row.get(field)) for field in fields)
        return [f"tower and prefill, {row['images']} images", f"{times} ms", "-"]
    return [row["what"], f"{row['seconds']:.3g} s", "-"]


if __name__ == "__main__":
    run_script(main, __doc__)

"""What comes before the first token: process start with a cold and a warm cache of programs, and the host's own time.

    python -m eval.startup --out runs/startup
    python -m eval.startup --target path/to/llava-1.5-7b-hf --draft path/to/llava-68m

Every start is a process of its own (`jaxspec generate`, one page, 16 new tokens), cold with an empty cache directory.
Host time is what a warm `Engine.generate` takes beyond prefill and decoding, text only and with an image. Writes
results.json and table.md into --out.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from PIL import Image
from tqdm import tqdm

from configs.eval.mini import ASSETS
from jaxspec.command import run_script
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError, check_counts
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.runtime import setup_runtime


def main(
    target: str = str(ASSETS / "target"),
    draft: str = str(ASSETS / "draft"),
    out: Path = Path("runs/startup"),
    starts: int = 3,
    calls: int = 50,
) -> None:
    """Times starts and the host's part of calls.

    Args:
      target: directory or hub id.
      draft: directory or hub id.
      out: directory for results.json and table.md.
      starts: warm starts, after one cold.
      calls: warm calls of each kind in one process.
    """
    given = dict(locals())
    check_counts(starts=starts, calls=calls)
    fresh = begin(out, given)
    found = [start(target, draft, starts), host(target, draft, calls)]
    rows = [row for part in found for row in part]
    header = ["", "seconds", "CPU seconds"]
    cells = [
        [row["what"], f"{row['seconds']:.4g}", "-" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.3g}"]
        for row in rows
    ]
    load = os.getloadavg()[0]
    notes = [f"Medians. {starts} warm starts after one cold; {calls} warm calls of each kind; load {load:.1f}."]
    table = ("Start-up and host time", header, cells, notes)
    run = describe_run(f"{os.path.relpath(target)} {os.path.relpath(draft)}", given)
    write_results(fresh, run, rows, [], markdown(*table))
    finish(fresh, out)
    show(*table)


def start(target: str, draft: str, warm: int) -> list[dict[str, Any]]:
    """Wall-clock and CPU seconds of whole processes. Raises InputError with the last line of one that fails."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.png"
        Image.new("RGB", (64, 64), "white").save(page)
        command = [sys.executable, "-m", "jaxspec", "generate", "--target", target, "--draft", draft]
        command += ["--image", str(page), "--prompt", "What is this?", "--max-new-tokens", "16"]
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        times = []
        for _ in tqdm(range(warm + 1), "starts", unit="start"):
            used = _children()
            begun = time.perf_counter()
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                last = done.stderr.strip().rpartition("\n")[2].rpartition("error: ")[2]
                raise InputError(last or f"jaxspec generate: exit code {done.returncode}")
            times.append((time.perf_counter() - begun, _children() - used))
    cold, *rest = times
    medians = np.median(rest, axis=0).tolist()
    return [
        {"what": f"start to answer, {name}", "seconds": wall, "cpu_seconds": cpu}
        for name, (wall, cpu) in (("cold", cold), ("warm", medians))
    ]


def _children() -> float:
    """CPU seconds of all finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def host(target: str, draft: str, calls: int) -> list[dict[str, Any]]:
    """Seconds of a call beyond those of the device."""
    setup_runtime()
    exact = jnp.dtype("float32")
    models = LoadedModel.load(target, exact), LoadedModel.load(draft, exact)
    engine = Engine(*models, EngineConfig(new_buckets=(16,)))
    page = Image.new("RGB", (64, 64), "white")
    rows = []
    for name, images in (("text", []), ("one image", [page])):
        request = Request(engine.encoder.prompt("What is this?", images), 16)
        engine.generate([request])
        spent = []
        for _ in tqdm(range(calls), f"host, {name}", unit="call"):
            begun = time.perf_counter()
            (result,) = engine.generate([request])
            spent.append(time.perf_counter() - begun - (result.prefill_ms + result.decode_ms) / 1e3)
        rows.append({"what": f"host time of a call, {name}", "seconds": float(np.median(spent)), "cpu_seconds": None})
    return rows


if __name__ == "__main__":
    run_script(main, __doc__)

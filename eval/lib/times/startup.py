"""Time process starts, captions, and the host's part of a call."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from PIL import Image
from tqdm import tqdm

from eval.lib.output.tables import Record
from jaxspec.data.images import to_rgb
from jaxspec.engine.captioners import CachedCaptions, load_captioner
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from picturebook import test_set


def measure_starts(target: str, draft: str, warm: int) -> list[Record]:
    """Time `jaxspec generate` as a process: once cold, then `warm` times with cached programs.

    Raises InputError with the last line of a process that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.png"
        Image.new("RGB", (64, 64), "white").save(page)
        command = [sys.executable, "-m", "jaxspec", "generate", "--target", target]
        command += ["--draft", draft, "--image", str(page), "--prompt", "What is this?"]
        command += ["--max-new-tokens", "16"]
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        times = []
        for _ in tqdm(range(warm + 1), "starts", unit="start"):
            used, start = _children(), time.perf_counter()
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, env=environment
            )
            if done.returncode != 0:
                last = done.stderr.strip().rpartition("\n")[2].rpartition("error: ")[2]
                raise InputError(last or f"jaxspec generate: exit code {done.returncode}")
            times.append((time.perf_counter() - start, _children() - used))
    seconds = {"cold": times[0], "warm": np.median(times[1:] or times, axis=0).tolist()}
    return [
        {"kind": "startup", "what": f"start to answer, {name}"}
        | {"seconds": wall, "cpu_seconds": cpu, "runs": runs}
        for (name, (wall, cpu)), runs in zip(seconds.items(), (1, warm), strict=True)
    ]


def _children() -> float:
    """Return the CPU seconds of all finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_captions(text: str, images: Sequence[int], repeats: int) -> list[Record]:
    """Time a captioner on each number of pages of a story, without captions from disk."""
    captioner = load_captioner(text)
    if isinstance(captioner, CachedCaptions):
        captioner = captioner.captioner
    pages = [to_rgb(page) for page in test_set("album", 1)[0].images]
    rows = []
    for count in (count for count in images if count):
        times = []
        for _ in tqdm(range(repeats + 1), f"captions, n = {count}", unit="call"):
            start = time.perf_counter()
            captioner.caption((pages * count)[:count])
            times.append(time.perf_counter() - start)
        least = min(times[1:])  # the first call compiles
        rows.append({"kind": "captions", "captioner": text, "images": count, "seconds": least})
    return rows


def measure_host(target: str, draft: str, calls: int) -> list[Record]:
    """Time what the host adds to a warm call, for a text prompt and one with an image."""
    exact = jnp.dtype("float32")
    engine = Engine(
        LoadedModel.load(target, exact),
        LoadedModel.load(draft, exact),
        EngineConfig(gamma=5, new_buckets=(16,), generation_config="ignore"),
    )
    rows = []
    for name, images in (("text", []), ("one image", [Image.new("RGB", (64, 64), "white")])):
        request = Request(engine.encoder.prompt("What is this?", images), 16)
        engine.generate([request])
        spent = []
        for _ in tqdm(range(calls), f"host, {name}", unit="call"):
            start = time.perf_counter()
            (result,) = engine.generate([request])
            spent.append(time.perf_counter() - start - (result.prefill_ms + result.decode_ms) / 1e3)
        row = {"kind": "startup", "what": f"host time of a call, {name}"}
        row |= {"seconds": float(np.median(spent)), "cpu_seconds": None, "runs": calls}
        rows.append(row)
    return rows

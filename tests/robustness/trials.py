"""Try damaged input by the thousand, which must be used, or refused in one line. Each trial is made
anew from its seed.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from PIL import Image

from jaxspec.cli import main
from jaxspec.data.images import Picture, load_image
from jaxspec.errors import InputError
from tests import tiny
from tests.robustness.damage import Outcome, judge, outcome
from tests.robustness.damaged_rows import row_outcome
from tests.tiny.families import FAMILIES, write

SECONDS, BYTES = 20.0, 2 << 30
"""What one trial may take."""
PATIENCE = 60.0
"""Seconds after which a process is replaced that says nothing."""
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
WORDS = (
    *("generate", "inspect", "export", "collaborate", "demo", "--help", "--version", "--prompt"),
    *("--target", "--draft"),
    *("--image", "--views", "--weights", "--weighting", "--gamma", "--tree", "--temperature"),
    *("--top-p", "--top-k"),
    *("--max-new-tokens", "--seed", "--dtype", "--captioner", "--model-parallel"),
    *("--combination", "--method", "--gammas", "--default-proposer", "--json"),
    *("--no-chat-template", "--no-tiles"),
    *("--overwrite", "--vocab-of", "--text-only"),
)
VALUES = (
    *("", "-1", "0", "1", "5", "1e309", "nan", "99999999999999999999", "0.5,0.5", "M,T", "head"),
    *("C", "P36", "M,M", "X"),
    *("2:9", "dynamic:3", "dynamic:0", "mt-paper", "grid:window=x", "grid:=", ",", "/", "."),
    *("..", "/dev/null", "nothing"),
    *(
        "a\nb",
        "\x1b[2J",
        "\udce9",
        "é",
        "a" * 300,
        "<image>",
        "<image><image>",
        "weighted:1,1",
        "contrastive:mu=nan",
    ),
)


def checkpoint(folder: Path, seed: int) -> Outcome:
    """Damage a tiny checkpoint of one of the families, with its tokeniser, image processor and KV
    head.
    """
    family = list(FAMILIES)[seed % len(FAMILIES)]
    whole = folder / family
    if not whole.exists():
        write(whole, family)
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return outcome(whole, scratch, seed)


def row(folder: Path, seed: int) -> Outcome:
    """Damage rows of data, in JSONL, JSON or parquet, before the reader of their kind."""
    return row_outcome(folder, seed, tiny.loaded({}))


def image(folder: Path, seed: int) -> Outcome:
    """Damage bytes of an image file, or cut it short."""
    draw = random.Random(seed)
    kind = draw.choice(FORMATS)
    buffer = io.BytesIO()
    mode = draw.choice(
        ("RGB", "L", "1") if kind in ("JPEG", "WEBP", "PPM") else ("RGB", "L", "P", "1")
    )
    Image.new(mode, (draw.randint(1, 40), draw.randint(1, 40))).save(buffer, kind)
    raw = bytearray(buffer.getvalue())
    for _ in range(draw.choice((1, 2, 8))):
        # most of them in the header
        raw[min(int(draw.expovariate(1 / 24)), len(raw) - 1)] = draw.randrange(256)
    raw = raw if draw.random() < 0.8 else raw[: draw.randrange(len(raw))]
    path = folder / "image"
    path.write_bytes(raw)
    return judge(seed, "image", kind, lambda: Picture.of(load_image(path)).rgb())


def command_line(folder: Path, seed: int) -> Outcome:
    """Call the command with words at random: it ends with 0 or 2 and no traceback, and writes no
    file.
    """
    draw = random.Random(seed)
    words = [draw.choice(("generate", "generate", "inspect", "export"))]
    words += [
        draw.choice(WORDS if draw.random() < 0.5 else VALUES) for _ in range(draw.randint(0, 7))
    ]
    words = [word for word in words if word != "demo"]

    def call() -> None:
        place, said = Path.cwd(), io.StringIO()
        empty = folder / "empty"
        empty.mkdir(exist_ok=True)
        os.chdir(empty)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main(words)
        except SystemExit as end:
            if end.code == 2:
                raise InputError(said.getvalue().splitlines()[-1]) from end
            if end.code not in (0, None):
                raise RuntimeError(f"exit {end.code}") from end
        finally:
            os.chdir(place)
            assert not os.listdir(empty), f"wrote {os.listdir(empty)}"

    return judge(seed, "command line", " ".join(words), call)


TRIALS: dict[str, tuple[Callable[[Path, int], Outcome], float]] = {
    "checkpoints": (checkpoint, 0.5),
    "rows": (row, 0.3),
    "images": (image, 0.1),
    "command lines": (command_line, 0.1),
}
"""What is damaged, and its share of the trials."""


def run(name: str, seeds: range) -> Iterator[Outcome]:
    """Yield the outcome of each seed, by a process that is replaced if it does not answer."""
    trial = TRIALS[name][0]
    pool = _process()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for seed in seeds:
                try:
                    yield pool.apply_async(trial, (Path(folder), seed)).get(PATIENCE)
                except multiprocessing.TimeoutError:
                    pool.terminate()
                    pool.join()
                    pool = _process()
                    yield Outcome(seed, name, "", f"no answer within {PATIENCE:g} s", PATIENCE, 0)
                    shutil.rmtree(Path(folder) / "scratch", ignore_errors=True)
        finally:
            pool.terminate()
            pool.join()


def is_bad(one: Outcome) -> bool:
    """Return whether a trial ended otherwise than it may."""
    return not one.well or one.seconds > SECONDS or one.growth > BYTES


def summary(name: str, found: list[Outcome]) -> dict[str, Any]:
    """Return a row of the table."""
    ends = [one.ended for one in found if not is_bad(one)]
    return {
        "damage to": name,
        "tried": len(found),
        "used": ends.count("used"),
        "refused": ends.count("refused"),
        "else": len(found) - len(ends),
        "seconds": max((one.seconds for one in found), default=0.0),
        "growth": max((one.growth for one in found), default=0),
    }


def _process() -> Pool:
    return multiprocessing.get_context("spawn").Pool(1)

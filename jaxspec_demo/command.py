"""`jaxspec demo`: time shipped drafts and their targets against plain decoding."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from PIL.Image import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from jaxspec import __version__
from jaxspec.cli.shared import progress
from jaxspec.data.images import as_png, load_image
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.errors import InputError, printable
from jaxspec.files import write_text
from jaxspec.loading.models import load_draft
from jaxspec.runtime import clear
from jaxspec_demo import ASSETS
from jaxspec_demo.models import EYES, SMOLLM2, smollm2_file, smollm2_install
from jaxspec_demo.race import PAGE, draw

DRAFTED = "bold underline green"
WIDTH = 48
"""Characters that the page takes on a terminal."""
CODE = """Complete this Python function.

```python
def fizzbuzz(n):
    \"\"\"Return the numbers from 1 to n as a list of strings, with fizz, buzz and fizzbuzz.\"\"\"
```"""


class Contest(NamedTuple):
    """Describe a target, and how the demo asks it."""

    name: str
    """Folder of the shipped drafts."""
    target: str
    gamma: int
    """Drafted tokens per block."""
    prompts: tuple[str, ...]
    runs: int
    """Timed answers to each prompt."""
    page: bool = True
    """Whether the prompts are about an image."""


SEEN = ("What do you see?",)
CONTESTS = {
    "eyes": Contest("smollm2_eyes", EYES, 7, SEEN, 3),
    "mini": Contest("mini", str(ASSETS / "mini" / "target"), 5, SEEN, 30),
    "smollm2": Contest(
        "smollm2",
        SMOLLM2,
        3,
        (
            "A tram has 34 people in it. At a stop 15 of them get off, and 22 others get on. "
            "How many are in it now?",
            CODE,
            "Name five things to pack for a week in the mountains, and why.",
        ),
        2,
        page=False,
    ),
}


@dataclass(frozen=True)
class Demo:
    """Answer with a shipped draft, and time it against plain decoding: one question about a drawn
    page, or SmolLM2's race over three prompts.

    $ jaxspec demo
    $ jaxspec demo --model mini --drafter draft --prompt "Which word is there?"
    """

    model: Literal["eyes", "smollm2", "mini"] | None = None
    """`eyes`: SmolLM2-135M with a shipped vision tower and KV head, by default where its wheel of
    93 MB is installed. `smollm2`: the language model alone, with a KV head. `mini`: the shipped
    picture-book models, toys, by default elsewhere."""
    prompt: str | None = None
    """Ask this instead of the demo's own prompts."""
    image: Path | None = None
    """An image file, by default the shipped page. The models know only drawn pages, so they
    describe a photograph as if it were one."""
    drafter: Literal["kv_head", "draft"] = "kv_head"
    """`kv_head`: a KV head, which reads the target's cache. `draft`: a small model that sees the
    image (`mini` only)."""
    out: Path | None = None
    """Also write the measurements to this JSON file; it may replace an earlier demo's file."""
    svg: Path | None = None
    """Also draw the first prompt's race as a moving picture to this SVG file."""


def run(args: Demo) -> None:
    """Print each question, its answer as it is written, and the times with and without drafts."""
    for option, path, mark in (("out", args.out, '"speedup_median"'), ("svg", args.svg, "<svg")):
        is_file = path and os.path.isfile(path)  # `Path.is_file` raises for names that are too long
        if path and os.path.exists(path) and not (is_file and mark.encode() in path.read_bytes()):
            raise InputError(f"--{option}: {path} is no demo's file; give the name of a new file")
    if args.out and args.svg and args.out.resolve() == args.svg.resolve():
        raise InputError(f"--svg: {args.svg} is also --out's; give the name of another file")
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    model = args.model or ("eyes" if smollm2_file() else "mini")
    contest: Contest = CONTESTS[model]
    if args.drafter == "draft" and model != "mini":
        raise InputError(f"--drafter: {model} has no shipped draft; leave the option out")
    if args.image is not None and not contest.page:
        raise InputError(f"--image: {model} is a text model; leave the option out")
    if contest.page:
        console.print(
            "The target is a toy that knows only drawn pages, so its answer may be wrong.\n"
            "The draft changes no word of it: the target checks every guess."
        )
        if args.model is None and model == "mini":
            console.print(f"A larger toy: {smollm2_install()}")
        console.print()
    images: list[Image] = []
    if contest.page:
        image = args.image or ASSETS / "page.png"
        images = [load_image(image)]
        console.print(Text(f"page      {printable(str(image))}"))
    progress("loading models")
    target = LoadedModel.load(contest.target)
    # A third engine traces which tokens were drafted: tracing takes time, so it is not timed.
    plain = Engine(target)
    drafting, tracing = (_drafting(args, target, contest, trace) for trace in (False, True))
    rows = []
    for prompt in contest.prompts if args.prompt is None else (args.prompt,):
        request = Request(prompt, images=images)
        console.print(Text(f"question  {printable(prompt)}\n"))
        colours = console.color_system in ("256", "truecolor")
        if images and colours and not console.options.ascii_only:
            console.print(_drawn(images[0]))
        progress("compiling")
        tokens = _write(console, tracing.stream(request))
        progress("timing")
        # The first turn of all compiles. Plain and drafted alternate, so that other work on the
        # machine slows both; the least counts, because other work only adds time.
        count = contest.runs + (not rows)
        turns = [(plain.generate(request), drafting.generate(request)) for _ in range(count)]
        clear()
        timed = turns[-contest.runs :]
        least = [min(result.decode_ms for result in runs) for runs in zip(*timed)]
        page = {"page": _png(images[0])} if images else {}
        rows.append(page | _row(prompt, tokens, turns[0], least))
        console.print(_table(rows[-1]))
    middle = median(row["speedup"] for row in rows)
    if len(rows) > 1:
        text = (f"{middle:.2f} times as fast", "bold"), " as plain decoding, in the median."
        console.print(Text.assemble(*text))
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    console.print(
        f"Batch 1, fastest of {contest.runs} runs, prefill and compilation not counted; {load}."
    )
    race = {
        "model": model,
        "gamma": contest.gamma,
        "device": jax.devices()[0].device_kind,
        "load": load,
        "jax": jax.__version__,
        "jaxspec": __version__,
        "speedup_median": middle,
        "rows": rows,
    }
    for path, text in ((args.out, json.dumps(race, indent=1) + "\n"), (args.svg, draw(race))):
        if path is not None:
            write_text(path, text)
            console.print(Text(f"wrote {printable(str(path))}"))


def _drafting(args: Demo, target: LoadedModel, contest: Contest, trace: bool) -> Engine:
    config, assets = EngineConfig(gamma=contest.gamma, trace=trace), ASSETS / contest.name
    return Engine(target, load_draft(assets / args.drafter, target), config)


def _png(image: Image) -> str:
    """Return a small copy of the image as base64 of a PNG file."""
    small = image.copy()
    small.thumbnail((2 * PAGE, 2 * PAGE))
    return b64encode(as_png(np.asarray(small))).decode()


def _drawn(image: Image) -> Text:
    """Return the image as characters; each shows two pixels, one above the other."""
    pixels = np.asarray(image.resize((WIDTH, 2 * max(1, WIDTH * image.height // image.width // 2))))
    page = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2]):
        for colour, ground in zip(upper, lower):
            style = Style(color=Color.from_rgb(*colour), bgcolor=Color.from_rgb(*ground))
            page.append("▀", style)
        page.append("\n")
    return page


def _write(console: Console, answer: Iterator[Result]) -> list[tuple[str, int]]:
    """Print an answer as it is written, with drafted tokens in colour, and count these.

    Return each token's text with its place in the drafted block; -1: the target's own.
    """
    tokens: list[tuple[str, int]] = []
    for result in answer:
        assert result.trace is not None
        if not tokens:
            clear()
        printed, tokens = len(tokens), list(zip(result.trace["pieces"], result.trace["place"]))
        for piece, place in tokens[printed:]:
            console.print(Text(printable(piece), DRAFTED if place >= 0 else ""), end="")
    drafted = sum(place >= 0 for _, place in tokens)
    counts = f"\n\n{drafted} of the answer's {len(tokens)} tokens were "
    written = "written by the draft", DRAFTED
    console.print(Text.assemble(counts, written, " and kept by the target."))
    return tokens


def _row(
    prompt: str, tokens: list[tuple[str, int]], answers: tuple[Result, Result], ms: list[float]
) -> dict[str, Any]:
    """Return the measurements of one prompt; in pairs, plain decoding comes first."""
    plain, drafted = answers
    return {
        "prompt": prompt,
        "answer": drafted.text,
        "tokens": tokens,
        "passes": [plain.stats.steps, drafted.stats.steps],
        "tokens_per_pass": drafted.stats.tokens_per_pass,
        "decode_ms": ms,
        "speedup": ms[0] / ms[1],
        "identical": plain.tokens == drafted.tokens,
    }


def _table(row: dict[str, Any]) -> str:
    """Return a prompt's table: speed-up = tokens per pass / cost of a pass in plain passes."""
    passes, times = row["passes"], row["decode_ms"]
    each = [ms / max(steps, 1) for ms, steps in zip(times, passes)]
    cost = each[1] / each[0]
    same = "identical" if row["identical"] else "different, which is a bug: please report it"
    return f"""
                   plain   drafted
target passes {passes[0]:>10}{passes[1]:>10}   {row["tokens_per_pass"]:.2f} tokens per pass
ms a pass     {each[0]:>10.2f}{each[1]:>10.2f}   one with drafting takes {cost:.2f} plain ones
ms to decode  {times[0]:>10.1f}{times[1]:>10.1f}   {row["speedup"]:.2f} times as fast
answers                              {same}
"""


COMMAND = Demo, run
"""The subcommand, as `jaxspec.plugins` finds it."""

"""`jaxspec demo`: the mini models answer a question about a drawn page, and are timed against plain decoding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL.Image import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from jaxspec.cli.ask import Compiles, clear, progress
from jaxspec.data.images import load_image
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.errors import printable

ASSETS = Path(__file__).resolve().parents[1] / "assets"
RUNS = 30
DRAFTED = "bold green"
WIDTH = 48
"""Characters that the page takes on a terminal."""


@dataclass(frozen=True)
class Demo(Compiles):
    """Answers a question about a drawn page with the shipped mini models, and times it against plain decoding."""

    prompt: str = "Tell me what you see in the image."
    image: Path = ASSETS / "page.png"
    """An image file; the mini models know pages of the picture book only."""
    drafter: Literal["kv_head", "draft"] = "kv_head"
    """What drafts: a KV head, which reads the target's cache, or the small model with the image."""


def run(args: Demo) -> None:
    """Print the page, the answer while it is written, and what drafting was worth."""
    console = Console(highlight=False, soft_wrap=True)
    image = load_image(args.image)
    console.print(Text(f"page      {printable(str(args.image))}\nquestion  {printable(args.prompt)}\n"))
    if console.color_system in ("256", "truecolor"):
        console.print(_drawn(image))
    progress("loading models")
    target = LoadedModel.load(ASSETS / "mini" / "target")
    # Who wrote each token is told by an engine of its own: to keep that takes time, which is not drafting's.
    plain, drafting, telling = Engine(target), *(_drafting(target, args.drafter, trace) for trace in (False, True))
    request = Request(args.prompt, images=[image])
    progress("compiling")
    _write(console, telling.stream(request))
    progress("timing")
    # The first turn compiles. By turns, so that what else the machine does slows both; the least, as it only adds.
    turns = [(plain.generate(request), drafting.generate(request)) for _ in range(1 + RUNS)]
    clear()
    console.print(_table(*turns[0], *(min(result.decode_ms for result in runs) for runs in zip(*turns[1:]))))
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    console.print(f"Batch 1, least of {RUNS} runs, prefill and compilation not counted; {load}.")


def _drafting(target: LoadedModel, drafter: str, trace: bool) -> Engine:
    if drafter == "kv_head":
        return Engine(target.with_head(ASSETS / "mini" / "kv_head"), config=EngineConfig(("kv",), trace=trace))
    draft = LoadedModel.load(ASSETS / "mini" / "draft", share_tower_with=target)
    return Engine(target, draft, EngineConfig(trace=trace))


def _drawn(image: Image) -> Text:
    """Return the image as characters, each of two pixels, one above the other."""
    pixels = np.asarray(image.resize((WIDTH, 2 * max(1, WIDTH * image.height // image.width // 2))))
    page = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2]):
        for colour, ground in zip(upper, lower):
            page.append("▀", Style(color=Color.from_rgb(*colour), bgcolor=Color.from_rgb(*ground)))
        page.append("\n")
    return page


def _write(console: Console, answer: Iterator[Result]) -> None:
    """Print an answer while it is written, drafted tokens in colour; and how many these are."""
    shown, places = 0, []
    for result in answer:
        assert result.trace is not None
        if not shown:
            clear()
        places = result.trace["place"]
        for piece, place in list(zip(result.trace["pieces"], places))[shown:]:
            console.print(Text(printable(piece), DRAFTED if place >= 0 else ""), end="")
        shown = len(places)
    drafted = sum(place >= 0 for place in places)
    console.print(f"\n\n[{DRAFTED}]Drafted[/], and kept by the target: {drafted} of {shown} tokens.")


def _table(plain: Result, drafted: Result, plain_ms: float, drafted_ms: float) -> str:
    """Return what drafting was worth: tokens a pass, over what a pass costs, is how much faster it is."""
    passes = plain.stats.steps, drafted.stats.steps
    each = [ms / max(steps, 1) for ms, steps in zip((plain_ms, drafted_ms), passes)]
    same = "identical" if plain.tokens == drafted.tokens else "different, which is a bug: please report it"
    return f"""
                   plain   drafted
target passes {passes[0]:>10}{passes[1]:>10}   {drafted.stats.tokens_per_pass:.2f} tokens a pass
ms a pass     {each[0]:>10.2f}{each[1]:>10.2f}   drafting included: {each[1] / each[0]:.2f} plain passes
ms to decode  {plain_ms:>10.1f}{drafted_ms:>10.1f}   {plain_ms / drafted_ms:.2f} times as fast
answers                              {same}
"""

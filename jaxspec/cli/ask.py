"""What commands share: a prompt's options, its answer on standard output, and progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from PIL.Image import Image

from jaxspec.data.images import load_image
from jaxspec.decoding.engine import Engine, Request, Result
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import Prompt, place_images


@dataclass(frozen=True, kw_only=True)
class Compiles:
    """The option of all commands that compile."""

    cache: bool = True
    """Keep compiled programs on disk, in the user's cache directory or in JAX_COMPILATION_CACHE_DIR."""


def progress(words: str) -> None:
    """Show words on terminals only that the next ones overwrite, so that a failure leaves only its own line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words} ...", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Clear such words on terminals, before something else is printed there."""
    if sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr, flush=True)


def say(words: object) -> None:
    """Print a line that stays."""
    clear()
    print(words, file=sys.stderr)


def show(answer: Iterator[Result]) -> Result:
    """Print an answer while it is written; return the whole."""
    shown, result = 0, None
    for result in answer:
        if not shown:
            clear()
        print(end=result.text[shown:], flush=True)
        shown = len(result.text)
    print()
    assert result is not None
    return result


@dataclass(frozen=True)
class Ask(Compiles):
    """The options of a prompt and its answer."""

    prompt: str
    """The question. Images stand where it says <image>, or in front of it if it says so nowhere."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """An image file; give the option once an image, in order."""
    raw: bool = False
    """Give the model the prompt as it is, without a chat template: for base models."""
    tiles: bool = True
    """Without, a LLaVA-NeXT reads one tile an image, as LLaVA-1.5 does: so the released TABED code ran it."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0, from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this mass."""
    seed: int = 0
    """Seed of the drawn tokens, for temperatures above 0."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A string that ends the answer, which ends before it; give the option once a string."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What all models compute in; by default float32 on CPUs, else what their files hold."""
    stream: bool = True
    """On a terminal, print the answer while it is written; --json prints it whole."""
    json: bool = False
    """Print one JSON object with text, tokens and stats instead of the text."""

    def request(self) -> Request:
        """Return the checked request, with a prompt to be replaced as soon as there is a tokeniser."""
        place_images(self.prompt, len(self.image))
        nothing = Prompt(np.zeros(0, np.int32))
        return Request(
            nothing,
            self.max_new_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.seed,
            self.stop,
        )

    def pictures(self) -> list[Image]:
        """Return the images, of which one that is none is an InputError."""
        return [load_image(path) for path in self.image]

    @property
    def computes_in(self) -> jnp.dtype | None:
        """The dtype of all models; None is what `LoadedModel.load` takes by itself."""
        return self.dtype and jnp.dtype(self.dtype)


def answer(
    args: Ask,
    engine: Engine,
    request: Request,
    images: list[Image],
    describe: Callable[[Result], dict[str, Any]],
    *loaded: str,
) -> None:
    """Print what was loaded, the memory that the answer takes, the answer, and its stats.

    `describe` gives the program's own stats, and as `told` what the last line says of them.
    """
    encode = engine.encoder.raw if args.raw else engine.encoder.prompt
    request = replace(request, prompt=encode(args.prompt, images))
    memory = engine.memory_report(
        [request]
    )  # refuses what the answer itself would, before anything is told
    for line in (*loaded, memory):
        say(line)
    progress("compiling and decoding")
    if not sys.stderr.isatty():
        say("compiling and decoding ...")
    streams = args.stream and not args.json and sys.stdout.isatty()
    result = show(engine.stream(request)) if streams else engine.generate(request)
    pace = 1e3 * result.stats.emitted / result.decode_ms
    own = describe(result)
    told = own.pop("told")
    compiled = f"{result.compile_ms / 1e3:.1f} s compiling"
    say(f"done: {len(result.tokens)} tokens, {told}, {pace:.2f} tokens/s, {compiled}")
    stats = own | {
        "caption_ms": result.caption_ms,
        "compile_ms": result.compile_ms,
        "prefill_ms": result.prefill_ms,
        "decode_tokens_per_second": pace,
        "temperature": request.temperature,
        "dtype": str(jax.tree.leaves(engine.lead.params)[0].dtype),
        "device": jax.devices()[0].device_kind,
        "batch": result.batch,
        "seed": request.seed,
    }
    if args.json:
        print(json.dumps({"text": result.text, "tokens": result.tokens, "stats": stats}))
    elif not streams:
        print(result.text)


def numbers(option: str, text: str, kind: type = float) -> tuple[Any, ...]:
    """Return the numbers of a comma-separated list."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        whole = "whole " if kind is int else ""
        raise InputError(
            f"{option}: {text!r} is no list of {whole}numbers; separate them by commas"
        ) from None

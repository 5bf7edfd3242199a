"""Choose the requests for whose sizes a server compiles, and scale images until they fit these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests import TOP, EncodedRequest, Request
from jaxspec.errors import InputError
from jaxspec.models.lvlms.qwen_vl import QwenImages

BIASES = 64
"""Maximum tokens of a request whose scores are biased."""
SMALLEST = 28
"""Pixels of the side of a small image."""


def scaled_pixels(engine: Engine, length: int, images: int) -> int | None:
    """Return the pixels at which `images` images fill three quarters of a prompt.

    None for models that do not scale images to a number of pixels.
    """
    reader = engine.assembly.lead.images
    if not isinstance(reader, QwenImages):
        return None
    tokens = max(length * 3 // 4 // max(images, 1), 1)
    return min(tokens * reader.side**2, reader.limits["longest_edge"])


def examples(
    engine: Engine,
    lengths: Sequence[int],
    images: int,
    side: int,
    new: int,
    max_pixels: int | None = None,
    max_soft_tokens: int | None = None,
) -> list[Request]:
    """Return requests that fill each length of a prompt, without images and with them.

    Args:
      lengths: Tokens of prompts.
      images: Maximum images of a prompt; 1 and all are tried.
      side: Height and width of the largest image in pixels.
      new: Maximum new tokens.
      max_pixels, max_soft_tokens: See `Request`.
    """
    requests: list[Request] = []
    encoder = engine.encoder
    ask = encoder.prompt if encoder.chats else encoder.completion
    limits: dict[str, Any] = {"max_pixels": max_pixels, "max_soft_tokens": max_soft_tokens}
    for count in sorted({0, min(images, 1), images}):
        # A small image leaves room for more text, a large one has more tiles.
        for edge in sorted({SMALLEST, side}) if count else (side,):
            prompt = ask("Hi", [Image.new("RGB", (edge, edge))] * count)
            (example,) = engine.batcher.read_examples([Request(prompt, 1, **limits)])
            spare = [length - len(example.rows[0]) for length in lengths]
            if max(spare) < 0:
                raise InputError(
                    f"prompt buckets: {max(lengths)} tokens, and {count} images of {edge} pixels "
                    f"take {len(example.rows[0])}; give a longer one, or fewer or smaller images"
                )
            for more in filter(lambda more: more >= 0, spare):
                tokens = np.append(prompt.tokens, np.repeat(prompt.tokens[-1:], more))
                filled = replace(prompt, tokens=tokens)
                requests.append(Request(filled, new, **limits))
    first, biases = requests[0], dict.fromkeys(range(BIASES), 0.0)
    full = replace(
        first, temperature=1.0, logprobs=TOP[-1], presence_penalty=1.0, logit_bias=biases
    )
    # A request may turn off what the model's file says of penalties and sampling.
    plain = replace(first, repetition_penalty=1.0, min_p=0.0)
    sampled = [replace(request, temperature=1.0) for request in (first, plain)]
    return [*requests, *sampled, plain, full]


def scaled(batch: Batch, request: Request) -> EncodedRequest:
    """Read a request; scale its images, where the model can, until the batch has their tiles.

    A long image has more tiles than a square one of as many pixels.
    """
    while True:
        (encoded,) = batch.batcher.read([request])
        pairs = zip(encoded.sizes.tiles, batch.capacity.tiles, strict=True)
        if request.max_pixels is None or all(tiles <= most for tiles, most in pairs):
            return encoded
        request = replace(request, max_pixels=request.max_pixels * 3 // 4)

"""Bound what one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """Bound what one request may ask for.

    Attributes:
      model: Name of the model.
      images: Most images of a request.
      pixels: Most pixels of an image.
      tokens: Most tokens of a prompt.
      choices: Most answers to a request.
      folder: Directory whose images `file:` addresses name; None for none.
      file: Most bytes of a file in it.
      races: Whether a request may ask for plain decoding.
      thinking: Whether the model thinks where a request does not say it, see `Request`.
      max_pixels: Most pixels to which an image is scaled; None for models that do not scale so.
      max_soft_tokens: Most tokens of an image where a request does not say it, see `Request`.
    """

    model: str
    images: int = 1
    pixels: int = 16_777_216
    tokens: int = 1024
    choices: int = 8
    folder: Path | None = None
    file: int = 32 * 2**20
    races: bool = False
    thinking: bool | None = None
    max_pixels: int | None = None
    max_soft_tokens: int | None = None

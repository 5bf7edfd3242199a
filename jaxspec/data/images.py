"""Images from disk, checked: what cannot be read is one clear line."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from jaxspec.errors import InputError


def load_image(path: str | Path) -> Image.Image:
    """The image file as upright RGB (EXIF rotation applied, transparency on white)."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"image {path}: no such file; check the path")
    return _decode(path, str(path))


@dataclass(frozen=True)
class StoredImage:
    """An image in its file's encoding: a data set keeps these, and decodes them batch by batch."""

    content: bytes
    name: str
    """What errors call it: file, row and column."""
    size: tuple[int, int] | None = None
    """Height and width of the upright image in pixels, where that is known without decoding."""

    def load(self) -> Image.Image:
        """The image as upright RGB; InputError where the bytes are no image."""
        return _decode(io.BytesIO(self.content), self.name)


def _decode(source: Path | io.BytesIO, name: str) -> Image.Image:
    try:
        with Image.open(source) as image:
            image.load()
            return to_rgb(ImageOps.exif_transpose(image), name)
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"image {name}: not readable as an image ({type(error).__name__}); convert it to PNG"
        ) from error


def image_hash(image: Image.Image) -> str:
    """SHA-256 (hex) of an RGB image: of "WIDTHxHEIGHT:" and the pixels' bytes, row by row."""
    return hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes()).hexdigest()


def to_rgb(image: Any, name: str = "given in memory") -> Image.Image:
    """A PIL image, a stored image or a uint8 array [Y, X, 3] as an RGB PIL image of at least one pixel."""
    if isinstance(image, StoredImage):
        return image.load()
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    if 0 in image.size:
        raise InputError(f"image {name}: its size is {image.size[0]}x{image.size[1]}; give one with pixels in it")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return image.convert("RGB")

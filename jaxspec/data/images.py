"""Images from disk, checked: what cannot be read is one clear line."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from jaxspec.errors import InputError


def load_image(path: str | Path) -> Image.Image:
    """The image file as upright RGB (EXIF rotation applied, transparency on white)."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"image {path}: no such file; check the path")
    try:
        with Image.open(path) as image:
            image.load()
            return to_rgb(ImageOps.exif_transpose(image), str(path))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"image {path}: not readable as an image ({type(error).__name__}); convert it to PNG"
        ) from error


def image_hash(image: Image.Image) -> str:
    """SHA-256 (hex) of an RGB image: of "WIDTHxHEIGHT:" and the pixels' bytes, row by row."""
    return hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes()).hexdigest()


def to_rgb(image: Any, name: str = "given in memory") -> Image.Image:
    """A PIL image or a uint8 array [Y, X, 3] as an RGB PIL image of at least one pixel."""
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    if 0 in image.size:
        raise InputError(f"image {name}: its size is {image.size[0]}x{image.size[1]}; give one with pixels in it")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        image = page
    return image.convert("RGB")

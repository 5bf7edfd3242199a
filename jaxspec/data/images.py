"""Read images from disk; what cannot be read is one clear line."""

from __future__ import annotations

import hashlib
import io
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TILELENGTH, TILEWIDTH, TiffImageFile

from jaxspec.errors import InputError, reading


def load_image(path: str | Path) -> Image.Image:
    """Return the image file as upright RGB (EXIF rotation applied, transparency on white)."""
    path, name = Path(path), _name(path)
    if not os.path.isfile(path):  # not `Path.is_file`, which raises for names that are too long
        if re.match(r"https?:/", name):
            raise InputError(f"image {name}: a web address; fetch it, and give the file")
        other = "a folder" if os.path.isdir(path) else "a pipe or device"
        kind = other if os.path.exists(path) else "no such file"
        raise InputError(f"image {name}: {kind}; give an image file")
    return _decode(path, name)


def _name(path: str | Path) -> str:
    """Return a file's name for errors; a stranger's captions may name a path of several lines."""
    return repr(str(path))[1:-1][:200]


@dataclass(frozen=True)
class StoredImage:
    """Hold an image in its file's encoding, which a data set keeps and decodes batch by batch."""

    content: bytes
    name: str
    """File, row and column, for errors."""
    size: tuple[int, int] | None = None
    """Height and width of the upright image in pixels, if known without decoding."""

    def load(self, most_pixels: int | None = None) -> Image.Image:
        """Return the image as upright RGB; InputError where the bytes are no image, or too large.

        most_pixels: Maximum pixels to decode; None for `MOST_PIXELS`.
        """
        return _decode(io.BytesIO(self.content), self.name, most_pixels)


def as_png(pixels: np.ndarray) -> bytes:
    """Return the PNG of a uint8 array [Y, X, 3], or grey [Y, X, 1]."""
    out = io.BytesIO()
    grey = pixels.shape[2:] == (1,)
    Image.fromarray(pixels[..., 0] if grey else pixels).save(out, "PNG")
    return out.getvalue()


def _decode(source: Path | io.BytesIO, name: str, most: int | None = None) -> Image.Image:
    """Return an image as upright RGB; InputError for what is too large, before it is decoded."""
    with reading(f"image {name}: not readable", "fetch it again, or convert it to PNG"):
        try:
            image = Image.open(source, formats=_FORMATS)
        except UnidentifiedImageError:
            raise InputError(f"image {name}: {_no_image(source)}") from None
        except Image.DecompressionBombError as error:  # it keeps the size to itself
            (count,) = re.findall(r"\((\d+) pixels\)", str(error)) or ["many"]
            raise _too_large(f"{count} pixels, which", name, most) from None
        with image:
            # From the header, before megabytes become gigabytes.
            _check_size(image.size, name, most)
            if isinstance(image, TiffImageFile):  # a tile may be larger than its image
                width, height = (image.tag_v2.get(tag, 1) for tag in (TILEWIDTH, TILELENGTH))
                _check_pixels(width, height, name, most)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image), name)


def _no_image(source: Path | io.BytesIO) -> str:
    """Return what the content is in place of an image, and the mend."""
    content = source if isinstance(source, io.BytesIO) else source.open("rb")
    with content:
        content.seek(0)
        start = content.read(1024).lstrip()
    if not start:
        return "an empty file; fetch it again"
    if re.match(rb"<(!doctype html|html|head|body)", start, re.IGNORECASE):
        return "a web page, not an image; fetch the image itself"
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs, not the image; run `git lfs pull`"
    return f"not one of the formats that are read ({', '.join(_FORMATS)}); convert it to PNG"


@dataclass(frozen=True)
class Picture:
    """Hold an image of known size, whose pixels are decoded when a batch reads them."""

    source: Pixels
    height: int
    width: int

    @classmethod
    def of(cls, image: ImageSource) -> Picture:
        """Return the picture of an image. One in a file's encoding is held so, and is decoded here
        only if its size is unknown.
        """
        if isinstance(image, Picture):
            return image
        if isinstance(image, StoredImage) and image.size is not None:
            return cls(image, *image.size)
        if isinstance(image, StoredImage):
            return cls._decoded(image, image.load())
        if isinstance(image, str | Path):
            decoded = load_image(image)
            return cls._decoded(StoredImage(Path(image).read_bytes(), _name(image)), decoded)
        if not isinstance(image, Image.Image):
            image = to_rgb(image)
        _check_kind(image, "given in memory")
        return cls(image, image.height, image.width)

    def rgb(self) -> Image.Image:
        """Return the image as RGB."""
        if not isinstance(self.source, StoredImage):
            return to_rgb(self.source)
        if (image := _DECODED.get(self)) is None:
            self._keep(image := self.source.load())
        return image

    @classmethod
    def _decoded(cls, image: StoredImage, pixels: Image.Image) -> Picture:
        picture = cls(image, pixels.height, pixels.width)
        picture._keep(pixels)
        return picture

    def _keep(self, pixels: Image.Image) -> None:
        """Keep the pixels while there is room, so that a call of few images decodes each once."""
        if len(_DECODED) < MOST_DECODED:
            _DECODED[self] = pixels

    @cached_property
    def hash(self) -> str:
        """Return `image_hash` of its pixels."""
        return image_hash(self.rgb())


MOST_DECODED = 16
"""Pictures whose pixels are kept; a photograph of 12 million pixels has 36 MB."""
_DECODED: WeakKeyDictionary[Picture, Image.Image] = WeakKeyDictionary()

Pixels = StoredImage | Image.Image | np.ndarray
"""What `to_rgb` takes: arrays are uint8 [Y, X, 3]."""
ImageSource = Pixels | Picture | str | Path
"""What a request takes: pixels, or a file's name."""


def image_hash(image: Image.Image) -> str:
    """Return SHA-256 (hex) of "WIDTHxHEIGHT:" and an RGB image's bytes, row by row."""
    return hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes()).hexdigest()


_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats whose header bounds the memory of decoding. ICO, ICNS, IPTC, BLP and AVIF hold images of
other sizes than they say; EPS is a program."""
LONGEST = 200
"""Longest side over the shortest; Qwen2.5-VL's limit too."""
MOST_PIXELS = 89_478_485
"""Above these, 89 million, Pillow warns of decompression bombs."""


def to_rgb(image: Pixels, name: str = "given in memory") -> Image.Image:
    """Return a PIL image, a stored image or a uint8 array [Y, X, 3] as an RGB PIL image.

    Raises InputError for other arrays, empty images, pixels without a known range, over 89 million
    pixels, and strips over 200 times as long as wide: scaled to a tower's shorter edge they would
    take gigabytes.
    """
    if isinstance(image, StoredImage):
        return image.load()
    if not isinstance(image, Image.Image):
        image = _of_array(np.asarray(image), name)
    _check_kind(image, name)
    with reading(f"image {name}: not readable", "give an open, whole image"):
        return _as_rgb(image)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # `convert` would clip, not scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image.convert("RGB")


def _check_size(size: tuple[int, int], name: str, most: int | None = None) -> None:
    width, height = size
    if 0 in size:
        raise InputError(f"image {name}: its size is {width}x{height}; give one with pixels in it")
    if max(size) > LONGEST * min(size):
        raise InputError(f"image {name}: {width}x{height} is over {LONGEST} times as long as wide")
    _check_pixels(width, height, name, most)


def _check_pixels(width: int, height: int, name: str, most: int | None = None) -> None:
    if width * height > (most or MOST_PIXELS):
        raise _too_large(f"{width}x{height}", name, most)


def _too_large(size: str, name: str, most: int | None) -> InputError:
    return InputError(f"image {name}: {size} is over {most or MOST_PIXELS} pixels; shrink it")


def _check_kind(image: Image.Image, name: str) -> None:
    """Raise InputError for sizes and modes that `to_rgb` refuses; nothing is decoded."""
    _check_size(image.size, name)
    if image.mode in ("I", "F"):
        raise InputError(f"image {name}: pixels of mode {image.mode}, of any range; give 8 bits")


def _of_array(array: np.ndarray, name: str) -> Image.Image:
    if array.dtype.kind in "OSU":
        raise InputError(f"image {name}: no array of pixels; open it with PIL's Image.open")
    shape = f"{array.dtype} of shape {list(array.shape)}"
    try:
        if array.dtype == np.uint8:
            return Image.fromarray(array)
    except TypeError:
        pass
    raise InputError(f"image {name}: an array of {shape}; give uint8 [Y, X, 3], or a PIL image")

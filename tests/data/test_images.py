"""Images as users have them: all become upright RGB, or are refused in one line."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from jaxspec.data.images import StoredImage, load_image, to_rgb
from jaxspec.errors import InputError
from PIL import Image

RAMP = np.linspace(0, 65535, 6).astype(np.uint16)[None]


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled(form: str, tmp_path: Path) -> None:
    Image.fromarray(RAMP).save(tmp_path / "ramp", format=form)
    grey = np.asarray(load_image(tmp_path / "ramp"))
    np.testing.assert_array_equal(grey[0, :, 0], RAMP[0] >> 8)
    np.testing.assert_array_equal(grey[..., 0], grey[..., 2])


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_any_range_are_refused(dtype: type, tmp_path: Path) -> None:
    Image.fromarray(RAMP.astype(dtype)).save(tmp_path / "ramp.tiff")
    with pytest.raises(InputError, match=r"ramp.tiff: pixels of mode [IF], of any range"):
        load_image(tmp_path / "ramp.tiff")


def test_arrays() -> None:
    page = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    np.testing.assert_array_equal(np.asarray(to_rgb(page)), page)
    for wrong in (page.astype(np.int64), page[None], page / 255):
        with pytest.raises(InputError, match=r"an array of \w+ of shape \[.*\]; give uint8 \[Y, X, 3\]"):
            to_rgb(wrong)


def test_strips_are_refused() -> None:
    with pytest.raises(InputError, match="1x201 is over 200 times"):
        to_rgb(Image.new("RGB", (1, 201)))
    assert to_rgb(Image.new("RGB", (200, 1))).size == (200, 1)


@pytest.mark.parametrize("content", [b"P6\n48 4x\n255\n", b"", b"II*\0" + b"\1" * 40, b"GIF89a"], ids=repr)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_files_are_refused(content: bytes) -> None:
    with pytest.raises(InputError, match="row 3: not readable as an image"):
        StoredImage(content, "row 3").load()


def test_a_good_one_beside_them() -> None:
    kept = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(kept, format="PPM")
    assert StoredImage(kept.getvalue(), "row 4").load().getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.filterwarnings("ignore:Image size")
def test_images_that_grow_are_refused_by_their_headers(tmp_path: Path) -> None:
    """300 MB of pixels in 40 bytes of file: nothing is decoded."""
    bomb = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", 13_000, 13_000, 16, 0, 0, 0, 0))
    (tmp_path / "bomb.png").write_bytes(bomb + _chunk(b"IDAT", b""))
    with pytest.raises(InputError, match=r"bomb\.png: 13000x13000 is over 89478485 pixels; shrink it"):
        load_image(tmp_path / "bomb.png")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_postscript_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    with pytest.raises(InputError, match="EPS is a program, which is not run"):
        load_image(tmp_path / "a.png")

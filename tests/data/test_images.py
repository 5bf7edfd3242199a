"""Images as users have them become upright RGB, or are refused in one line."""

from __future__ import annotations

import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxspec.data.images import StoredImage, load_image, to_rgb
from jaxspec.errors import InputError

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
        with pytest.raises(
            InputError, match=r"an array of \w+ of shape \[.*\]; give uint8 \[Y, X, 3\]"
        ):
            to_rgb(wrong)


def test_strips_are_refused() -> None:
    with pytest.raises(InputError, match="1x201 is over 200 times"):
        to_rgb(Image.new("RGB", (1, 201)))
    assert to_rgb(Image.new("RGB", (200, 1))).size == (200, 1)


NO_IMAGES = {
    b"P6\n48 4x\n255\n": "not readable (",
    b"II*\0" + b"\1" * 40: "not one of the formats that are read (BMP, ",
    b"GIF89a": "not one of the formats that are read (BMP, ",
    b"RIFF1234WAVEfmt ": "not one of the formats that are read (BMP, ",
    b"": "an empty file; fetch it again",
    b"\n<!DOCTYPE html>\n<p>404": "a web page, not an image; fetch the image itself",
    b"version https://git-lfs.github.com/spec/v1\n": "a pointer of git-lfs, not the image; "
    "run `git lfs pull`",
}


@pytest.mark.parametrize("content", NO_IMAGES, ids=repr)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_what_is_no_image_is_called_by_its_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(content)
    for name, load in (
        ("row 3", StoredImage(content, "row 3").load),
        ("a.png", lambda: load_image(tmp_path / "a.png")),
    ):
        with pytest.raises(InputError) as refused:
            load()
        assert f"{name}: {NO_IMAGES[content]}" in str(refused.value)
        assert "object at" not in str(refused.value)


def test_a_good_one_beside_them() -> None:
    kept = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(kept, format="PPM")
    assert StoredImage(kept.getvalue(), "row 4").load().getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize(("side", "words"), [(13_000, "13000x13000"), (14_000, "196000000 pixels")])
def test_images_that_grow_are_refused_by_their_headers(
    side: int, words: str, tmp_path: Path
) -> None:
    """An image of 300 MB of pixels in 40 bytes of file is refused by its header, and nothing is
    decoded. Pillow opens the first one.
    """
    bomb = b"\x89PNG\r\n\x1a\n" + _chunk(
        b"IHDR", struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    )
    (tmp_path / "bomb.png").write_bytes(bomb + _chunk(b"IDAT", b""))
    with pytest.raises(InputError, match=f"bomb.png: {words}.* over 89478485.*; shrink it$"):
        load_image(tmp_path / "bomb.png")


def test_images_that_hold_larger_ones_are_refused_before_these_are_decoded(tmp_path: Path) -> None:
    """Files that claim 16 x 16 pixels and hold more are refused before these are decoded. An icon
    holds a whole PNG, a TIFF a tile of 100 million pixels.
    """
    png = io.BytesIO()
    Image.new("1", (9_500, 9_500)).save(png, "PNG")
    inner, length = png.getvalue(), len(png.getvalue())
    entries = {
        256: 16,
        257: 16,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: 10_000,
        323: 10_000,
        324: 134,
        325: length,
    }
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    cases = {
        "ICO": (
            struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, length, 22),
            "not one of the formats",
        ),
        "ICNS": (
            b"icns" + struct.pack(">I4sI", length + 16, b"ic07", length + 8),
            "not one of the formats",
        ),
        "TIFF": (
            b"II*\0" + struct.pack("<IH", 8, len(entries)) + tags + bytes(4),
            "10000x10000 is over 89478485",
        ),
    }
    before = _most_memory()
    for kind, (header, why) in cases.items():
        (tmp_path / kind).write_bytes(header + inner)
        with pytest.raises(InputError, match=f"{kind}: {why}"):
            load_image(tmp_path / kind)
    assert _most_memory() - before < 10 << 20


def _most_memory() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def test_postscript_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    )
    with pytest.raises(InputError, match="not one of the formats that are read"):
        load_image(tmp_path / "a.png")

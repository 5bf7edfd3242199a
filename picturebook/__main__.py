"""`python -m picturebook OUT.png` writes a contact sheet: every kind of sample, its pages
enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageFont

from jaxspec.command import input_errors
from jaxspec.files import whole
from picturebook.samples import IMAGE, Sample
from picturebook.sequences import placeholders
from picturebook.sets import SYNTHETIC_SETS, test_set, train_sample

SCALE, GAP, WIDTH = 4, 16, 1560
TITLE, ASK, ANSWER = (120, 120, 120), (20, 70, 170), (20, 20, 20)


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _block(sample: Sample, width: int) -> Image.Image:
    """Draw a sample `width` pixels wide: turns next to its pages, or below five of them."""
    font, small = ImageFont.load_default(size=17), ImageFont.load_default(size=13)
    side = SCALE * 48
    pages_width = len(sample.images) * (side + GAP)
    beside = len(sample.images) <= 2
    left = pages_width if beside else 0
    texts: list[tuple[str, tuple[int, int, int]]] = []
    for question, answer in sample.turns:
        text = question.removeprefix(placeholders(len(sample.images)))
        text = text.replace("\n", " ").replace(IMAGE, "[page]")
        texts += [(line, ASK) for line in _wrap(text, font, width - left)]
        texts += [(line, ANSWER) for line in _wrap(answer, font, width - left)] + [("", ANSWER)]
    text_top = 24 if beside else 24 + side + 8
    height = max(26 + (side if sample.images else 0), text_top + 22 * len(texts))
    block = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(block)
    synthetic = SYNTHETIC_SETS.get(sample.dataset)
    stands_for = ", ".join(synthetic.stands_for) if synthetic else "training only"
    draw.text((0, 2), f"{sample.dataset}: {stands_for} ({sample.id})", TITLE, small)
    for i, page in enumerate(sample.images):
        draw.rectangle(
            (i * (side + GAP), 23, i * (side + GAP) + side + 1, 24 + side), outline=TITLE
        )
        block.paste(
            Image.fromarray(page).resize((side, side), Image.Resampling.NEAREST),
            (i * (side + GAP) + 1, 24),
        )
    for i, (line, tint) in enumerate(texts):
        draw.text((left, text_top + 22 * i), line, tint, font)
    return block


def sheet_samples() -> list[Sample]:
    """Return six attribute conversations, and four samples of every set, two with two turns."""
    samples = [train_sample(0, i, ("attributes",)) for i in range(6)]
    for name, synthetic in SYNTHETIC_SETS.items():
        few = 1 if synthetic.images == 5 else 2
        samples += test_set(name, few) + test_set(name, 6, turns=2)[6 - few :]
    return samples


def draw_sheet(samples: list[Sample]) -> np.ndarray:
    """Draw the samples in two columns, five-page ones across both; uint8 [height, 1560, 3]."""
    half = (WIDTH - 3 * GAP) // 2
    rows: list[list[Image.Image]] = []
    for sample in samples:
        wide = len(sample.images) == 5
        block = _block(sample, WIDTH - 2 * GAP if wide else half)
        if not wide and rows and len(rows[-1]) == 1 and rows[-1][0].width == half:
            rows[-1].append(block)
        else:
            rows.append([block])
    heights = [max(block.height for block in row) + GAP for row in rows]
    sheet = Image.new("RGB", (WIDTH, sum(heights) + GAP), "white")
    draw, y = ImageDraw.Draw(sheet), GAP
    for row, height in zip(rows, heights, strict=True):
        for i, block in enumerate(row):
            sheet.paste(block, (GAP + i * (half + GAP), y))
        draw.line((GAP, y - GAP // 2, WIDTH - GAP, y - GAP // 2), (215, 215, 215))
        y += height
    return np.asarray(sheet)


def contact_sheet(out: tyro.conf.Positional[Path]) -> None:
    """Write pages and dialogues of every kind of sample as one PNG.

    Args:
      out: OUT.png
    """
    with whole(out) as fresh:
        Image.fromarray(draw_sheet(sheet_samples())).save(fresh, format="PNG")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the sheet that the command line names."""
    with input_errors("picturebook"):
        tyro.cli(contact_sheet, args=arguments, prog="python -m picturebook")


if __name__ == "__main__":
    main()

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
from picturebook.rendering import PAGE
from picturebook.samples import IMAGE, Sample
from picturebook.sequences import placeholders
from picturebook.sets import SYNTHETIC_SETS, test_set, train_sample

SCALE, GAP, WIDTH = 4, 16, 1560
LINE = 22
"""Pixels from a line of text to the next one."""
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


def _block(sample: Sample) -> Image.Image:
    """Draw a sample below its title: its pages in a row, and its turns next to them."""
    font, small = ImageFont.load_default(size=17), ImageFont.load_default(size=13)
    side = SCALE * PAGE
    left = GAP + len(sample.images) * (side + GAP)
    texts: list[tuple[str, tuple[int, int, int]]] = []
    for question, answer in sample.turns:
        text = question.removeprefix(placeholders(len(sample.images)))
        text = text.replace("\n", " ").replace(IMAGE, "[page]")
        texts += [(line, ASK) for line in _wrap(text, font, WIDTH - left - GAP)]
        texts += [(line, ANSWER) for line in _wrap(answer, font, WIDTH - left - GAP)]
        texts.append(("", ANSWER))
    height = GAP + LINE + max(side if sample.images else 0, LINE * len(texts))
    block = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(block)
    synthetic = SYNTHETIC_SETS.get(sample.dataset)
    stands_for = ", ".join(synthetic.stands_for) if synthetic else "training only"
    draw.text((GAP, 2), f"{sample.dataset}: {stands_for} ({sample.id})", TITLE, small)
    for i, page in enumerate(sample.images):
        x = GAP + i * (side + GAP)
        enlarged = Image.fromarray(page).resize((side, side), Image.Resampling.NEAREST)
        block.paste(enlarged, (x, LINE))
        draw.rectangle((x - 1, LINE - 1, x + side, LINE + side), outline=TITLE)
    for i, (line, tint) in enumerate(texts):
        draw.text((left, LINE + LINE * i), line, tint, font)
    draw.line((GAP, height - 4, WIDTH - GAP, height - 4), (215, 215, 215))
    return block


def sheet_samples() -> list[Sample]:
    """Return six attribute conversations, and four samples of every set, two with two turns."""
    samples = [train_sample(0, i, ("attributes",)) for i in range(6)]
    for name, synthetic in SYNTHETIC_SETS.items():
        few = 1 if synthetic.images == 5 else 2
        samples += test_set(name, few) + test_set(name, 6, turns=2)[6 - few :]
    return samples


def draw_sheet(samples: list[Sample]) -> np.ndarray:
    """Draw the samples below one another; uint8 [height, 1560, 3]."""
    return np.concatenate([np.asarray(_block(sample)) for sample in samples])


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

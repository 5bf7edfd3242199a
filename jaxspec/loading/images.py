"""Turn the images of prompts into the arrays that a model's tower reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from PIL.Image import Image

from jaxspec.data.images import Picture
from jaxspec.loading.models import LoadedModel
from jaxspec.models.inputs import ImageInputs
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import bucket
from jaxspec.prompts.views import Change

Tiles = Sequence[Mapping[str, np.ndarray]]
"""Tiles [U, ...] of each image of a row."""


def image_inputs(
    model: LoadedModel,
    pictures: Sequence[Sequence[Image]],
    tiles: int,
    limits: Sequence[Mapping[str, int]] = (),
    changes: Sequence[Change] = (None,),
) -> dict[str, Any] | None:
    """Return the tiles [B, U, ...] of each row's images, padded with zeros; None for no tiles.

    Args:
      limits: Limits of `images_within` for each of the first rows.
      changes: Changes of the images; each one's tiles of all images follow those of the one before.
    """
    if tiles == 0 or model.images is None:
        return None
    rows = [
        [x for change in changes for x in tiles_of(model.images_within(most or {}), images, change)]
        for images, most in zip_longest(pictures, limits)
    ]
    return stack_tiles(model, rows, tiles)


def tiles_of(reader: ImageInputs | None, images: Sequence[Image], change: Change = None) -> Tiles:
    """Return the tiles of one prompt's images, changed before they are read."""
    if reader is None or not images:
        return []
    return reader.read(list(map(change, images)) if change else images)


def stack_tiles(model: LoadedModel, rows: Sequence[Tiles], tiles: int) -> dict[str, Any]:
    """Return the tiles [B, U, ...] of rows of images that a model's reader has read."""
    assert model.images is not None
    shapes = model.images.shapes(model.config)
    out = {
        name: np.zeros((len(rows), tiles, *shape), dtype) for name, (shape, dtype) in shapes.items()
    }
    for row, images in enumerate(rows):
        start = 0
        for arrays in images:
            for name, values in arrays.items():
                out[name][row, start : start + len(values)] = values
            start += len(next(iter(arrays.values())))
    return out


def image_tiles(
    model: LoadedModel,
    prompt: Prompt[Picture],
    buckets: Sequence[int],
    limits: Mapping[str, int],
    changes: Sequence[Change] = (None,),
) -> int:
    """Return the bucket for the tiles of a prompt's images in a model, in each of the changes."""
    reader, images = model.images_within(limits), prompt.images
    count = sum(reader.tiles((x.height, x.width), len(images)) for x in images if reader)
    return bucket(len(changes) * count, buckets, "image tiles of one prompt")

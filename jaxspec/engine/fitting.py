"""Find the sizes of a live batch that hold a request, or say what is too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxspec.data.images import Picture
from jaxspec.engine.batcher import Batcher
from jaxspec.engine.memory import Sizes
from jaxspec.engine.requests import EncodedRequest
from jaxspec.errors import InputError


def live_sizes(batcher: Batcher, examples: Sequence[EncodedRequest]) -> list[Sizes]:
    """Return the sizes of the examples and, with images and without, their maxima, in order."""
    alike: dict[tuple[bool, ...], list[EncodedRequest]] = {}
    for example in examples:
        alike.setdefault(towers_read(example.sizes), []).append(example)
    return sorted({example.sizes for example in examples} | {*map(batcher.largest, alike.values())})


def holds(sizes: Sizes, smaller: Sizes) -> bool:
    """Return whether prompts of the smaller sizes can be padded to these."""
    pairs = zip(sizes.flat, smaller.flat, strict=True)
    return towers_read(sizes) == towers_read(smaller) and all(most >= size for most, size in pairs)


def fitting(
    request: EncodedRequest,
    sizes: Sequence[Sizes],
    capacity: Sizes,
    examples: Sequence[EncodedRequest],
    limits: Mapping[str, tuple[int, int]],
) -> Sizes:
    """Return the first of the sizes that holds the request; InputError if none does.

    Args:
      sizes: Sizes in order.
      capacity: Least sizes that hold all examples.
      examples: Requests that the sizes are of.
      limits: How much of each setting the request needs, and how much there is room for.
    """
    smallest = next((each for each in sizes if holds(each, request.sizes)), None)
    length, images = len(request.rows[0]), request.prompt.images
    largest = max((example.prompt.images for example in examples), key=_pixels)
    if smallest is None:
        more = {"images": (len(images), len(largest)), "prompt tokens": (length, capacity.length)}
        limits = {**limits, **more}
    over = (f"{name}: {n} of at most {most}" for name, (n, most) in limits.items() if n > most)
    if what := next(over, "" if smallest else "prompt: no room"):
        mend = "shorten the request"
        if images and largest and smallest is None:
            count = int((request.rows[0].images >= 0).sum())
            what += f", with {count} for images of {_sides(images)} pixels"
            tiles = zip(request.sizes.tiles, capacity.tiles, strict=True)
            if all(n <= most for n, most in tiles):
                mend = "shorten the text"
            elif request.max_soft_tokens is not None:
                mend = f"give less than {request.max_soft_tokens} max_soft_tokens"
            else:
                mend = f"give images of at most {_sides(largest)} pixels"
        raise InputError(f"{what}; {mend}")
    assert smallest is not None
    return smallest


def _sides(images: Sequence[Picture]) -> str:
    """Return the images' sizes in pixels, as people write them."""
    return ", ".join(f"{image.width}x{image.height}" for image in images)


def _pixels(images: Sequence[Picture]) -> int:
    return sum(image.width * image.height for image in images)


def towers_read(sizes: Sizes) -> tuple[bool, ...]:
    """Return which towers read images; prompts for the same towers have the same fields."""
    return tuple(map(bool, sizes.tiles))

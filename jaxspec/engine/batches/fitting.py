"""Find the programs that requests need: their sizes, their kind of loop, and who shares a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxspec.data.images import Picture
from jaxspec.engine.memory import Sizes
from jaxspec.engine.requests import EncodedRequest
from jaxspec.errors import InputError

FEW = 512
"""Slots of a row from which on a live batch also has rows with fewer."""


class Kind(NamedTuple):
    """Choose the loop's program by what its rows need."""

    changed: bool
    """Whether a row has processors or `logprobs`."""
    sampled: bool
    guided: bool = False
    """Whether a row has a grammar, which the host is asked for in each block."""

    @classmethod
    def of(cls, requests: Sequence[EncodedRequest]) -> Kind:
        """Return the least kind that decodes these requests together."""
        changed = any(r.logprobs is not None or r.settings.changed for r in requests)
        guided = any(r.settings.grammar for r in requests)
        return cls(changed, any(r.temperature > 0 for r in requests), guided)

    def serves(self, other: Kind) -> bool:
        """Return whether this loop also decodes requests of another kind."""
        return all(have or not need for have, need in zip(self, other))


def largest(sizes: Iterable[Sizes]) -> Sizes:
    """Return the least sizes that hold prompts of all these."""
    return jax.tree.map(lambda *each: max(each), *sizes)


def live_sizes(examples: Sequence[EncodedRequest]) -> list[Sizes]:
    """Return the sizes of the examples and, with images and without, their maxima, in order."""
    by_towers: dict[tuple[bool, ...], list[Sizes]] = {}
    for example in examples:
        by_towers.setdefault(towers_read(example.sizes), []).append(example.sizes)
    return sorted({example.sizes for example in examples} | {*map(largest, by_towers.values())})


def live_forms(sizes: Sequence[Sizes], rooms: Sequence[int]) -> list[Sizes]:
    """Return growing sizes of the rows of a live batch; the last hold all its prompts and answers.

    Each has at most half the slots of the next one, and prompts of at most a quarter. Below 512
    slots there are no more, since each is compiled for each number of rows.

    Args:
      sizes: Sizes of prompts.
      rooms: Growing numbers of slots for new tokens.
    """
    *fewer, most = rooms
    forms = [largest(sizes)._replace(new=most)]
    while forms[0].slots > FEW:
        short = [each for each in sizes if each.length <= forms[0].length // 4]
        room = fewer.pop() if fewer else forms[0].new
        form = (largest(short) if short else forms[0])._replace(new=room)
        if form.slots > forms[0].slots // 2:
            break
        forms.insert(0, form)
    return forms


def holds(sizes: Sizes, smaller: Sizes) -> bool:
    """Return whether prompts of the smaller sizes can be padded to these."""
    return towers_read(sizes) == towers_read(smaller) and has_room(sizes, smaller)


def has_room(sizes: Sizes, prompts: Sizes) -> bool:
    """Return whether rows of these sizes have slots for prompts of others; answers do not count."""
    pairs = zip(sizes.flat, prompts._replace(new=0).flat, strict=True)
    return all(most >= size for most, size in pairs)


def fitting(
    request: EncodedRequest,
    sizes: Sequence[Sizes],
    examples: Sequence[EncodedRequest],
    limits: Mapping[str, tuple[int, int]],
) -> Sizes:
    """Return the first of the sizes that holds the request; InputError if none does.

    Args:
      sizes: Sizes in order.
      examples: Requests that the sizes are of.
      limits: How much of each setting the request needs, and how much there is room for.
    """
    smallest = next((each for each in sizes if holds(each, request.sizes)), None)
    if smallest is not None:
        if what := _over(limits):
            raise InputError(f"{what}; shorten the request")
        return smallest
    row, images = request.rows[0], request.prompt.images
    capacity = largest(example.sizes for example in examples)
    most_images = max(
        (example.prompt.images for example in examples),
        key=lambda images: sum(image.width * image.height for image in images),
    )
    more = {"images": (len(images), len(most_images))}
    more["prompt tokens"] = len(row), capacity.length
    what, mend = _over({**limits, **more}) or "prompt: no room", "shorten the request"
    if images and most_images:
        what += f", with {(row.images >= 0).sum()} for images of {_sides(images)} pixels"
        tiles = zip(request.sizes.tiles, capacity.tiles, strict=True)
        if all(n <= most for n, most in tiles):
            mend = "shorten the text"
        elif request.max_soft_tokens is not None:
            mend = f"give less than {request.max_soft_tokens} max_soft_tokens"
        else:
            mend = f"give images of at most {_sides(most_images)} pixels"
    raise InputError(f"{what}; {mend}")


def _over(limits: Mapping[str, tuple[int, int]]) -> str:
    """Return the first need that there is no room for; "" if there is room for all."""
    over = (f"{name}: {n} of at most {most}" for name, (n, most) in limits.items() if n > most)
    return next(over, "")


def _sides(images: Sequence[Picture]) -> str:
    """Return the images' sizes in pixels, as people write them."""
    return ", ".join(f"{image.width}x{image.height}" for image in images)


def towers_read(sizes: Sizes) -> tuple[bool, ...]:
    """Return which towers read images; prompts for the same towers have the same fields."""
    return tuple(map(bool, sizes.tiles))


def in_batches(sizes: Sequence[Sizes], most: int) -> list[list[int]]:
    """Return batches of at most `most` requests, as indices, the longest requests first.

    A batch is padded to its largest sizes. So no size in it is over twice another one, and either
    all its requests have images or none has.
    """
    batches: list[tuple[list[int], set[Sizes]]] = []
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        for members, batch_sizes in batches:
            if len(members) < most and all(_near(sizes[i], other) for other in batch_sizes):
                members.append(i)
                batch_sizes.add(sizes[i])
                break
        else:
            batches.append(([i], {sizes[i]}))
    return [members for members, _ in batches]


def _near(first: Sizes, second: Sizes) -> bool:
    """Return whether no size is over twice the other; any size is over twice 0."""
    return all(max(pair) <= 2 * min(pair) for pair in zip(first.flat, second.flat, strict=True))

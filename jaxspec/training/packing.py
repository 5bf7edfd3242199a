"""Lay several conversations into a row, so that few slots are padding.

Attention, positions and images of a row stay apart: `PromptRows.first`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxspec.models.inputs import PromptRows
from jaxspec.prompts.rows import PromptRow, concatenated, stack_rows
from jaxspec.typing import Int


def lay_out(sizes: Int[np.ndarray, "N two"], rows: int, units: tuple[int, int]) -> list[list[int]]:
    """Return the numbers of each row's conversations.

    The longest go first, each into the first row with room. Rows get as few slots as that takes,
    and then as few tiles.

    Args:
      sizes: Slots and image tiles of each conversation.
      units: Divisors of a row's slots and tiles.
    """
    order = np.argsort(-sizes[:, 0], kind="stable")
    least = np.maximum(sizes.max(0), -(-sizes.sum(0) // rows))
    slots, tiles = (rounded(size, unit) for size, unit in zip(least, units, strict=True))
    while _first_fit(sizes, order, rows, (slots, sizes[:, 1].sum())) is None:
        slots += units[0]
    while (layout := _first_fit(sizes, order, rows, (slots, tiles))) is None:
        tiles += units[1]
    return layout


def rounded(size: int, unit: int) -> int:
    """Return the size rounded up to a multiple."""
    return -(-int(size) // unit) * unit


def _first_fit(
    sizes: Int[np.ndarray, "N two"],
    order: Int[np.ndarray, " N"],
    rows: int,
    room: tuple[int, int],
) -> list[list[int]] | None:
    """Return the numbers of each row's conversations; None where one finds no room."""
    space, layout = np.tile(room, (rows, 1)), [[] for _ in range(rows)]
    for number in order:
        fitting = np.flatnonzero(np.all(space >= sizes[number], axis=1))
        if not len(fitting):
            return None
        row = int(fitting[0])
        space[row] -= sizes[number]
        layout[row].append(int(number))
    return layout


def joined(parts: Sequence[tuple[PromptRow, int]], mrope: bool = False) -> PromptRow:
    """Return conversations behind one another; each one's positions begin anew.

    The features and images of a conversation follow those of the ones before.

    Args:
      parts: The row of each conversation, and the number of its images' feature rows.
      mrope: Whether rows have rotary positions.
    """
    rows, features, images = [], 0, 0
    for row, count in parts:
        sources = row.sources
        if sources is not None:
            sources = np.where(sources < 0, sources, sources + features)
        image = np.where(row.images < 0, -1, row.images + images)
        rotary = row.positions if mrope else None
        rows.append(replace(row, sources=sources, image=image, rotary=rotary))
        features, images = features + count, images + int(row.images.max(initial=-1)) + 1
    return concatenated(rows or [PromptRow(np.zeros(0, np.int32))], anew=True)


def stacked(rows: Sequence[Sequence[tuple[PromptRow, int]]], width: int, mrope: bool) -> PromptRows:
    """Return host arrays of rows of conversations, right-padded to `width` slots."""
    stack = stack_rows([joined(row, mrope) for row in rows], width)
    first = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        lengths = [len(part) for part, _ in row]
        starts = np.cumsum([0, *lengths])
        first[i] = np.repeat(starts, [*lengths, width - starts[-1]])
    return stack.replace(first=first)

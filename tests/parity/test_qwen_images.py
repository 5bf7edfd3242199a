"""An image of Qwen2.5-VL has the patches, tokens and positions that transformers counts, at any
size.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.vision_utils import get_vision_window_index

from jaxspec.config import QwenVLConfig
from jaxspec.errors import InputError
from jaxspec.models.inputs import Pool
from jaxspec.models.lvlms.qwen_vl import QwenImages
from jaxspec.prompts.rows import rewrite, stack_rows

CONFIG = QwenVLConfig.from_hf(
    {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
)
"""Qwen2.5-VL-7B's geometry: patches of 14, merge groups of 28, windows of 112 pixels."""
IMAGE = CONFIG.image_token_index
SIZE = st.tuples(st.integers(1, 900), st.integers(1, 900)).filter(
    lambda size: max(size) <= 200 * min(size)
)


def reader(least: int = 4, most: int = 200) -> QwenImages:
    """Return a reader of images of `least` to `most` tokens."""
    return QwenImages(
        CONFIG, SimpleNamespace(size={"shortest_edge": least * 784, "longest_edge": most * 784})
    )


@pytest.fixture(scope="module")
def positions() -> Any:
    """Return transformers' rotary positions of a prompt, and the position after it less its
    slot.
    """
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(num_hidden_layers=1, vision_config={"depth": 1})
        )

    def of(tokens: list[int], grids: list[tuple[int, int]]) -> tuple[np.ndarray, int]:
        ids = torch.tensor([tokens])
        grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
        found, shift = model.model.get_rope_index(ids, (ids == IMAGE).int(), grid)
        return found[:, 0].numpy(), int(shift)

    return of


@settings(max_examples=60, deadline=None)
@given(SIZE, st.integers(1, 40), st.integers(0, 300))
def test_grid(size, least, more):
    """The grid of an image is that of the processor's resizing, at any size."""
    least, most = least * 784, (least + more) * 784
    images = QwenImages(
        CONFIG, SimpleNamespace(size={"shortest_edge": least, "longest_edge": most})
    )
    assert tuple(28 * side for side in images.grid(size)) == smart_resize(
        size[0], size[1], 28, least, most
    )


@settings(max_examples=40, deadline=None)
@given(SIZE)
def test_slots_show_the_tokens_of_their_windows(size):
    """The real groups of all windows, one after the other, are transformers' merged tokens in its
    window order.
    """
    images = reader()
    rows, columns = images.grid(size)
    order, _ = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * columns]]), 2, 112, 14)
    patches = np.repeat(np.arange(rows * columns, dtype=np.float32), 4)[:, None]
    tile = images.cut(patches, rows, columns)
    table = tile["patches"][..., 0].reshape(-1, 4)[:, 0]
    slots = images.slots(size, None)
    assert slots.rows == len(table) == 16 * images.tiles(size)
    np.testing.assert_array_equal(table[slots.sources[:, 0]], np.arange(rows * columns))
    assert np.sort(slots.sources[:, 0]).tolist() == slots.sources[order.numpy(), 0].tolist()
    assert tile["window"][:, 2:].prod(axis=1).sum() == 4 * rows * columns


@settings(max_examples=25, deadline=None)
@given(st.lists(SIZE, max_size=4), st.lists(st.integers(0, 7), min_size=5, max_size=5))
def test_positions(positions, sizes, words):
    """Positions of prompts with several images, with text around them and text written after them,
    are transformers'.
    """
    images = reader(most=60)
    grids = [images.grid(size) for size in sizes]
    prompt, whole = [1], [1]
    for count, grid in zip(words, [*grids, None]):
        text = list(range(5, 5 + count))
        prompt += [*text, *([IMAGE, 3] if grid else [])]
        whole += [*text, *([IMAGE] * (grid[0] * grid[1]) + [3] if grid else [])]
    row = rewrite(np.asarray(prompt), IMAGE, [images.slots(size, None) for size in sizes])
    assert row.tokens.tolist() == whole
    if not sizes:
        assert row.rotary is None
        return
    expected, shift = positions(whole, grids)
    np.testing.assert_array_equal(row.rotary, expected)
    batch = stack_rows([row], len(whole) + 3)
    assert batch.shift is not None
    assert int(batch.shift[0]) == shift
    longer, _ = positions([*whole, 8, 9], grids)
    np.testing.assert_array_equal(row.followed_by([8, 9]).rotary, longer)


@settings(max_examples=25, deadline=None)
@given(SIZE)
def test_pooled(size):
    """View P shows means of 2x2 tokens, or of what there is at odd edges, at the positions of the
    smaller grid.
    """
    images = reader()
    rows, columns = images.grid(size)
    slots, pooled = images.slots(size, None), images.slots(size, Pool())
    table = np.random.default_rng(0).normal(size=(slots.rows, 3))
    grid = table[slots.sources[:, 0]].reshape(rows, columns, 3)
    expected = [
        [grid[y : y + 2, x : x + 2].mean((0, 1)) for x in range(0, columns, 2)]
        for y in range(0, rows, 2)
    ]
    assert pooled.blend is not None
    shown = (table[pooled.sources] * pooled.blend[..., None]).sum(1)
    np.testing.assert_allclose(shown, np.concatenate(expected), atol=1e-6)
    assert pooled.positions is not None
    assert pooled.positions.shape == (3, len(shown))
    assert pooled.positions.max(axis=1).tolist() == [0, len(expected) - 1, len(expected[0]) - 1]
    assert pooled.rows == slots.rows
    assert QwenImages.blended(Pool()) == pooled.sources.shape[1]


def test_a_text_draft_has_no_rotary_positions():
    """A text draft has prompts as long as its target's, and no rotary positions: its positions are
    the slots.
    """
    shown = reader().slots((200, 300), None)
    m = rewrite(np.asarray([1, IMAGE, 5]), IMAGE, [shown])
    t = rewrite(np.asarray([1, IMAGE, 5]), IMAGE, [[4]])
    target, view = (stack_rows([row], 100) for row in (m, t))
    assert target.rotary is not None
    assert view.rotary is None
    assert view.shift is None
    mixed, text = (stack_rows([row], 100, mrope=True) for row in (m, t))
    np.testing.assert_array_equal(mixed.rotary, target.rotary)
    assert text.rotary is not None
    assert text.shift is not None
    np.testing.assert_array_equal(text.rotary[0], np.tile(np.arange(100), (3, 1)))
    assert int(text.shift[0]) == 0


def test_pooling_to_a_number_is_refused():
    with pytest.raises(InputError, match="number of image tokens depends on the image") as caught:
        reader().slots((100, 100), Pool(36))
    assert "\n" not in str(caught.value)


def test_wrong_images_and_processors():
    with pytest.raises(InputError, match="image of 1x201: one side is over 200 times"):
        reader().tiles((201, 1))
    images = reader()

    def processor(images: Any, size: Any, return_tensors: str) -> dict[str, np.ndarray]:
        return {
            "pixel_values": np.zeros((16, 1176), np.float32),
            "image_grid_thw": np.asarray([[1, 4, 4]]),
        }

    processor.size = images.processor.size
    with pytest.raises(
        InputError, match=r"in grids \[\[1, 4, 4\]\].*reads 1176 values in \[\[1, 8, 8\]\]"
    ):
        replace(images, processor=processor).read([SimpleNamespace(height=112, width=112)])

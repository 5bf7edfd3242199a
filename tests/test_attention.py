"""Long prompts are attended to in blocks, and on TPUs by a kernel: what they read is what whole
scores say.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import attention
from jaxspec.models.attention import (
    BLOCK,
    attend,
    attend_freely,
    attend_whole,
    attend_within,
    owner_block,
)
from jaxspec.models.inputs import image_ends
from jaxspec.models.splash import splash
from jaxspec.sharding import make_mesh, on_mesh
from jaxspec.typing import Array

B, N, K, H = 2, 4, 2, 8
close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def drawn(queries: int, slots: int, kv_heads: int = K) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    shapes = (B, queries, N, H), (B, kv_heads, slots, H), (B, kv_heads, slots, H)
    # type: ignore[return-value]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def output_and_gradients(read: Any, *args: Array) -> tuple[Array, tuple[Array, ...]]:
    """Return what is read, and the gradients of the sum of its sines."""

    def loss(*args: Array) -> tuple[Array, Array]:
        output = read(*args)
        return jnp.sum(jnp.sin(output)), output

    (_, output), gradients = jax.jit(
        jax.value_and_grad(loss, argnums=tuple(range(len(args))), has_aux=True)
    )(*args)
    return output, gradients


@pytest.mark.parametrize(
    ("queries", "slots", "first"), [(20, 20, 0), (19, 33, (0, 14)), (16, 37, (5, 21))]
)
def test_blocks_read_what_whole_scores_do(
    monkeypatch: pytest.MonkeyPatch, queries: int, slots: int, first: int | tuple[int, int]
) -> None:
    """Attention in blocks gives what whole scores give, with its gradients, in rows that are whole
    or stand behind others; blocks end before the queries and slots do, or with them.
    """
    monkeypatch.setattr(attention, "BLOCK", 8)
    args = drawn(queries, slots)
    positions = jnp.broadcast_to(jnp.asarray(first), B)[:, None] + jnp.arange(queries)
    readers = (partial(read, positions=positions) for read in (attend, attend_whole))
    jax.tree.map(close, *(output_and_gradients(read, *args) for read in readers))


@pytest.mark.parametrize("window", [None, 3, 11])
@pytest.mark.parametrize(("queries", "slots", "first"), [(37, 37, 0), (29, 45, (0, 14))])
def test_tokens_of_an_image_read_one_another(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    queries: int,
    slots: int,
    first: int | tuple[int, int],
) -> None:
    """Images whose tokens read one another are read in blocks as from whole scores: longer than
    blocks and windows, at a block's end, or as the row's last tokens.
    """
    monkeypatch.setattr(attention, "BLOCK", 8)
    q, k, v = drawn(queries, slots, N)
    begin = np.broadcast_to(first, B)[:, None]
    positions = jnp.asarray(begin + np.arange(queries))
    spans = [(1, 21), (22, 24), (25, 29)], [(0, 8), (9, queries)]
    owner = np.full((B, slots), -1)
    for row, images in enumerate(spans):
        for image, (start, stop) in enumerate(images):
            owner[row, begin[row, 0] + start : begin[row, 0] + stop] = image
    owners = np.take_along_axis(owner, np.asarray(positions), axis=1)[..., None]
    at, slot = np.asarray(positions)[..., None], np.arange(slots)
    mask = (slot <= at) | ((owners >= 0) & (owner[:, None] == owners))
    mask &= slot > at - (window or slots)
    reach = jnp.asarray(begin) + image_ends(jnp.asarray(owners[..., 0] >= 0))
    expected = partial(attend_freely, mask=jnp.asarray(mask))

    def turned(q: Array, k: Array, v: Array) -> Array:
        return expected(q, k.swapaxes(1, 2), v.swapaxes(1, 2))

    theirs = output_and_gradients(turned, q, k, v)
    for read in (attend, attend_whole):
        ours = partial(read, positions=positions, window=window, reach=reach)
        jax.tree.map(close, output_and_gradients(ours, q, k, v), theirs)


@pytest.mark.parametrize("window", [None, 5])
def test_conversations_of_a_row_do_not_read_one_another(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Conversations of a row do not read one another, whole, in blocks, and by the kernel; an image
    ends where a conversation does.
    """
    count = 130
    args, slots = drawn(count, count), jnp.arange(count)
    starts = jnp.asarray([[0, 37, 40, 111], [0, 8, 16, count]])
    first = jnp.take_along_axis(starts, (slots >= starts[..., None]).sum(1) - 1, axis=1)
    same = first[:, :, None] == first[:, None]
    near = (slots <= slots[:, None]) & (slots > slots[:, None] - (window or count))
    theirs = output_and_gradients(partial(reads, np.asarray(same & near)), *args)
    positions = jnp.broadcast_to(slots, (B, count))
    kernel = partial(splash, owner=first, causal=True, window=window, interpret=True)
    bounds: dict[str, Any] = {"positions": positions, "window": window, "first": first}
    for read in (attend_whole, attend):
        jax.tree.map(close, output_and_gradients(partial(read, **bounds), *args), theirs)
        monkeypatch.setattr(attention, "BLOCK", 8)
    jax.tree.map(close, output_and_gradients(kernel, *args), theirs)
    images = jnp.asarray([[0, 1, 1, 1, 1]], bool)
    assert image_ends(images, jnp.asarray([[0, 0, 0, 3, 3]])).tolist() == [[0, 2, 2, 4, 4]]


def test_what_follows_is_not_read() -> None:
    """What follows a token is not read: rows are padded at their ends, and even NaN there changes
    no earlier token.
    """
    q, k, v = drawn(2 * BLOCK, 2 * BLOCK)
    positions = jnp.broadcast_to(jnp.arange(2 * BLOCK), (B, 2 * BLOCK))
    read = jax.jit(attend)
    clean = read(q, k, v, positions)
    dirty = read(q, k.at[:, :, BLOCK:].set(jnp.nan), v, positions)
    np.testing.assert_array_equal(clean[:, :BLOCK], dirty[:, :BLOCK])


def test_scores_of_a_long_prompt_never_lie_whole_in_memory() -> None:
    """Scores of a long prompt never lie whole in memory; the program of short prompts knows no
    blocks.
    """

    def arrays(count: int) -> list[int]:
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x in jax.eval_shape(lambda: drawn(count, count))
        ]
        places = jax.ShapeDtypeStruct((B, count), jnp.int32)
        text = jax.jit(attend).lower(*shapes, places).as_text()
        return [
            int(np.prod([int(n) for n in shape.split("x")]))
            for shape in re.findall(r"tensor<([\dx]+)xf32>", text)
        ]

    assert max(arrays(4 * BLOCK)) <= max(B * N * BLOCK**2, B * N * 4 * BLOCK * H)
    assert max(arrays(BLOCK)) == B * N * BLOCK**2


@pytest.mark.parametrize(("count", "split", "owned"), [(130, True, False), (256, True, True)])
def test_the_kernel_reads_what_whole_scores_do(count: int, split: bool, owned: bool) -> None:
    """The kernel, which JAX interprets here, reads what whole scores do, with heads that share
    keys, alone and with rows and heads split over a mesh.

    It also reads within owners, as the tower of Qwen2.5-VL reads within images.
    """
    q, k, v = drawn(count, count, kv_heads=N if owned else K)
    positions = jnp.broadcast_to(jnp.arange(count), (B, count))
    owner = jnp.stack([jnp.arange(count) // 50, jnp.where(jnp.arange(count) < 100, 0, -1)])
    run = jax.jit(partial(splash, interpret=True))
    with on_mesh(make_mesh(model=2, data=2) if split else None):
        found = run(q, k, v, *([owner] if owned else []))
    if owned:
        keys, values, same = k.swapaxes(1, 2), v.swapaxes(1, 2), owner[:, :, None] == owner[:, None]
        close(found, jax.jit(attend_freely)(q, keys, values, same))
    else:
        close(found, jax.jit(attend_whole)(q, k, v, positions))


def test_the_kernels_gradients_are_those_of_whole_scores() -> None:
    args, positions = drawn(256, 256), jnp.broadcast_to(jnp.arange(256), (B, 256))

    def loss(attention, *args: Array) -> Array:
        return jnp.sum(jnp.sin(attention(*args)))

    ours, theirs = (
        jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2)))(*args)
        for attention in (
            partial(splash, interpret=True),
            partial(attend_whole, positions=positions),
        )
    )
    jax.tree.map(close, ours, theirs)


def test_images_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are read in blocks as from whole scores, also where the last block is not full, and a
    row has no image.
    """
    sizes = [owner_block(64 * tiles) for tiles in (2, 64, 128, 256, 1024)]
    assert sizes == [128, 512, 512, 256, 64]
    monkeypatch.setattr(attention, "BLOCK", 8)
    count = 29
    q, k, v = (jax.random.normal(jax.random.key(i), (2, count, 2, 4)) for i in range(3))
    images = (jnp.arange(count) >= jnp.asarray([[11], [count]])) + jnp.asarray([[3], [-1]])
    expected = attend_freely(q, k, v, images[:, :, None] == images[:, None])
    close(jax.jit(attend_within)(q, k, v, images), expected)


WINDOW = 5


@jax.jit
def reads(visible: np.ndarray, q: Array, k: Array, v: Array) -> Array:
    """Return attention to the slots [B, T, S] that are marked, from whole arrays."""
    keys, values = (jnp.repeat(leaf, N // K, axis=1).swapaxes(1, 2) for leaf in (k, v))
    return attend_freely(q, keys, values, jnp.asarray(visible))


def test_a_window_hides_all_but_the_newest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window hides all tokens except the newest, whole, in blocks of which some are hidden as a
    whole, and by the kernel.
    """
    positions = np.stack([np.arange(20, 60), np.arange(3, 43)])
    distance = positions[..., None] - np.arange(70)
    args = drawn(40, 70)
    expected = reads((distance >= 0) & (distance < WINDOW), *args)
    for block in (BLOCK, 8):
        monkeypatch.setattr(attention, "BLOCK", block)
        windowed = jax.jit(partial(attend, window=WINDOW))
        close(windowed(*args, jnp.asarray(positions)), expected)
    whole = drawn(130, 130)
    distance = np.arange(130)[:, None] - np.arange(130)
    kernel = jax.jit(partial(splash, window=WINDOW, interpret=True))(*whole)
    close(kernel, reads(((distance >= 0) & (distance < WINDOW))[None], *whole))


def test_a_window_counts_the_positions_of_a_tree() -> None:
    """A window counts the positions of a tree, not its slots. Nodes 0 to 7 have the parents -, 0,
    0, 1, 2, 3, 5, 6; the pass reads the last five.
    """
    parents, roots, count = (-1, 0, 0, 1, 2, 3, 5, 6), (4, 1), 5
    nodes = len(parents)
    depth, seen = np.zeros(nodes, int), np.zeros((nodes, nodes), bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depth[node], seen[node] = depth[parent] + 1, seen[parent]
        seen[node, node] = True
    args = drawn(count, 20)
    visible = np.zeros((B, count, 20), bool)
    for row, root in enumerate(roots):
        for query in range(count):
            node = nodes - count + query
            for slot in range(root + nodes):
                before = slot < root
                at = slot - root if before else depth[slot - root]
                ancestor = before or seen[node, slot - root]
                visible[row, query, slot] = ancestor and depth[node] - at < WINDOW
    positions = np.asarray(roots)[:, None] + np.arange(nodes - count, nodes)
    mask = jnp.asarray(seen[None, -count:])
    found = jax.jit(partial(attend, window=WINDOW))(*args, jnp.asarray(positions), mask)
    close(found, reads(visible, *args))
    assert depth.max() >= WINDOW  # one node does not see the root

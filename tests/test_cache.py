"""Ragged writes land at their positions, never past the end, and a rollback is a length."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxspec.cache import init_cache, remember, write
from jaxspec.models import build

from tests import tiny

B, S, K, H, T = 3, 7, 2, 4, 3
jit_write = jax.jit(write)
starts = st.lists(st.integers(0, S + 2), min_size=B, max_size=B)


def entries(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, count, K, H)).astype(np.float32)


def written(old: np.ndarray, new: np.ndarray, positions: np.ndarray) -> np.ndarray:
    expected = old.copy()
    for (b, t), position in np.ndenumerate(positions):
        if position < S:
            expected[b, :, position] = new[b, t]
    return expected


@given(starts)
def test_a_write_touches_its_slots_and_no_other(first: list[int]) -> None:
    old, new = entries(0, S).swapaxes(1, 2), entries(1, T)
    positions = np.asarray(first, np.int32)[:, None] + np.arange(T, dtype=np.int32)
    np.testing.assert_array_equal(jit_write(old, new, positions), written(old, new, positions))


@pytest.mark.parametrize("position", [0, S - 1, S])
def test_a_single_entry_is_written_like_many(position: int) -> None:
    old, new, positions = entries(0, S)[:1].swapaxes(1, 2), entries(1, 1)[:1], np.asarray([[position]])
    np.testing.assert_array_equal(jit_write(old, new, positions), written(old, new, positions))


def test_what_was_rolled_back_is_never_seen() -> None:
    """Rows are cut to ragged lengths and extended: their logits are those of a forward pass without a cache."""
    model, params = tiny.text_only(*tiny.lvlm(16, 2, seed=0))
    extend = jax.jit(partial(model.extend, params))
    rng = np.random.default_rng(0)
    kept, cut, after = (rng.integers(0, model.text.vocab_size, (B, 4), dtype=np.int32) for _ in range(3))
    length = np.asarray([4, 2, 0], np.int32)

    cache = init_cache(model.text, B, 10, jnp.dtype(jnp.float32))
    for tokens in (kept, cut):
        _, cache = extend(tokens, cache)
    assert cache.length.tolist() == [8] * B
    logits, cache = extend(after, cache.replace(length=jnp.asarray(length)))
    assert cache.length.tolist() == (length + 4).tolist()

    rows = np.zeros((B, 8), np.int32)
    for b, n in enumerate(length):
        rows[b, : n + 4] = [*kept[b, :n], *after[b]]
    whole = jax.jit(build(model.config).apply)({"params": params}, rows)
    for b, n in enumerate(length):
        np.testing.assert_allclose(logits[b], whole[b, n : n + 4], atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_pass_in_a_loop_copies_no_cache(tokens: int) -> None:
    """Neither to write one entry, nor to bring the heads in the order in which they are multiplied."""
    model, params = tiny.text_only(*tiny.lvlm(64, 1, seed=0, vocabulary=128))

    def loop(params: dict, fed: jax.Array, cache: object, times: int) -> tuple:
        def step(_: int, carry: tuple) -> tuple:
            logits, after = model.extend(params, *carry)
            return jnp.argmax(logits, -1).astype(jnp.int32), after

        return jax.lax.fori_loop(0, times, step, (fed, cache))

    slots = 24
    cache = init_cache(model.text, 1, slots, jnp.dtype(jnp.float32))
    fed = jnp.ones((1, tokens), jnp.int32)
    program = jax.jit(loop, donate_argnums=2).lower(params, fed, cache, 3).compile().as_text()
    shapes = {",".join(map(str, order)) for order in ((1, 2, slots, 16), (1, slots, 2, 16), (1, 2, 16, slots))}
    assert program is not None
    assert f"[1,2,{slots},16]" in program
    copied = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", program)
    assert not shapes & set(copied)


def test_whole_rows_are_written_as_entry_by_entry() -> None:
    """A prompt that fills the first slots in order needs no scatter, and leaves what lies behind as it was."""
    leaf, new = (jnp.asarray(entries(seed, S)).swapaxes(1, 2) for seed in (0, 1)), jnp.asarray(entries(2, T))
    cache, positions = tuple(leaf), jnp.broadcast_to(jnp.arange(T), (B, T))
    scattered = remember(cache, new, 2 * new, positions, None)[2]
    *read, placed = remember(cache, new, 2 * new, positions, T)
    jax.tree.map(np.testing.assert_array_equal, placed, scattered)
    jax.tree.map(np.testing.assert_array_equal, read, [new.swapaxes(1, 2), 2 * new.swapaxes(1, 2)])

"""Weights in panels are the same weights, and a pass of the loop copies no cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_cache
from jaxspec.decoding import loading
from jaxspec.decoding.loading import LoadedModel
from jaxspec.models import panels
from jaxspec.models.panels import ROWS, WIDTH, panelled
from tests import tiny

LM, PARAMS = tiny.text_only(*tiny.lvlm(WIDTH, 1, seed=0, vocabulary=2 * WIDTH))
SLOTS = 24


def test_kernels_that_divide_are_cut_and_all_else_is_kept() -> None:
    layer = panelled(PARAMS)["model"]["layers_0"]
    kernel = PARAMS["model"]["layers_0"]["mlp"]["gate_proj"]["kernel"]
    np.testing.assert_array_equal(np.concatenate(layer["mlp"]["gate_proj"]["panels"], axis=1), kernel)
    assert set(layer["self_attn"]["k_proj"]) == {"kernel"}  # 32 columns
    assert layer["input_layernorm"] == PARAMS["model"]["layers_0"]["input_layernorm"]


def test_loops_of_few_rows_read_panels_and_memory_counts_them() -> None:
    model = LoadedModel(LM.config, PARAMS, None, None)
    planned = model.panel_bytes(ROWS)
    given = {id(leaf) for leaf in jax.tree.leaves(PARAMS)}
    fresh = [leaf for leaf in jax.tree.leaves(model.loop_params(ROWS)) if id(leaf) not in given]
    assert planned == sum(leaf.nbytes for leaf in fresh) > 0
    assert model.loop_params(ROWS + 1) is PARAMS
    assert model.panel_bytes(ROWS + 1) == 0


def test_loops_read_no_panels_where_they_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "panels_pay", lambda: False)
    model = LoadedModel(LM.config, PARAMS, None, None)
    assert model.loop_params(1) is PARAMS
    assert model.panel_bytes(1) == 0


@pytest.mark.parametrize(("plain", "pay"), [(2.0, True), (1.2, False), (0.5, False)])
def test_panels_pay_where_they_are_much_faster(plain: float, pay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a clock on which the plain product takes so many times as long as that of panels."""
    now, real = 0.0, panels._multiplied

    def call(multiply: Callable, *matrices: jax.Array) -> jax.Array:
        nonlocal now
        now += plain if multiply is jnp.matmul else 1.0
        return real(multiply, *matrices)

    monkeypatch.setattr(panels, "_multiplied", call)
    monkeypatch.setattr(panels.time, "perf_counter", lambda: now)
    assert panels.panels_pay.__wrapped__() == pay


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 2)])
def test_a_pass_over_panels_computes_the_same(batch: int, tokens: int) -> None:
    cache = init_cache(LM.text, batch, SLOTS, jnp.dtype(jnp.float32))
    fed = np.random.default_rng(0).integers(0, 2 * WIDTH, (batch, tokens), dtype=np.int32)
    extend = jax.jit(LM.extend)
    (plain, left), (cut, right) = (extend(params, fed, cache) for params in (PARAMS, panelled(PARAMS)))
    np.testing.assert_allclose(plain, cut, atol=1e-4, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-5), left, right)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_pass_in_a_loop_copies_no_cache(tokens: int) -> None:
    """Neither to write one entry, nor to bring the heads in the order in which they are multiplied."""

    def loop(params: dict, fed: jax.Array, cache: object, times: int) -> tuple:
        def step(_: int, carry: tuple) -> tuple:
            logits, after = LM.extend(params, *carry)
            return jnp.argmax(logits, -1).astype(jnp.int32), after

        return jax.lax.fori_loop(0, times, step, (fed, cache))

    cache = init_cache(LM.text, 1, SLOTS, jnp.dtype(jnp.float32))
    fed = jnp.ones((1, tokens), jnp.int32)
    program = jax.jit(loop, donate_argnums=2).lower(PARAMS, fed, cache, 3).compile().as_text()
    shapes = {",".join(map(str, order)) for order in ((1, 2, SLOTS, 16), (1, SLOTS, 2, 16), (1, 2, 16, SLOTS))}
    assert program is not None
    assert f"[1,2,{SLOTS},16]" in program
    copied = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", program)
    assert not shapes & set(copied)

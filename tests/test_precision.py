"""Models multiply in float32 with all its bits, and make logits in float32 whatever the weights
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.inputs import PromptRows
from jaxspec.models.int8 import int8_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.typing import Params
from tests.tiny import lvlm, text_only

SEES, PARAMS = lvlm(64, 1, seed=0, vocabulary=64)
MODEL, TEXT = text_only(SEES, PARAMS)
ROWS = PromptRows(jnp.asarray([[1, 5, 6]], jnp.int32), jnp.asarray([3], jnp.int32))


@pytest.fixture
def unset() -> Iterator[None]:
    """Leave the precision as in a process that says nothing of it, unlike the tests' own."""
    before = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", None)
    yield
    jax.config.update("jax_default_matmul_precision", before)


def half(params: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def precisions(function: Any, *args: Any) -> set[Any]:
    """Return the precisions of all products that a function makes."""

    def products(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                precision = eqn.params["precision"]
                yield precision[0] if isinstance(precision, tuple) else precision
        for eqn in jaxpr.eqns:
            for value in eqn.params.values():
                if hasattr(value, "jaxpr"):
                    yield from products(value.jaxpr)

    return set(products(jax.make_jaxpr(function)(*args).jaxpr))


def score(model: LanguageModel) -> Any:
    return lambda params: model.score(params, ROWS, None)


def test_float32_is_multiplied_in_all_its_bits(unset: None) -> None:
    assert precisions(score(MODEL), TEXT) == {jax.lax.Precision.HIGHEST}
    assert precisions(score(MODEL), half(TEXT)) == {None}
    assert precisions(score(MODEL), int8_params(TEXT)) == {jax.lax.Precision.HIGHEST}
    assert precisions(score(MODEL), int8_params(half(TEXT))) == {None}
    pixels = {"pixels": jnp.zeros((1, 1, 8, 8, 3))}
    assert precisions(lambda params: SEES.encode(params, pixels), PARAMS) == {
        jax.lax.Precision.HIGHEST
    }


def test_a_process_may_say_otherwise(unset: None) -> None:
    with jax.default_matmul_precision("bfloat16"):
        assert jax.lax.Precision.HIGHEST not in precisions(score(MODEL), TEXT)


def test_logits_of_half_precision_are_not_rounded() -> None:
    logits = np.asarray(jax.jit(score(MODEL))(half(TEXT)))
    assert logits.dtype == np.float32
    assert (logits != np.asarray(jnp.asarray(logits).astype(jnp.bfloat16), np.float32)).any()

"""Training state and one optimiser step, with frozen parameters kept out of gradient and optimiser state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxspec.models.layers import remat_layers
from jaxspec.sharding import constrain
from jaxspec.training.config import TrainConfig
from jaxspec.training.optimizer import Flat, merge
from jaxspec.typing import Array, Params

LossFn = Callable[[Params, Any], tuple[Array, dict[str, Array]]]
"""(parameters, batch) -> (mean loss, metrics). The metric `tokens` is how many positions the means are over."""


class TrainState(struct.PyTreeNode):
    step: Array
    params: Flat
    """The trainable parameters, float32."""
    opt_state: optax.OptState


def init_state(params: Flat, optimizer: optax.GradientTransformation) -> TrainState:
    """Make a state of copies of the parameters, for it is donated, and the caller's arrays must outlive it."""
    params = {path: jnp.array(leaf, jnp.float32, copy=True) for path, leaf in params.items()}
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def in_dtype(tree: Any, dtype: Any) -> Any:
    """The tree with its floating leaves in a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def gradient(
    loss_fn: LossFn, config: TrainConfig, trainable: Flat, held: Flat, batch: Any
) -> tuple[Flat, dict[str, Array]]:
    """Gradient of the mean loss over a batch, and the metrics; computed in the configuration's dtype and parts.

    Parts of a batch are weighted by the `tokens` that they count, so that the gradient is that of the whole.
    """

    def whole(batch: Any) -> tuple[Flat, dict[str, Array]]:
        def loss(trainable: Flat) -> tuple[Array, dict[str, Array]]:
            with remat_layers(config.remat):
                return loss_fn(merge(in_dtype(trainable, config.dtype), held), batch)

        return jax.grad(loss, has_aux=True)(trainable)

    if config.accumulate == 1:
        return whole(batch)

    def weighted(part: Any) -> tuple[Array, Any]:
        grads, metrics = whole(jax.tree.map(lambda x: constrain(x, "batch", *[None] * (x.ndim - 1)), part))
        weight = metrics.get("tokens", jnp.ones(()))
        return weight, jax.tree.map(lambda x: x.astype(jnp.float32) * weight, (grads, metrics))

    # Every n-th row, not n-ths of the rows: so each device's own rows make up its share of every part.
    parts = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, config.accumulate, *x.shape[1:]), 0, 1), batch)
    shapes = jax.eval_shape(weighted, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = partial(jax.tree.map, jnp.add)
    (total, sums), _ = jax.lax.scan(lambda carry, part: (add(carry, weighted(part)), None), zeros, parts)
    grads, metrics = jax.tree.map(lambda x: x / jnp.maximum(total, 1e-9), sums)
    return grads, metrics | ({"tokens": total} if "tokens" in metrics else {})


def make_step(loss_fn: LossFn, optimizer: optax.GradientTransformation, config: TrainConfig) -> Callable[..., Any]:
    """(state, frozen, batch) -> (state, metrics), to be compiled with the state donated."""

    def step(state: TrainState, held: Flat, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        grads, metrics = gradient(loss_fn, config, state.params, held, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics | {"grad_norm": optax.global_norm(grads)}

    return step

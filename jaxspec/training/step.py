"""Training state and one optimiser step, with frozen parameters kept out of gradient and optimiser state.

Parameters are by path here: 'language_model/lm_head/kernel' -> array.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import InputError
from jaxspec.models.layers import remat_layers
from jaxspec.sharding import constrain
from jaxspec.training.config import TrainConfig
from jaxspec.typing import Array, Params

Flat = dict[str, Any]
"""Parameters by path."""
LossFn = Callable[[Params, Any], tuple[Array, dict[str, Array]]]
"""(parameters, batch) -> (mean loss, metrics). The metric `tokens` is how many positions the means are over."""
Places = Callable[[Any], Params]
"""Mesh -> pytree like the parameters, of their shardings: `partial(shardings, config, params)` for one model."""


class TrainState(struct.PyTreeNode):
    step: Array
    params: Flat
    """The trainable parameters, float32."""
    opt_state: optax.OptState


def flatten(params: Params) -> Flat:
    """Nested dict -> leaves by path."""
    return dict(flatten_dict(params, sep="/"))  # pyright: ignore[reportArgumentType, reportCallIssue]


def partition(params: Params, patterns: Sequence[str]) -> tuple[Flat, Flat]:
    """(trainable, frozen) parameters by path; a path is frozen if any of the regexes matches from its start."""
    flat = flatten(params)
    _check_patterns("frozen", patterns, flat)
    frozen = {
        path: leaf
        for path, leaf in flat.items()
        if any(re.match(pattern, path) for pattern in patterns)
    }
    if len(frozen) == len(flat):
        raise InputError(
            f"frozen: {', '.join(patterns)} match every parameter; leave something to train"
        )
    return {path: leaf for path, leaf in flat.items() if path not in frozen}, frozen


def merge(trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
    """Undo `partition`."""
    return unflatten_dict({**trainable, **frozen}, sep="/")


def _check_patterns(field: str, patterns: Sequence[str], flat: Mapping[str, Any]) -> None:
    idle = [pattern for pattern in patterns if not any(re.match(pattern, path) for path in flat)]
    if idle:
        parts = sorted({path.partition("/")[0] for path in flat})
        raise InputError(
            f"{field}: {idle[0]!r} matches no parameter; the paths begin with {', '.join(parts)}"
        )


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from 0 to the peak rate, then cosine decay over all remaining steps."""
    peak, warmup = config.learning_rate, min(config.warmup, config.steps // 2)
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, config.steps, peak * config.final_rate
    )


def make_optimizer(
    config: TrainConfig, trainable: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decay on matrices only, then each path's factor of the rate."""
    _check_patterns("rates", [pattern for pattern, _ in config.rates], trainable)

    def is_matrix(params: Flat) -> dict[str, bool]:
        return {path: jnp.ndim(leaf) > 1 for path, leaf in params.items()}

    def scale(updates: Any, _: Any) -> Any:
        def factor(path: str) -> float:
            return next(
                (factor for pattern, factor in config.rates if re.match(pattern, path)), 1.0
            )

        return {path: factor(path) * update for path, update in updates.items()}

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            make_schedule(config), b2=config.beta2, weight_decay=config.weight_decay, mask=is_matrix
        ),
        *([optax.stateless(scale)] if config.rates else []),
    )


def init_state(params: Flat, optimizer: optax.GradientTransformation) -> TrainState:
    """Make a state of copies of the parameters, for it is donated, and the caller's arrays must outlive it."""
    params = {path: jnp.array(leaf, jnp.float32, copy=True) for path, leaf in params.items()}
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def in_dtype(tree: Any, dtype: Any) -> Any:
    """Return the tree with its floating leaves in a dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def placed_on(mesh: Any, params: Params, places: Places | None) -> dict[str, NamedSharding]:
    """Return the sharding of every path; without `places`, all are whole on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    return dict.fromkeys(flatten(params), whole) if places is None else flatten(places(mesh))


def like_parameters(tree: Any, places: Mapping[str, NamedSharding], mesh: Any) -> Any:
    """Shardings of a state: what is kept by path lies as that parameter does, all else is whole on every device."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        return places.get(getattr(path[-1], "key", ""), NamedSharding(mesh, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(place, tree)


def place_state(
    trainable: Flat,
    frozen: Flat,
    optimizer: optax.GradientTransformation,
    where: Mapping[str, NamedSharding],
    mesh: Mesh,
    dtype: str,
) -> tuple[TrainState, Flat]:
    """(first state, frozen parameters) on the mesh. Frozen ones are kept in what is computed in, and only so."""

    def put(path: str, leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and (
            leaf.sharding == where[path] or not leaf.is_fully_addressable
        ):
            return jax.device_put(leaf, where[path])
        host = np.asarray(leaf)  # every process holds it whole
        return jax.make_array_from_callback(host.shape, where[path], lambda index: host[index])

    init = partial(init_state, optimizer=optimizer)
    places = like_parameters(jax.eval_shape(init, trainable), where, mesh)
    state = jax.jit(init, out_shardings=places)(
        {path: put(path, leaf) for path, leaf in trainable.items()}
    )
    return state, {path: put(path, in_dtype(leaf, dtype)) for path, leaf in frozen.items()}


def on_host(tree: Any) -> Any:
    """Return the arrays whole in this process's memory; with several processes, all of them must call it."""

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


def gradient(
    loss_fn: LossFn, config: TrainConfig, trainable: Flat, frozen: Flat, batch: Any
) -> tuple[Flat, dict[str, Array]]:
    """Gradient of the mean loss over a batch, and the metrics; computed in the configuration's dtype and parts.

    Parts of a batch are weighted by the `tokens` that they count, so that the gradient is that of the whole.
    """

    def whole(batch: Any) -> tuple[Flat, dict[str, Array]]:
        def loss(trainable: Flat) -> tuple[Array, dict[str, Array]]:
            with remat_layers(config.remat):
                return loss_fn(merge(in_dtype(trainable, config.dtype), frozen), batch)

        return jax.grad(loss, has_aux=True)(trainable)

    if config.accumulate == 1:
        return whole(batch)

    def weighted(part: Any) -> tuple[Array, Any]:
        grads, metrics = whole(
            jax.tree.map(lambda x: constrain(x, "batch", *[None] * (x.ndim - 1)), part)
        )
        weight = metrics.get("tokens", jnp.ones(()))
        return weight, jax.tree.map(lambda x: x.astype(jnp.float32) * weight, (grads, metrics))

    # Every n-th row, not n-ths of the rows, so that each device's own rows make up its share of every part: 6 rows in 3
    # parts are rows 0 3, then 1 4, then 2 5.
    parts = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(-1, config.accumulate, *x.shape[1:]), 0, 1), batch
    )
    shapes = jax.eval_shape(weighted, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = partial(jax.tree.map, jnp.add)
    (total, sums), _ = jax.lax.scan(
        lambda carry, part: (add(carry, weighted(part)), None), zeros, parts
    )
    grads, metrics = jax.tree.map(lambda x: x / jnp.maximum(total, 1e-9), sums)
    return grads, metrics | ({"tokens": total} if "tokens" in metrics else {})


def make_step(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, config: TrainConfig
) -> Callable[..., Any]:
    """(state, frozen, batch) -> (state, metrics), to be compiled with the state donated."""

    def step(state: TrainState, frozen: Flat, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        grads, metrics = gradient(loss_fn, config, state.params, frozen, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics | {
            "grad_norm": optax.global_norm(grads)
        }

    return step

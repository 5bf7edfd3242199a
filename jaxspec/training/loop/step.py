"""Take one optimiser step; frozen parameters have neither gradient nor moments.

Parameters are flat here: {"language_model/lm_head/weight": array}.
"""

from __future__ import annotations

import re
from collections import defaultdict
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
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxspec.engine.memory import at_place
from jaxspec.errors import InputError
from jaxspec.models.layers import remat_layers
from jaxspec.sharding import constrain, replicated
from jaxspec.training.config import TrainConfig
from jaxspec.training.losses import Loss, metrics_of
from jaxspec.typing import Array, Params

Flat = dict[str, Any]
"""Parameters by path."""
ShardingOf = Callable[[Any], Params]
"""Mesh -> the parameters' shardings, for one model `partial(shardings, config, params)`."""


_BY_TOKEN = re.compile(r"embed_tokens|lm_head|markov")
"""Matrices with a row for each token."""


class TrainState(struct.PyTreeNode):
    """Hold what a step changes, and what a checkpoint holds."""

    step: Array
    """Number of steps that were taken."""
    params: Flat
    """The trainable parameters, float32."""
    opt_state: optax.OptState
    average: Flat | None = None
    """Moving average of the parameters, if the run keeps one."""

    @property
    def result(self) -> Flat:
        """Return the parameters to evaluate and to write."""
        return self.params if self.average is None else self.average


def flatten(params: Params) -> Flat:
    """Return the leaves of a nested dict by path."""
    flat: Any = flatten_dict(params, sep="/")
    return dict(flat)


def partition(params: Params, patterns: Sequence[str]) -> tuple[Flat, Flat]:
    """Return (trainable, frozen) parameters; a regex that matches a path's start freezes it."""
    flat = flatten(params)
    _check_patterns("frozen", patterns, flat)
    frozen = {
        path: leaf
        for path, leaf in flat.items()
        if any(re.match(pattern, path) for pattern in patterns)
    }
    if len(frozen) == len(flat):
        raise InputError(f"frozen: {', '.join(patterns)} match every parameter; match fewer")
    return {path: leaf for path, leaf in flat.items() if path not in frozen}, frozen


def merge(trainable: Mapping[str, Any], frozen: Mapping[str, Any]) -> Params:
    """Undo `partition`."""
    return unflatten_dict({**trainable, **frozen}, sep="/")


def check_patterns(config: TrainConfig, params: Params) -> None:
    """Raise InputError for patterns of frozen parameters and of rates that do not fit."""
    make_optimizer(config, partition(params, config.frozen)[0])


def _check_patterns(field: str, patterns: Sequence[str], flat: Mapping[str, Any]) -> None:
    idle = [pattern for pattern in patterns if not any(re.match(pattern, path) for path in flat)]
    if idle:
        parts = sorted({path.partition("/")[0] for path in flat})
        raise InputError(f"{field}: {idle[0]!r} matches no parameter; known: {', '.join(parts)}")


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Return linear warm-up from 0 to the peak rate, then the schedule over the other steps."""
    peak, warmup = config.learning_rate, min(config.warmup, config.steps // 2)
    last, after = peak * config.final_rate, config.steps - warmup
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, last)
    decay = {"linear": after, "constant": 0, "wsd": min(max(config.steps // 5, 1), after)}
    falling = decay[config.schedule]
    end = config.steps - falling
    parts = [optax.linear_schedule(0.0, peak, warmup), optax.constant_schedule(peak)]
    return optax.join_schedules(
        [*parts, optax.linear_schedule(peak, last, falling)], [warmup, max(end, warmup)]
    )


def make_optimizer(
    config: TrainConfig, trainable: Mapping[str, Any], apart: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Return clipping by global norm, the optimiser with decay of matrices, and rates by path.

    apart: Parts of the parameters, by the first names of their paths, each of which is clipped by
      its own norm.
    """
    _check_patterns("rates", [pattern for pattern, _ in config.rates], trainable)

    def is_matrix(params: Flat) -> dict[str, bool]:
        return {path: jnp.ndim(leaf) > 1 for path, leaf in params.items()}

    def scale(updates: Any, _: Any) -> Any:
        def factor(path: str) -> float:
            return next(
                (factor for pattern, factor in config.rates if re.match(pattern, path)), 1.0
            )

        return {path: factor(path) * update for path, update in updates.items()}

    def clip(updates: Any, _: Any) -> Any:
        parts: defaultdict[str, Flat] = defaultdict(dict)
        for path, update in updates.items():
            name = path.partition("/")[0]
            parts[name if name in apart else ""][path] = update
        norm = optax.clip_by_global_norm(config.clip)
        clipped: Any = [norm.update(part, norm.init(part))[0] for part in parts.values()]
        return {path: update for part in clipped for path, update in part.items()}

    rate, decay = make_schedule(config), config.weight_decay
    if config.optimizer == "muon":
        optimizer = optax.contrib.muon(
            rate,
            weight_decay=decay,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_orthogonalised,  # pyright: ignore[reportArgumentType]
        )
    else:
        make = {"adamw": optax.adamw, "lion": optax.lion}[config.optimizer]
        optimizer = make(rate, b2=config.beta2, weight_decay=decay, mask=is_matrix)
    scaling = [optax.stateless(scale)] if config.rates else []
    return optax.chain(optax.stateless(clip), optimizer, *scaling)


def _orthogonalised(params: Flat) -> dict[str, Any]:
    """Return which axes of each parameter Muon takes as a matrix; None for those of AdamW."""
    numbers = optax.contrib.MuonDimensionNumbers()
    return {
        path: numbers if jnp.ndim(leaf) == 2 and not _BY_TOKEN.search(path) else None
        for path, leaf in params.items()
    }


def init_state(
    params: Flat, optimizer: optax.GradientTransformation, averages: bool = False
) -> TrainState:
    """Return a state of copies: the state is donated, and the caller keeps the parameters."""

    def copies() -> Flat:
        return {path: jnp.array(leaf, jnp.float32, copy=True) for path, leaf in params.items()}

    trained = copies()
    average = copies() if averages else None
    return TrainState(jnp.zeros((), jnp.int32), trained, optimizer.init(trained), average)


def in_dtype(tree: Any, dtype: Any) -> Any:
    """Return the tree with its floating leaves in a dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def set_up(
    config: TrainConfig,
    params: Params,
    loss: Loss,
    mesh: Mesh | AbstractMesh,
    sharding_of: ShardingOf | None = None,
    apart: Sequence[str] = (),
    abstract: bool = False,
) -> tuple[TrainState, Flat, Any]:
    """Return the first state and the frozen parameters on the mesh, and the step to compile.

    The frozen parameters have the configuration's dtype. The step maps (state, frozen, batch) to
    (state, metrics). The state is donated, and its entries by path are sharded like their
    parameter.

    Args:
      sharding_of: Returns the shardings of the parameters on a mesh; None replicates them.
      apart: As in `make_optimizer`.
      abstract: Return shapes with shardings; nothing is allocated.
    """
    trainable, frozen = partition(params, config.frozen)
    optimizer, whole = make_optimizer(config, trainable, apart), replicated(mesh)
    places = flatten(sharding_of(mesh)) if sharding_of else dict.fromkeys(flatten(params), whole)
    init = partial(init_state, optimizer=optimizer, averages=config.ema > 0)
    shapes = jax.eval_shape(init, trainable)
    placement = jax.tree_util.tree_map_with_path(
        lambda path, _: places.get(getattr(path[-1], "key", ""), whole), shapes
    )
    step = make_step(loss, optimizer, config)
    step = jax.jit(step, donate_argnums=0, out_shardings=(placement, None))
    cast = partial(in_dtype, dtype=config.dtype)
    if abstract:
        frozen = jax.eval_shape(cast, frozen)
        frozen = at_place(frozen, {path: places[path] for path in frozen})
        return at_place(shapes, placement), frozen, step
    state = jax.jit(init, out_shardings=placement)(
        {path: _put(leaf, places[path]) for path, leaf in trainable.items()}
    )
    return state, {path: _put(cast(leaf), places[path]) for path, leaf in frozen.items()}, step


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and (leaf.sharding == sharding or not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)  # whole in every process
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def on_host(tree: Any) -> Any:
    """Return whole arrays in this process's memory. All processes must call it."""

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


def gradient(
    loss: Loss, config: TrainConfig, trainable: Flat, frozen: Flat, batch: Any
) -> tuple[Flat, dict[str, Array]]:
    """Return the gradient of a batch's loss and the metrics, in the config's dtype and parts."""
    count = loss.count(batch)

    def slope(part: Any) -> tuple[Flat, Any]:
        def share(trainable: Flat) -> tuple[Array, Any]:
            with remat_layers(config.remat):
                return loss.share(merge(in_dtype(trainable, config.dtype), frozen), part, count)

        return jax.grad(share, has_aux=True)(trainable)

    if config.accumulate == 1:
        grads, sums = slope(batch)
        return grads, metrics_of(sums)

    def placed(part: Any) -> Any:
        return jax.tree.map(lambda x: constrain(x, "batch", *[None] * (x.ndim - 1)), part)

    # Every n-th row, so that each part takes rows of every device.
    # 6 rows in 3 parts: rows 0 3, then 1 4, then 2 5.
    parts = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(-1, config.accumulate, *x.shape[1:]), 0, 1), batch
    )
    shapes = jax.eval_shape(slope, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = partial(jax.tree.map, jnp.add)
    (grads, sums), _ = jax.lax.scan(
        lambda total, part: (add(total, slope(placed(part))), None), zeros, parts
    )
    return grads, metrics_of(sums)


def make_step(
    loss: Loss, optimizer: optax.GradientTransformation, config: TrainConfig
) -> Callable[..., Any]:
    """Return (state, frozen, batch) -> (state, metrics)."""

    def step(state: TrainState, frozen: Flat, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        grads, metrics = gradient(loss, config, state.params, frozen, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        average: Any = state.average
        if average is not None:
            average = optax.incremental_update(params, average, 1 - config.ema)
        return TrainState(state.step + 1, params, opt_state, average), metrics | {
            "grad_norm": optax.global_norm(grads)
        }

    return step

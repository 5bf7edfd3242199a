"""A training step on devices that are not there: what each would hold, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from jaxspec.errors import InputError
from jaxspec.sharding import abstract_mesh, on_mesh
from jaxspec.training.config import TrainConfig
from jaxspec.training.flops import matmul_flops
from jaxspec.training.optimizer import make_optimizer, partition
from jaxspec.training.placement import Places, like_parameters, placed_on, rows_sharding
from jaxspec.training.step import LossFn, gradient, in_dtype, init_state, make_step
from jaxspec.typing import Params


@dataclass(frozen=True)
class Plan:
    """Bytes that the most loaded device holds through a step; activations come on top."""

    mesh: dict[str, int]
    frozen: int
    trained: int
    optimizer: int
    gradient: int
    batch: int
    flops: float
    """Of the model, one step, all devices together."""
    lowered: Any
    """The step, lowered for the mesh."""

    @property
    def total(self) -> int:
        return self.frozen + self.trained + self.optimizer + self.gradient + self.batch


def plan_training(
    config: TrainConfig,
    params: Params,
    loss_fn: LossFn,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    places: Callable[[AbstractMesh], Params] | None = None,
    platform: str = "tpu",
) -> Plan:
    """Lowers the step of `fit` for a mesh of `config.mesh`, whose `data` must be given; nothing is allocated.

    Args:
      params: shapes (`jaxspec.models.abstract_params`).
      batch: shapes of a whole batch.
    """
    sizes = config.mesh
    if sizes.data is None:
        raise InputError("mesh.data: a plan needs the number of devices; give it")
    mesh = abstract_mesh(sizes.model, sizes.fsdp, sizes.data)
    trainable, held = partition(params, config.frozen)
    where = placed_on(mesh, params, places)
    optimizer = make_optimizer(config, trainable)
    state = jax.eval_shape(partial(init_state, optimizer=optimizer), trainable)
    state = _placed(state, like_parameters(state, where, mesh))
    fixed = _placed(jax.eval_shape(partial(in_dtype, dtype=config.dtype), held), {path: where[path] for path in held})
    rows = rows_sharding(mesh)
    batch = {name: _placed(leaf, rows) for name, leaf in batch.items()}
    step = jax.jit(make_step(loss_fn, optimizer, config), donate_argnums=0)
    with on_mesh(mesh):
        lowered = step.trace(state, fixed, batch).lower(lowering_platforms=(platform,))
    once = replace(config, accumulate=1, remat=False)
    return Plan(
        mesh=dict(mesh.shape),
        frozen=_held(fixed),
        trained=_held(state.params),
        optimizer=_held(state.opt_state),
        gradient=_held(in_dtype_shapes(state.params, config.dtype)),
        batch=_held(batch),
        flops=matmul_flops(partial(gradient, loss_fn, once), state.params, fixed, batch),
        lowered=lowered,
    )


def _placed(tree: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, places
    )


def _held(tree: Any) -> int:
    """Bytes of one device's parts."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

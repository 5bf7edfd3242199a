"""A training step on devices that are not there: what each would hold, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxspec.sharding import on_mesh
from jaxspec.training.config import TrainConfig, check_batch
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
    """Operations of the model in one step, all devices together."""
    lowered: Any
    """The step, lowered for the mesh."""

    @property
    def total(self) -> int:
        return self.frozen + self.trained + self.optimizer + self.gradient + self.batch


def plan_training(
    config: TrainConfig,
    mesh: Mesh | AbstractMesh,
    params: Params,
    loss_fn: LossFn,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    places: Places | None = None,
) -> Plan:
    """Lowers the step of `fit` for a mesh; nothing is allocated.

    Args:
      mesh: in place of `config.mesh`. An abstract one (`jaxspec.sharding.abstract_mesh`) is taken to be of TPUs.
      params: shapes (`jaxspec.models.abstract_params`).
      batch: shapes of a whole batch.

    Raises InputError where the batch does not divide over the mesh.
    """
    check_batch(config.batch, mesh)
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
        traced = step.trace(state, fixed, batch)
        lowered = traced.lower(lowering_platforms=("tpu",)) if isinstance(mesh, AbstractMesh) else traced.lower()
    once = replace(config, accumulate=1, remat=False)
    return Plan(
        mesh=dict(mesh.shape),
        frozen=_held(fixed),
        trained=_held(state.params),
        optimizer=_held(state.opt_state),
        gradient=_held(state.params),
        batch=_held(batch),
        flops=matmul_flops(partial(gradient, loss_fn, once), state.params, fixed, batch),
        lowered=lowered,
    )


def _placed(tree: Any, places: Any) -> Any:
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, places)


def _held(tree: Any) -> int:
    """Bytes of one device's parts."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

"""What lies where in training: parameters and optimiser state by the table of shardings, batches by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.sharding import MESH_AXES
from jaxspec.training.optimizer import Flat, flatten
from jaxspec.training.step import TrainState, in_dtype, init_state
from jaxspec.typing import Params

Places = Callable[[Any], Params]
"""Mesh -> pytree like the parameters, of their shardings: `partial(shardings, config, params)` for one model."""


def placed_on(mesh: Any, params: Params, places: Places | None) -> dict[str, NamedSharding]:
    """The sharding of every path; without `places`, all are whole on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    return dict.fromkeys(flatten(params), whole) if places is None else flatten(places(mesh))


def like_parameters(tree: Any, places: Mapping[str, NamedSharding], mesh: Any) -> Any:
    """Shardings of a state: what is kept by path lies as that parameter does, all else is whole on every device."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        return places.get(getattr(path[-1], "key", ""), NamedSharding(mesh, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(place, tree)


def put(leaf: Any, place: NamedSharding) -> jax.Array:
    """The leaf on the mesh; every process holds it whole, or it lies there already."""
    if isinstance(leaf, jax.Array) and leaf.sharding == place:
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, place, lambda index: host[index])


def place_state(
    trainable: Flat,
    held: Flat,
    optimizer: optax.GradientTransformation,
    where: Mapping[str, Any],
    mesh: Mesh,
    dtype: str,
) -> tuple[TrainState, Flat]:
    """(first state, frozen parameters) on the mesh. Frozen ones are held in what is computed in, and only so."""
    init = partial(init_state, optimizer=optimizer)
    places = like_parameters(jax.eval_shape(init, trainable), where, mesh)
    state = jax.jit(init, out_shardings=places)({path: put(leaf, where[path]) for path, leaf in trainable.items()})
    return state, {path: put(in_dtype(leaf, dtype), where[path]) for path, leaf in held.items()}


def rows_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of every array of a batch: its first axis over the mesh's data and fsdp devices."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"]))


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a batch as its part of the whole on the mesh."""
    rows = rows_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(rows, value) for name, value in batch.items()}


def process_share(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """(i, n): this process (or another) feeds the i-th of n equal parts of each batch.

    Processes that the `model` axis spans together feed the same part, so n may be less than their number.
    """
    rows = mesh.devices.reshape(-1, mesh.shape["model"])
    fed = {
        process: tuple(i for i, row in enumerate(rows) if process in {device.process_index for device in row})
        for process in {device.process_index for device in mesh.devices.flat}
    }
    parts = sorted(set(fed.values()))
    return parts.index(fed[jax.process_index() if process is None else process]), len(parts)


def on_host(tree: Any) -> Any:
    """The arrays whole in this process's memory; with several processes, all of them must call it."""

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)

"""Place arrays on a mesh by one strict table: parameter path -> logical axes -> mesh axes.

The mesh has three axes. `data` splits batches, `fsdp` splits parameters and batches in training,
`model` splits attention heads, MLPs and the vocabulary. The axes are of type Auto: XLA propagates
the placements that the table and `constrain` give. A path joins the keys of the parameter tree by
"/". Every path of every family matches exactly one row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jaxspec.config import ModelConfig, text_config
from jaxspec.errors import InputError, check_counts
from jaxspec.typing import Array, Params

AXES = ("data", "fsdp", "model")

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": "fsdp",
}
"""Logical axis -> mesh axis. A dimension that the mesh axis does not divide is replicated."""

CACHE_AXES = ("batch", "kv_heads", None, None)
"""Logical axes of a layer's keys or values [B, K, S, H]."""

_DECODER = r"(?:(?:language_model/)?model/(?:decoder/)?)?"
"""Prefix of a decoder's parameters; a KV head's have none."""
_TOWER = r"(?:vision_tower|visual)/(?:.+/)?"

Axes = tuple[tuple[str, tuple[str | None, ...]], ...]
"""Regex of a parameter's whole path -> logical axis of each dimension; () replicates any rank."""

_UP, _DOWN = ("mlp", "embed"), ("embed", "mlp")
"""Axes of a matrix that makes a layer wider, [wide, D], and of one that makes it narrow again."""

TABLE: Axes = (
    # the decoder
    (_DECODER + r"embed_tokens(?:_per_layer)?/embedding", ("vocab", "embed")),
    (_DECODER + r"embed_positions/embedding", (None, "embed")),
    (r"(?:language_model/)?lm_head/weight", ("vocab", "embed")),
    (_DECODER + r"layers_\d+/self_attn/q_proj/weight", ("heads", "embed")),
    (_DECODER + r"layers_\d+/self_attn/[kv]_proj/weight", ("kv_heads", "embed")),
    (_DECODER + r"layers_\d+/self_attn/(?:o|out)_proj/weight", ("embed", "heads")),
    (_DECODER + r"layers_\d+/(?:mlp/)?(?:gate_proj|up_proj|fc1)/weight", _UP),
    (_DECODER + r"layers_\d+/(?:mlp/)?(?:down_proj|fc2)/weight", _DOWN),
    (_DECODER + r"project_(?:in|out)/weight", (None, None)),
    (_DECODER + r"layers_\d+/layer_scalar", ()),
    (
        _DECODER + r"(?:per_layer_model_projection|layers_\d+/per_layer_input_gate)/weight",
        (None, "embed"),
    ),
    (_DECODER + r"layers_\d+/per_layer_projection/weight", ("embed", None)),
    # the vision tower and the projector
    (_TOWER + r"(?:(?:[qkv]|gate|up)_proj(?:/linear)?|qkv|(?:linear_)?fc1)/weight", _UP),
    (_TOWER + r"(?:(?:o|out|down)_proj(?:/linear)?|attn/proj|(?:linear_)?fc2)/weight", _DOWN),
    (_TOWER + r"(?:(?:input|output)_(?:min|max)|std_(?:bias|scale))", ()),
    (_TOWER + r"patch_embedder/(?:input_proj/weight|position_embedding_table)", ()),
    (_TOWER + r"merger/(?:mlp_0|linear_1)/weight|multi_modal_projector/linear_1/weight", _UP),
    (_TOWER + r"merger/(?:mlp_2|linear_2)/weight|multi_modal_projector/linear_2/weight", _DOWN),
    (r"multi_modal_projector/mm_input_projection_weight", ("embed", None)),
    (_TOWER + r"patch_embed(?:ding)?/(?:proj/)?(?:kernel|bias)", ()),
    (_TOWER + r"(?:class_embedding|position_embedding/embedding|pos_embed/embedding)", ()),
    (r"vision_embedder/patch_dense/weight", _UP),
    (r"vision_embedder/(?:pos_embedding|patch_ln[12]/(?:weight|bias))", ()),
    (r"embed_vision/embedding_projection/weight", _DOWN),
    # both
    (r"(?:.*/)?\w*(?:norm|norm[12]|norm_\d|layrnorm|ln_q)/(?:weight|bias)", (None,)),
    (r"image_newline", (None,)),
)
"""Rows of models' parameters. A kind of head adds its own. A bias without a row is split like the
rows of its matrix, and `fsdp` does not split it."""


def make_mesh(
    model: int = 1, fsdp: int = 1, data: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Return a mesh of the first data * fsdp * model devices; InputError if there are fewer."""
    devices = jax.devices() if devices is None else devices
    check_counts(data=data, fsdp=fsdp, model=model)
    count = data * fsdp * model
    if count > len(devices):
        raise InputError(
            f"mesh: {data} data x {fsdp} fsdp x {model} model devices, of {len(devices)}; "
            "give numbers whose product is not more"
        )
    return jax.make_mesh(
        (data, fsdp, model), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:count]
    )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Choose the devices and processes of a run."""

    model_parallel: int = 1
    """Devices that a target is split over; drafts are replicated."""
    data_parallel: int = 1
    """Parts of a batch, each on its own devices."""
    cluster: str = ""
    """On several hosts `auto`, or HOST:PORT,COUNT,INDEX: each decodes its share of the prompts, on
    its own devices, and process 0 writes the combined results."""

    def mesh(self, batch: int) -> Mesh | None:
        """Return the mesh of this process's devices for batches of this many rows.

        Raises InputError if the devices or the batch do not fit.
        """
        check_counts(data_parallel=self.data_parallel, model_parallel=self.model_parallel)
        if batch % self.data_parallel:
            raise InputError(
                f"data_parallel: {self.data_parallel} parts do not divide a batch of {batch}; "
                "give others"
            )
        if self.model_parallel == self.data_parallel == 1:
            return None
        return make_mesh(self.model_parallel, data=self.data_parallel, devices=jax.local_devices())

    @property
    def device(self) -> str:
        """Return the devices of a process for people, such as `4 x TPU v5e`."""
        count, kind = self.model_parallel * self.data_parallel, jax.devices()[0].device_kind
        return kind if count == 1 else f"{count} x {kind}"


def abstract_mesh(model: int = 1, fsdp: int = 1) -> AbstractMesh:
    """Return a mesh without devices, for plans."""
    return AbstractMesh((1, fsdp, model), AXES, axis_types=(AxisType.Auto,) * 3)


def logical_axes(path: str, more: Axes = ()) -> tuple[str | None, ...]:
    """Return the logical axes of a parameter's path, from the one row that matches.

    The scales of an int8 matrix are split like its rows.

    more: Rows in addition to those of `TABLE`.
    """
    if path.endswith("/scale"):
        return logical_axes(path.removesuffix("scale") + "weight", more)[:1]

    def rows_of(path: str) -> list[tuple[str | None, ...]]:
        return [axes for pattern, axes in (*TABLE, *more) if re.fullmatch(pattern, path)]

    rows = rows_of(path)
    if path.endswith("/bias") and not rows:
        matrices = rows_of(path.removesuffix("bias") + "weight")
        rows = [tuple(None if axis == "embed" else axis for axis in axes[:1]) for axes in matrices]
    if len(rows) != 1:
        raise ValueError(
            f"jaxspec.sharding.TABLE: {len(rows)} rows match {path!r}; exactly one must"
        )
    return rows[0]


def spec(
    config: ModelConfig,
    path: str,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    more: Axes = (),
) -> PartitionSpec:
    """Return the split of a parameter. Attention heads stay whole, so their number must divide.

    Layers may have numbers of their own.

    more: See `logical_axes`.
    """
    text = text_config(config)
    if match := re.match(_DECODER + r"layers_(\d+)/", path):
        text = text.of_layer(int(match[1]))
    heads = {"heads": text.num_attention_heads, "kv_heads": text.num_key_value_heads}
    axes = logical_axes(path, more)
    return partition(mesh, axes, [heads.get(axis or "", size) for axis, size in zip(axes, shape)])


def partition(
    mesh: Mesh | AbstractMesh, axes: Sequence[str | None], counts: Sequence[int]
) -> PartitionSpec:
    """Return the split of dimensions by their logical axes.

    A dimension stays whole if the mesh axis does not divide its count.
    """
    names = []
    for axis, count in zip(axes, counts):
        name = None if axis is None else MESH_AXES[axis]
        size = _parts_of_axis(mesh, name)
        names.append(name if size > 1 and count % size == 0 else None)
    return PartitionSpec(*names)


def _parts_of_axis(mesh: Mesh | AbstractMesh, name: str | tuple[str, ...] | None) -> int:
    """Return the number of parts into which a mesh axis, or several, split a dimension."""
    parts = (name,) if isinstance(name, str) else name or ()
    return math.prod(mesh.shape[part] for part in parts)


def shardings(
    config: ModelConfig, params: Params, mesh: Mesh | AbstractMesh, more: Axes = ()
) -> Any:
    """Return the sharding of every parameter; the leaves of `params` need only have shapes.

    more: See `logical_axes`.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = "/".join(key.key for key in path)
        return NamedSharding(mesh, spec(config, name, leaf.shape, mesh, more))

    return jax.tree_util.tree_map_with_path(sharding, params)


def cache_sharding(mesh: Mesh | AbstractMesh, shape: Sequence[int]) -> NamedSharding:
    """Return the sharding of a layer's keys or values, which are split by key-value heads."""
    return NamedSharding(mesh, partition(mesh, CACHE_AXES, shape))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds whole, such as drafts and inputs."""
    return NamedSharding(mesh, PartitionSpec())


def mesh_of(params: Params) -> Any:
    """Return the mesh of parameters, or of their shapes; None on a single device."""
    sharding = next((getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)), None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if mesh is not None and mesh.size > 1 else None


def small_sharding(params: Params) -> Sharding | None:
    """Return the placement of small parameters next to these: replicated, or on their device."""
    mesh = mesh_of(params)
    if mesh is not None:
        return replicated(mesh)
    first = next((getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)), None)
    # A NamedSharding names dimensions, which other arrays do not have.
    return SingleDeviceSharding(*first.device_set) if isinstance(first, NamedSharding) else first


def put(params: Params, sharding: Any) -> Params:
    """Move parameters to one sharding, or each to its own; none is copied without need."""

    def moved(x: Any, sharding: Sharding | None) -> Any:
        return x if getattr(x, "sharding", None) == sharding else jax.device_put(x, sharding)

    targets = sharding
    if sharding is None or isinstance(sharding, Sharding):
        targets = jax.tree.map(lambda _: sharding, params)
    return jax.tree.map(moved, params, targets, is_leaf=lambda x: x is None)


def on_mesh(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """Return a context for tracing programs, within which `constrain` places arrays on the mesh."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def constrain(x: Array, *axes: str | None) -> Array:
    """Split x by these axes inside `jit`, or replicate it without axes. No-op outside a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition(mesh, axes, x.shape))


def gather(x: Array, *axes: str | None) -> Array:
    """Gather x, a product with a split matrix, inside `jit`; keep these axes split.

    For many rows XLA would gather the matrix on GPUs, 250 MiB of LLaVA-1.5-7B's output matrix for
    6 MiB of logits. The barrier prevents that. TPUs gather the product anyway, and there blocks of
    eight rows took 11 % more cycles with the barrier.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return constrain(
        jax.lax.platform_dependent(x, cuda=jax.lax.optimization_barrier, default=lambda x: x), *axes
    )


FEW = 256
"""Maximum rows that a pass of a decode loop multiplies; prefill and training have more."""


def row_major(x: Array) -> Array:
    """Lay out a few rows in the order of their axes, inside `jit` and on TPUs.

    Otherwise XLA chooses layouts for the readers of a product, and copies whole matrices of weights
    to fit. With those of LLaVA-1.5-7B's attention the program exceeds one v5e. Other platforms do
    not copy, and on a mesh of CPUs the constraint would gather x.
    """
    if x.size > FEW * x.shape[-1]:
        return x
    order = Layout(major_to_minor=tuple(range(x.ndim)))
    return jax.lax.platform_dependent(
        x, tpu=lambda x: with_layout_constraint(x, order), default=lambda x: x
    )


def shard_count(axis: str, size: int) -> int:
    """Return the number of parts into which `constrain` splits an axis; 1 outside a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    return _parts_of_axis(mesh, *partition(mesh, (axis,), (size,)))

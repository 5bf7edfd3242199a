"""Define products, norms, the rotary embedding and the Llama MLP.

Activations keep the parameters' dtype; norms and rotary angles are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import RotaryConfig
from jaxspec.sharding import constrain, row_major, shard_count
from jaxspec.typing import Array, Float, Int, Params

INIT = jax.jit(nn.initializers.normal(0.02), static_argnums=(1, 2))

_REMAT: ContextVar[bool] = ContextVar("remat", default=False)


@contextmanager
def remat_layers(on: bool) -> Iterator[None]:
    """Let layers traced within keep only their inputs for the gradient, and recompute the rest."""
    token = _REMAT.set(on)
    try:
        yield
    finally:
        _REMAT.reset(token)


def call_layer(layer: Any, x: Array, *args: Any) -> Any:
    """Call the layer, with x split by rows over a mesh, and with rematerialisation if it is on.

    A program traces layers of one configuration once, for equal shapes, and XLA inlines the calls:
    on a CPU a decode pass of 28 layers is traced and lowered in 0.2 s, and layer by layer in 0.8 s.
    """
    x = by_rows(x)
    if any(map(layer.is_mutable_collection, ("params", "intermediates"))):
        return layer(x, *args)  # flax makes its parameters, or captures what it computes
    call = jax.checkpoint(_apply_layer, static_argnums=0) if _REMAT.get() else _apply_layer
    return call(layer.clone(parent=None, name=None), layer.variables["params"], x, *args)


@partial(jax.jit, static_argnums=0)
def _apply_layer(layer: Any, params: Params, x: Array, *args: Any) -> Any:
    return layer.apply({"params": params}, x, *args)


def by_rows(x: Array) -> Array:
    """Return x split by rows over a mesh."""
    return constrain(x, "batch", *[None] * (x.ndim - 1))


def loop_layers(layers: Sequence[Any], x: Array, *args: Any) -> tuple[Array, Array] | None:
    """Return x after layers of one kind, and the output of each layer, [layers, ...].

    The program holds the layer once, in a scan. Unread outputs cost nothing. Returns None if
    `remat_layers` is off, layers differ, or while parameters are initialised; then the caller calls
    each layer.
    """
    if not _REMAT.get() or not layers or layers[0].is_initializing():
        return None
    if any(layer.config != layers[0].config for layer in layers):
        return None
    layer = layers[0].clone(parent=None, name=None)
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(layer.variables["params"] for layer in layers)
    )

    @jax.checkpoint
    def step(x: Array, params: Params) -> tuple[Array, Array]:
        output = layer.apply({"params": params}, by_rows(x), *args)
        x = output[0] if isinstance(output, tuple) else output
        return x, x

    return jax.lax.scan(step, x, stacked)


def apply(
    module: nn.Module,
    params: Params,
    *args: Any,
    method: str | Callable[..., Any] | None = None,
    **inputs: Any,
) -> Any:
    """Return module.method(*args, **inputs) with these parameters and full float32 products.

    By default TPUs and GPUs multiply float32 matrices in fewer bits. Then the scores of a block of
    tokens differ from those of its tokens one by one. `jax_default_matmul_precision` of the process
    has priority.
    """
    exact = jax.config.jax_default_matmul_precision is None and any(  # type: ignore[attr-defined]
        leaf.dtype == jnp.float32 and leaf.ndim > 1 for leaf in jax.tree.leaves(params)
    )
    with jax.default_matmul_precision("highest") if exact else nullcontext():
        return module.apply({"params": params}, *args, method=method, **inputs)


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of exact computations: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


class RMSNorm(nn.Module):
    """Compute x / rms(x) * weight in float32."""

    eps: float
    offset: int | None = None
    """Number that is added to the weight, as in Gemma; then the product is float32 too."""
    affine: bool = True
    """False leaves out the weight."""

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        exact = x.astype(wide(x.dtype))
        exact = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + self.eps)
        if not self.affine:
            return exact.astype(x.dtype)
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        weight = self.param("weight", init, (x.shape[-1],))
        if self.offset is not None:
            return ((self.offset + weight.astype(exact.dtype)) * exact).astype(x.dtype)
        return weight * exact.astype(x.dtype)


def text_norm(config: RotaryConfig) -> RMSNorm:
    """Return a norm of the decoder's kind."""
    return RMSNorm(config.rms_norm_eps, config.norm_offset)


class LayerNorm(nn.Module):
    """Compute (x - mean) / std * weight + bias in float32.

    affine: False leaves out weight and bias.
    """

    eps: float
    affine: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        exact = x.astype(jnp.float32)
        exact = exact - jnp.mean(exact, -1, keepdims=True)
        exact = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + self.eps)
        if self.affine:
            weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
            bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
            exact = exact * weight + bias
        return exact.astype(x.dtype)


FEW_ROWS = 64
"""Maximum rows for which CPUs multiply clearly faster with the matrix first."""
_FULL = 8
"""Rows are filled up to a multiple of this there."""


@partial(jax.jit, static_argnames="dtype")
def times(
    x: Float[Array, "... D"], weight: Float[Array, "out D"], dtype: Any = None
) -> Float[Array, "... out"]:
    """Return x W^T. A program traces equal products once, as `call_layer` does layers.

    On CPUs a few rows are multiplied as (W x^T)^T, because XLA first copies the second matrix of a
    product into another order. So eight rows times the matrices of a 1.5B's MLP take 1.4 times as
    long as one row, and as x W^T 2.2 times (`results/cpu_passes`). Numbers of rows that eight
    does not divide take longer: six rows more than eight. So from five on they are filled up.

    dtype: Dtype of the sums; None is x's.
    """

    def product(rows: Array) -> Array:
        axes = (((rows.ndim - 1,), (1,)), ((), ()))
        return row_major(jax.lax.dot_general(rows, weight, axes, preferred_element_type=dtype))

    def matrix_first(rows: Array) -> Array:
        columns = rows.reshape(-1, rows.shape[-1]).T
        count = columns.shape[1]
        spare = -count % _FULL if count > _FULL // 2 else 0
        columns = jnp.pad(columns, ((0, 0), (0, spare)))
        out = jnp.matmul(weight, columns, preferred_element_type=dtype)
        out = jax.lax.optimization_barrier(out)  # or XLA would swap the operands back
        return out[:, :count].T.reshape(*rows.shape[:-1], -1)

    if x.size <= x.shape[-1]:
        return never_alone(product, x.reshape(1, -1), 0).reshape(*x.shape[:-1], -1)
    on_mesh = not jax.sharding.get_abstract_mesh().empty  # there it costs a message more
    if on_mesh or x.size > FEW_ROWS * x.shape[-1]:
        return product(x)
    return jax.lax.platform_dependent(x, cpu=matrix_first, default=product)


def never_alone(product: Callable[[Array], Array], rows: Array, axis: int) -> Array:
    """Return a product of rows; on TPUs a single row is doubled.

    XLA multiplies a single row outside the matrix unit, and by its estimate in four times the
    cycles.
    """
    if rows.shape[axis] > 1:
        return product(rows)

    def doubled(rows: Array) -> Array:
        return jax.lax.slice_in_dim(product(jnp.concatenate([rows, rows], axis)), 0, 1, axis=axis)

    return jax.lax.platform_dependent(rows, tpu=doubled, default=product)


class Embed(nn.Embed):
    """Look up embeddings. On a mesh that splits the table's columns, it is gathered first."""

    def __call__(self, inputs: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = self.embedding
        if shard_count("embed", table.shape[1]) > 1:
            table = constrain(table, "vocab", None)
        # For a single token XLA gathers the whole table on GPUs (250 MiB for LLaVA-1.5-7B), so a
        # single token is looked up twice.
        alone = inputs.size == 1 and shard_count("vocab", table.shape[0]) > 1
        embeds = jnp.take(table, jnp.tile(inputs, 2) if alone else inputs, axis=0)
        return constrain(embeds[:, : inputs.shape[1]], "batch", None, None)

    def attend(self, query: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return the product with every embedding, in `wide` precision, as a tied output matrix."""
        return times(query, self.embedding, wide(query.dtype))


def scaled(embeds: Array, factor: float) -> Array:
    """Return embeddings times a factor, which is rounded to their dtype."""
    return embeds if factor == 1 else embeds * jnp.asarray(factor, embeds.dtype)


class Dense(nn.Module):
    """Compute x W^T + b, with W [out, in] as in Hugging Face's files.

    An int8 W has a scale for each row, see `jaxspec.models.int8`.
    """

    features: int
    bias: bool
    widens: bool = False
    """Whether sums keep `wide` precision, as for logits; otherwise they have x's dtype."""

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... out"]:
        out = wide(x.dtype) if self.widens else None
        shape = x.shape[-1], self.features
        weight = self.param("weight", lambda key: INIT(key, shape).T)  # a seed keeps its numbers
        if self.has_variable("params", "scale"):
            exact = times(x, weight.astype(x.dtype), wide(x.dtype))
            y = (exact * self.get_variable("params", "scale")).astype(out or x.dtype)
        else:
            y = times(x, weight, out)
        if self.bias:
            y += self.param("bias", nn.initializers.zeros, (self.features,))
        return y


def rotary_frequencies(config: RotaryConfig) -> np.ndarray:
    """Return inverse frequencies [H/2] in radians per position, after `rope_scaling`.

    `llama3` and `yarn` keep the frequencies that turn often within the original context, and divide
    by `factor` those that hardly turn. In between they interpolate: `llama3` by the number of
    turns, YaRN (Peng et al. 2023, eq. 17 to 23) by the index of the dimension.
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inverse = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling.rope_type == "linear":
        inverse = inverse / scaling.factor
    elif scaling.rope_type == "proportional":
        turning = int(scaling.partial_rotary_factor * config.head_dim // 2)
        inverse = np.where(np.arange(len(inverse)) < turning, inverse / scaling.factor, 0.0)
    elif scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        inverse = keep * inverse + (1 - keep) * inverse / scaling.factor
    elif scaling.rope_type == "yarn":
        keep = _yarn_kept(config)
        inverse = keep * inverse + (1 - keep) * inverse / scaling.factor
    return inverse.astype(np.float32)


def _yarn_kept(config: RotaryConfig) -> np.ndarray:
    """Return the share [H/2] of each frequency that YaRN keeps.

    It is 1 up to `beta_fast`'s dimension and 0 from `beta_slow`'s.
    """
    scaling, width = config.rope_scaling, config.head_dim

    def dimension(turns: float) -> float:
        reach = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return width * math.log(reach) / (2 * math.log(config.rope_theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last = last if last != first else first + 0.001
    return 1 - np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"] | Int[Array, "B axes T"],
    inverse: np.ndarray,
    scale: float = 1.0,
    axes: np.ndarray | None = None,
) -> Float[Array, "B T N H"]:
    """Return x rotated by its positions, in the half-split order of Hugging Face's Llama.

    Args:
      scale: Factor of the result.
      axes: Axis of each frequency, if positions have three axes (M-RoPE; Wang et al. 2024,
        "Qwen2-VL", section 2.1).
    """
    coordinates = positions[:, axes].swapaxes(1, 2) if positions.ndim == 3 else positions[..., None]
    angles = coordinates.astype(wide(x.dtype)) * inverse
    cos, sin = scale * jnp.cos(angles)[:, :, None], scale * jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x.astype(angles.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": nn.gelu,
    "silu": nn.silu,
}
"""Activations by their names in config.json."""


class MLP(nn.Module):
    """Compute last(activation(first(x))), with the names that the layers have in files."""

    width: int
    out: int
    activation: str = "gelu"
    names: tuple[str, str] = ("fc1", "fc2")
    bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... out"]:
        first, last = self.names
        h = ACTIVATIONS[self.activation](Dense(self.width, self.bias, name=first)(x))
        return Dense(self.out, self.bias, name=last)(h)


class GatedMLP(nn.Module):
    """Compute down(activation(gate(x)) * up(x))."""

    width: int
    bias: bool
    activation: str = "silu"

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        gate = Dense(self.width, self.bias, name="gate_proj")(x)
        up = Dense(self.width, self.bias, name="up_proj")(x)
        return Dense(x.shape[-1], self.bias, name="down_proj")(
            ACTIVATIONS[self.activation](gate) * up
        )

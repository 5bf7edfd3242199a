"""Attend over whole rows by JAX's TPU kernel."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.sharding import CACHE_AXES, partition
from jaxspec.typing import Array, Float, Int, Queries


def splash(
    q: Queries,
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    owner: Int[Array, "B T"] | None = None,
    interpret: bool = False,
    window: int | None = None,
    causal: bool = False,
) -> Queries:
    """Return attention of whole rows by JAX's TPU kernel, which keeps scores in fast memory.

    A token reads itself and the tokens before it. On a mesh each device runs its own rows and
    heads.

    Args:
      owner: Owner of each token, such as its image; then a token reads all tokens of its owner.
      causal: Whether it reads only those of its owner's up to itself.
      interpret: Whether to interpret the kernel, for tests on other devices.
      window: Number of tokens that a token reads, itself included; None reads all.
    """
    # The import takes a quarter of a second; only long prompts need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    count, lanes = q.shape[1], 128
    size = count + -count % lanes
    block = math.gcd(size, 4 * lanes)
    backward = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    blocks = kernels.BlockSizes(block, block, **dict.fromkeys(backward, block))
    causal |= owner is None
    mask = (kernels.CausalMask if causal else kernels.FullMask)((size, size))
    if window is not None:
        mask = kernels.LocalMask((size, size), (window - 1, 0), 0)

    def kernel(q: Array, k: Array, v: Array, *owner: Array) -> Any:
        heads = kernels.MultiHeadMask([mask] * q.shape[1])
        run = kernels.make_splash_mha(
            heads, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret
        )
        return jax.vmap(run)(q, k, v, *(kernels.SegmentIds(part, part) for part in owner))

    def padded(x: Array, axis: int, value: int = 0) -> Array:
        room = [(0, 0)] * x.ndim
        room[axis] = (0, size - count)
        return jnp.pad(x, room, constant_values=value)

    args = [padded(x, 2) for x in ((q * q.shape[-1] ** -0.5).swapaxes(1, 2), k, v)]
    if owner is not None:
        args.append(padded(owner, 1, -2))
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # Owners are split by rows only, since each device has all slots of its heads.
        specs = [
            partition(mesh, CACHE_AXES if x.ndim == 4 else CACHE_AXES[:1], k.shape) for x in args
        ]
        kernel = jax.shard_map(kernel, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)
    # The kernel takes no more bits than bfloat16 has, even if the global precision is "highest".
    with nullcontext() if q.dtype == jnp.float32 else jax.default_matmul_precision("default"):
        return kernel(*args)[:, :, :count].swapaxes(1, 2)

"""What decoding will hold on the device, counted from shapes before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import ModelConfig, QwenVLConfig, TextConfig
from jaxspec.decoding.autoregressive import Autoregressive
from jaxspec.decoding.state import PromptBatch
from jaxspec.decoding.views import VIEWS, View
from jaxspec.models import LanguageModel, image_zeros
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import no_rows
from jaxspec.models.layers import QUERY_BLOCK
from jaxspec.models.vision import PAGE_BLOCK
from jaxspec.runtime import human_bytes
from jaxspec.sampling import Sampling
from jaxspec.sharding import cache_sharding, mesh_of
from jaxspec.typing import Array, Params

if TYPE_CHECKING:
    from jaxspec.decoding.speculative import Speculator


class Sizes(NamedTuple):
    """What one compiled program holds for each row."""

    length: int
    """Prompt tokens."""
    units: int
    """Image units of the target's tower."""
    view_units: int
    """Image units of the draft's tower."""
    new: int
    """New tokens."""
    text: int = 0
    """Prompt tokens that a KV head reads of the target."""
    images: int = 0
    """Images that it reads."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one device by use. Weights, caches and inputs are exact; `working` estimates one pass's activations.

    On a mesh every device holds the same; `working` is then what a device would need alone. A CPU holds the decoders'
    matrices once more, in panels (`jaxspec.models.panels`), which are not counted.
    """

    target_weights: int
    draft_weights: int
    target_cache: int
    draft_cache: int
    weighting: int
    """What the weighting remembers of all rows."""
    inputs: int
    """Prompts, pixels, output tokens and counters."""
    working: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        parts = [f"{f.name.replace('_', ' ')} {human_bytes(getattr(self, f.name))}" for f in fields(self)]
        return f"memory {human_bytes(self.total)}: " + ", ".join(parts)


def plan_memory(
    program: Autoregressive | Speculator, params: Params, batch: int, sizes: Sizes
) -> MemoryReport:
    """The report for B rows of these sizes.

    `params` may be abstract (`jax.ShapeDtypeStruct` leaves): nothing is allocated.
    """
    inputs, options = abstract_inputs(program, batch, sizes)
    state = jax.eval_shape(lambda p, b, o: program.prefill(p, b, o, sizes.new), params, inputs, options)
    draft_cache, whole_cache = _bytes(state.drafter), _bytes(state.target)
    keys, mesh = (state.target.k, state.target.v), mesh_of(params["target"])
    kept = whole_cache - _bytes(keys)
    if mesh is not None:
        keys = jax.tree.map(lambda leaf: leaf.update(sharding=cache_sharding(mesh, leaf.shape)), keys)
    weighting = _bytes(state.weighting)
    return MemoryReport(
        target_weights=_bytes(params["target"]),
        draft_weights=_bytes((params.get("drafter", {}), params.get("head", {}))),
        target_cache=kept + _bytes(keys),
        draft_cache=draft_cache,
        weighting=weighting,
        inputs=_bytes((inputs, options)) + _bytes(state) - draft_cache - whole_cache - weighting,
        working=_working(program, state.target.k[0].dtype.itemsize, batch, sizes, state.target.slots),
    )


def abstract_inputs(
    program: Autoregressive | Speculator, batch: int, sizes: Sizes
) -> tuple[PromptBatch, Sampling]:
    """Shapes of the inputs, for planning and for compiling ahead of time."""

    def make() -> tuple[PromptBatch, Sampling]:
        row = jnp.zeros(batch, jnp.int32)

        def rows(model: LanguageModel, view: View, shown: bool, turning: bool) -> PromptRows:
            out = PromptRows(jnp.zeros((batch, sizes.length), jnp.int32), row)
            if turning:
                out = out.replace(rotary=jnp.zeros((batch, 3, sizes.length), jnp.int32), shift=row)
            if not shown:
                return out
            sources = jnp.zeros((batch, sizes.length, model.blended(view.pool)), jnp.int32)
            return out.replace(sources=sources, blend=jnp.zeros(sources.shape) if sources.shape[-1] > 1 else None)

        def images(model: LanguageModel, units: int) -> dict[str, Array] | None:
            return image_zeros(model.config, batch, units) if units else None

        target, seen = program.target, sizes.units > 0
        inputs = PromptBatch(rows(target, VIEWS["M"], seen, seen and target.turns), images(target, sizes.units))
        if not isinstance(program, Autoregressive):
            drafter = program.drafter
            shown = [view.reads_images and sizes.view_units > 0 for view in drafter.views]
            turning = any(shown) and drafter.model.turns
            own = any(view.reads_images for view in drafter.views) and not program.shares_tower
            inputs = inputs.replace(
                views=tuple(
                    rows(drafter.model, view, show, turning) for view, show in zip(drafter.views, shown, strict=True)
                ),
                view_images=images(drafter.model, sizes.view_units) if own else None,
                weights=jnp.zeros((batch, drafter.width)),
                costs=jnp.zeros(len(program.lengths)) if program.lengths else None,
            )
            if drafter.head is not None:
                inputs = inputs.replace(head=jax.tree.map(jnp.asarray, no_rows(drafter.head, batch, *sizes[-2:])))
        real = jnp.zeros(batch)
        keys = jax.random.split(jax.random.key(0), batch)
        return inputs, Sampling(real, row, real, row, jnp.zeros(1, jnp.int32), keys)

    return jax.eval_shape(make)


def _working(program: Autoregressive | Speculator, itemsize: int, batch: int, sizes: Sizes, slots: int) -> int:
    """The largest of a tower's and of prefill's activations and a step's distributions, in bytes.

    A tower holds a few streams and one MLP of all units, and the scores of one block of pages, or of one block of
    queries with all windows of a row. Prefill holds a few
    residual streams and one MLP of the whole prompt, and the scores (float32, before and after softmax) of one
    block of queries; a step holds p, q and their one-hot and sorted forms.
    """
    text = program.target.text
    length = sizes.length
    queries = QUERY_BLOCK if length >= 2 * QUERY_BLOCK else length
    prefill = batch * length * (4 * text.hidden_size + 3 * text.intermediate_size) * itemsize
    prefill += 2 * batch * text.num_attention_heads * queries * slots * 4
    step = 6 * batch * program.spare_slots * text.vocab_size * 4
    towers = [(program.target.config, sizes.units)]
    if not isinstance(program, Autoregressive) and not program.shares_tower:
        towers.append((program.drafter.model.config, sizes.view_units))
    return max(prefill, step, *(_tower(config, batch, units, itemsize) for config, units in towers))


def _tower(config: ModelConfig, batch: int, units: int, itemsize: int) -> int:
    """Bytes of a tower's activations over so many units a row."""
    if isinstance(config, TextConfig):
        return 0
    if isinstance(config, QwenVLConfig):
        c = config.vision_config
        patches = units * c.window_patches
        streams = batch * patches * (4 * c.hidden_size + 3 * c.intermediate_size) * itemsize
        return streams + 2 * batch * c.num_heads * patches * max(c.window_patches, min(QUERY_BLOCK, patches)) * 4
    c, pages = config.vision_config, batch * units
    patches = c.side**2 + c.class_token
    streams = pages * patches * (4 * c.hidden_size + c.intermediate_size) * itemsize
    return streams + 2 * min(pages, PAGE_BLOCK) * c.num_attention_heads * patches**2 * 4


def _bytes(tree: Any) -> int:
    """What one device holds of a tree; leaves that say nothing of a sharding are whole on each."""

    def held(x: Any) -> int:
        split = getattr(x, "sharding", None)
        shape = x.shape if split is None else split.shard_shape(x.shape)
        return math.prod(shape) * jnp.dtype(x.dtype).itemsize

    return sum(map(held, jax.tree.leaves(jax.tree.map(_plain, tree))))


def _plain(leaf: Any) -> Any:
    """PRNG keys as the words that they are stored in."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, leaf)
    return leaf

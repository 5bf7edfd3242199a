"""What decoding will hold on the device, counted from shapes before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig, QwenVLConfig, TextConfig
from jaxspec.decoding.adaptive_gamma import init_gamma
from jaxspec.decoding.alternating import Alternating
from jaxspec.decoding.collaborative import MemberPrompts, OneProposer
from jaxspec.decoding.speculative import Autoregressive
from jaxspec.decoding.state import PromptBatch
from jaxspec.decoding.views import VIEWS
from jaxspec.models import LanguageModel, image_zeros
from jaxspec.models.inputs import Pool, PromptRows
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


class MemberSizes(NamedTuple):
    """Sizes of a batch for a program of several models."""

    length: int
    units: tuple[int, ...]
    """Image units of each model's tower."""
    new: int


class _Bytes:
    """Bytes of one device by use: the fields of a dataclass.

    Weights, panels, caches and inputs are exact; `working` estimates one pass's activations.
    """

    @property
    def total(self) -> int:
        return sum(self._uses().values())

    def _uses(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {human_bytes(held)}" for name, held in self._uses().items()]
        return f"memory {human_bytes(self.total)}: " + ", ".join(parts)


@dataclass(frozen=True)
class MemoryReport(_Bytes):
    """What a target and its draft hold on each device. On a mesh `working` is what one device would need alone."""

    target_weights: int
    draft_weights: int
    panels: int
    """The decoders' matrices once more, as a loop on a CPU reads them (`jaxspec.models.panels`)."""
    target_cache: int
    draft_cache: int
    weighting: int
    """What the weighting remembers of all rows."""
    inputs: int
    """Prompts, pixels, output tokens and counters."""
    working: int
    refill: int = 0
    """Inputs and state of the requests that are about to take free rows."""
    growth: int = 0
    """Smaller caches, while the largest are made from them."""


@dataclass(frozen=True)
class MembersReport(_Bytes):
    """What models that write together hold."""

    weights: int
    """Arrays that several models share count once."""
    panels: int
    caches: int
    pending: int
    """What each model said of the proposals that are not yet verified."""
    inputs: int
    working: int


def plan_memory(
    program: Autoregressive | Speculator,
    params: Params,
    batch: int,
    sizes: Sizes,
    panels: int = 0,
    fresh: int = 0,
    smaller: int = 0,
) -> MemoryReport:
    """The report for B rows of these sizes.

    Args:
      params: may be abstract (`jax.ShapeDtypeStruct` leaves): nothing is allocated.
      panels: `LoadedModel.panel_bytes` of the models, for the loop's passes.
      fresh: rows that are prefilled beside the batch, to take free rows of it.
      smaller: new tokens that caches have room for before they grow to that of the sizes.
    """
    beside = plan_memory(program, params, fresh, sizes) if fresh else None
    before = plan_memory(program, params, batch, sizes._replace(new=smaller)) if smaller else None
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
        panels=panels,
        weighting=weighting,
        inputs=_bytes((inputs, options)) + _bytes(state) - draft_cache - whole_cache - weighting,
        working=_working(program, state.target.k[0].dtype.itemsize, batch, sizes, state.target.slots),
        refill=beside.target_cache + beside.draft_cache + beside.weighting + beside.inputs if beside else 0,
        growth=before.target_cache + before.draft_cache if before else 0,
    )


def plan_members(
    program: Alternating | OneProposer, params: Params, batch: int, sizes: MemberSizes, panels: int = 0
) -> MembersReport:
    """Return the plan for models that write together."""
    prompts, options = abstract_member_inputs(program, batch, sizes)
    state = jax.eval_shape(lambda p, b, o: program.prefill(p, b, o, sizes.new), params, prompts, options)
    caches, pending = _bytes(state.caches), _bytes(state.pending)
    models = [member.model for member in program.members]
    step = (len(models) + 4) * batch * program.spare_slots * models[0].text.vocab_size * 4
    held = [
        working
        for model, units, cache in zip(models, sizes.units, state.caches, strict=True)
        for itemsize in (cache.k[0].dtype.itemsize,)
        for working in (
            _prefill(model.text, batch, sizes.length, cache.slots, itemsize),
            _tower(model.config, batch, units, itemsize),
        )
    ]
    return MembersReport(
        weights=_bytes({id(leaf): leaf for leaf in jax.tree.leaves(params)}),
        panels=panels,
        caches=caches,
        pending=pending,
        inputs=_bytes((prompts, options)) + _bytes(state) - caches - pending,
        working=max(step, *held),
    )


def abstract_member_inputs(
    program: Alternating | OneProposer, batch: int, sizes: MemberSizes
) -> tuple[tuple[MemberPrompts, ...], Sampling]:
    """Shapes of the inputs of models that write together."""

    def prompts(model: LanguageModel, pool: Pool | None, units: int) -> MemberPrompts:
        rows = _rows(model, pool, batch, sizes.length, units > 0, units > 0 and model.turns)
        return MemberPrompts(rows, _images(model, batch, units))

    def make() -> tuple[tuple[MemberPrompts, ...], Sampling]:
        both = zip(program.members, sizes.units, strict=True)
        return tuple(prompts(member.model, member.pool, units) for member, units in both), _options(batch)

    return jax.eval_shape(make)


def abstract_inputs(
    program: Autoregressive | Speculator, batch: int, sizes: Sizes
) -> tuple[PromptBatch, Sampling]:
    """Shapes of the inputs, for planning and for compiling ahead of time."""

    def make() -> tuple[PromptBatch, Sampling]:
        rows = partial(_rows, batch=batch, length=sizes.length)
        target, seen = program.target, sizes.units > 0
        inputs = PromptBatch(
            rows(target, VIEWS["M"].pool, shown=seen, turning=seen and target.turns),
            _images(target, batch, sizes.units),
        )
        if not isinstance(program, Autoregressive):
            drafter = program.drafter
            shown = [view.reads_images and sizes.view_units > 0 for view in drafter.views]
            turning = any(shown) and drafter.model.turns
            inputs = inputs.replace(
                views=tuple(
                    rows(drafter.model, view.pool, shown=show, turning=turning)
                    for view, show in zip(drafter.views, shown, strict=True)
                ),
                view_images=_images(drafter.model, batch, sizes.view_units) if program.reads_images else None,
                weights=jnp.zeros((batch, drafter.width)),
                gamma=init_gamma(np.ones(len(program.gammas)), batch) if program.gammas else None,
            )
            if drafter.head is not None:
                inputs = inputs.replace(head=jax.tree.map(jnp.asarray, no_rows(drafter.head, batch, *sizes[-2:])))
        return inputs, _options(batch)

    return jax.eval_shape(make)


def _rows(model: LanguageModel, pool: Pool | None, batch: int, length: int, shown: bool, turning: bool) -> PromptRows:
    """Prompts without images unless `shown`, and with rotary places of their own if `turning`."""
    row = jnp.zeros(batch, jnp.int32)
    out = PromptRows(jnp.zeros((batch, length), jnp.int32), row)
    if turning:
        out = out.replace(rotary=jnp.zeros((batch, 3, length), jnp.int32), shift=row)
    if not shown:
        return out
    sources = jnp.zeros((batch, length, model.blended(pool)), jnp.int32)
    return out.replace(sources=sources, blend=jnp.zeros(sources.shape) if sources.shape[-1] > 1 else None)


def _images(model: LanguageModel, batch: int, units: int) -> dict[str, Array] | None:
    return image_zeros(model.config, batch, units) if units else None


def _options(batch: int) -> Sampling:
    whole, real = jnp.zeros(batch, jnp.int32), jnp.zeros(batch)
    return Sampling(real, whole, real, whole, jnp.zeros(1, jnp.int32), jnp.zeros((batch, 2), jnp.uint32))


def _working(program: Autoregressive | Speculator, itemsize: int, batch: int, sizes: Sizes, slots: int) -> int:
    """The largest of a tower's and of prefill's activations and a step's distributions, in bytes.

    A step holds p, q and logits, before and after temperature and filters.
    """
    text = program.target.text
    prefill = _prefill(text, batch, sizes.length, slots, itemsize)
    step = 6 * batch * program.spare_slots * text.vocab_size * 4
    towers = [(program.target.config, sizes.units)]
    if not isinstance(program, Autoregressive) and not program.shares_tower:
        towers.append((program.drafter.model.config, sizes.view_units))
    return max(prefill, step, *(_tower(config, batch, units, itemsize) for config, units in towers))


def _prefill(text: TextConfig, batch: int, length: int, slots: int, itemsize: int) -> int:
    """Bytes of a few residual streams and one MLP of the whole prompt, and the scores (float32, before and after
    softmax) of one block of queries."""
    queries = QUERY_BLOCK if length >= 2 * QUERY_BLOCK else length
    streams = batch * length * (4 * text.hidden_size + 3 * text.intermediate_size) * itemsize
    return streams + 2 * batch * text.num_attention_heads * queries * slots * 4


def _tower(config: ModelConfig, batch: int, units: int, itemsize: int) -> int:
    """Bytes of a few streams and one MLP of all units, and the scores of one block of pages, or of one block of
    queries with all windows of a row."""
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

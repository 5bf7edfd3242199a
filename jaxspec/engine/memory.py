"""Count the bytes that decoding will take on a device, from shapes, before any allocation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxspec.config import Gemma4Config, Gemma4UnifiedConfig, ModelConfig, QwenVLConfig, TextConfig
from jaxspec.decoding.inputs import Images, Member, PromptBatch
from jaxspec.decoding.program import Program
from jaxspec.decoding.sources.source import Source
from jaxspec.decoding.state import DecodeState, map_placed
from jaxspec.models.attention import BLOCK, owner_block
from jaxspec.models.families import image_zeros
from jaxspec.models.inputs import PromptRows
from jaxspec.models.lvlms.gemma4 import TILE
from jaxspec.models.lvlms.vision import tile_block
from jaxspec.runtime import human_bytes, usual_settings
from jaxspec.sampling import Sampling
from jaxspec.sharding import cache_sharding, mesh_of, replicated
from jaxspec.typing import Params


class Sizes(NamedTuple):
    """Hold the sizes of each row that one compiled program is padded to."""

    length: int
    """Prompt tokens of the target, or of the longest of all collaborating models."""
    tiles: tuple[int, ...]
    """Image tiles of each of the program's towers."""
    new: int
    """New tokens."""
    sources: tuple[tuple[int, ...], ...] = ()
    """Sizes of the inputs of each source of drafts, see `Source.sizes`."""

    def of_members(self, count: int) -> Sizes:
        """Return the sizes of only the first `count` models."""
        return Sizes(self.length, self.tiles[:count], self.new)

    @property
    def flat(self) -> tuple[int, ...]:
        return tuple(jax.tree.leaves(self))

    @property
    def slots(self) -> int:
        """Return the tokens of a row, of prompt and answer."""
        return self.length + self.new


@dataclass(frozen=True)
class MemoryReport:
    """Report the bytes that decoding takes on each device, by use.

    Weights, caches and inputs are exact. `working` estimates the activations of one pass; on a mesh
    it assumes that one device computes all of them.
    """

    target_weights: int
    """Weights of the target or of all collaborating models; shared arrays count once."""
    draft_weights: int
    target_cache: int
    draft_caches: tuple[int, ...]
    """State of each source of drafts, or the pending proposals of collaborating models."""
    weighting: int
    """State of the weighting."""
    inputs: int
    """Prompts, pixels, output tokens, counters, and the logits of first tokens."""
    working: int
    insert: int = 0
    """Inputs and state of the waiting requests that are prefilled for free rows."""
    growth: int = 0
    """Smaller caches, which exist while the largest are made from them."""
    prefixes: int = 0
    """Maximum bytes of prompts that are kept for others that begin alike."""

    @property
    def draft_cache(self) -> int:
        """Return the bytes of all drafts' states."""
        return sum(self.draft_caches)

    @property
    def total(self) -> int:
        return sum(jax.tree.leaves(vars(self)))

    def __str__(self) -> str:
        """Return one line: all bytes, what they hold, and what is left on the device."""
        waiting = self.insert + self.growth + self.prefixes
        parts = {
            "weights": self.target_weights + self.draft_weights,
            "caches": self.target_cache + self.draft_cache + waiting,
            "working": self.weighting + self.inputs + self.working,
        }
        listing = ", ".join(f"{name} {human_bytes(count)}" for name, count in parts.items())
        room, free = device_memory(), ""
        if room is not None:
            free = f"; {human_bytes(max(room - self.total, 0))} of {human_bytes(room)} left"
        return f"memory {human_bytes(self.total)}: {listing}{free}"


def device_memory() -> int | None:
    """Return a device's memory in bytes (for CPUs the machine's), or None if it is unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (device.memory_stats() or {}).get("bytes_limit")


def spare_memory() -> float:
    """Return the share of the machine's memory that nobody needs; 1 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1.0
    kilobytes = {
        name: int(amount.split()[0]) for name, amount in (line.split(":") for line in lines)
    }
    return kilobytes["MemAvailable"] / kilobytes["MemTotal"]


@usual_settings()
def plan_memory(
    program: Program,
    params: Params,
    batch: int,
    sizes: Sizes,
    fresh: tuple[int, Sizes] | None = None,
    smaller: Sizes | None = None,
    options_of: Callable[[int], Sampling] | None = None,
) -> MemoryReport:
    """Return the bytes that B rows of these sizes will take.

    Args:
      params: Parameters, or their shapes (`jax.ShapeDtypeStruct`); nothing is allocated.
      fresh: Rows next to the batch, which move into it: how many, and of which sizes.
      smaller: Sizes from which the batch's caches grow.
      options_of: Returns the options of B rows; None for rows without processors and logprobs.
    """
    planned = partial(plan_memory, program, params, options_of=options_of)
    waiting = planned(*fresh) if fresh else None
    before = planned(batch, smaller) if smaller else None
    inputs, options = abstract_inputs(program, batch, sizes)
    options = options_of(batch) if options_of else options
    state, logits = abstract_prefill(program, params, inputs, options, sizes.new)
    caches, weighting = map(bytes_held, (state.target, state.weighting))
    # A target alone has no drafter, and collaborating models have one of pending proposals.
    parts = state.drafter if program.sources else jax.tree.leaves([state.drafter])
    drafts = tuple(map(bytes_held, parts))
    weights = {id(leaf): leaf for leaf in jax.tree.leaves(program.weights(params))}
    drafting = jax.tree.leaves([params.get(source.name, {}) for source in program.sources])
    return MemoryReport(
        target_weights=bytes_held(weights),
        draft_weights=bytes_held([leaf for leaf in drafting if id(leaf) not in weights]),
        target_cache=caches,
        draft_caches=drafts,
        weighting=weighting,
        inputs=bytes_held((inputs, options, state, logits)) - caches - sum(drafts) - weighting,
        working=_working(program, state, batch, sizes),
        insert=waiting.target_cache + waiting.draft_cache + waiting.weighting + waiting.inputs
        if waiting
        else 0,
        growth=before.target_cache + before.draft_cache if before else 0,
    )


@usual_settings()
def abstract_prefill(
    program: Program, params: Params, inputs: PromptBatch, options: Sampling, new: int
) -> tuple[DecodeState, Any]:
    """Return the shapes that `run_prefill` returns, with the shardings of `place` on a mesh."""
    shapes = jax.eval_shape(lambda p, b, o: program.prefill(p, b, o, new), params, inputs, options)
    mesh = mesh_of(program.weights(params)[0])
    if mesh is None:
        return shapes
    return map_placed(
        lambda leaf: leaf.update(sharding=cache_sharding(mesh, leaf.shape)),
        partial(at_place, sharding=replicated(mesh)),
        shapes,
    )


def at_place(tree: Any, sharding: Any) -> Any:
    """Return the shapes with one sharding, or each with its own."""
    if isinstance(sharding, Sharding):
        return jax.tree.map(lambda x: x.update(sharding=sharding), tree)
    return jax.tree.map(lambda x, leaf: x.update(sharding=leaf), tree, sharding)


@usual_settings()
def abstract_inputs(program: Program, batch: int, sizes: Sizes) -> tuple[PromptBatch, Sampling]:
    """Return the shapes of a batch and its options, to plan or compile ahead of time."""
    zeros = partial(prompt_zeros, batch=batch, images=any(sizes.tiles))

    def of_source(source: Source, images: Images, lengths: tuple[int, ...]) -> Any:
        rows = zeros(source.forms, length=lengths[0]) if source.forms else []
        inputs = source.inputs(rows, images, [np.zeros(0, int)] * batch, lengths)
        return jax.tree.map(jnp.asarray, inputs)

    def make() -> tuple[PromptBatch, Sampling]:
        members = len(program.members)
        rows = [zeros([member], length=sizes.length)[0] for member in program.members]
        images = [
            image_zeros(model.config, batch, count) if model and count else None
            for model, count in zip(program.towers, sizes.tiles)
        ]
        sources = tuple(map(of_source, program.sources, images[members:], sizes.sources))
        width = sum(source.width for source in program.sources)
        weights = jnp.zeros((batch, width)) if width else None
        return program.inputs(rows, images[:members], weights, sources), _options(batch)

    return jax.eval_shape(make)


def prompt_zeros(
    forms: Sequence[Member], batch: int, length: int, images: bool
) -> list[PromptRows]:
    """Return zeros for prompts in each form; all have rotary positions of three axes if one has.

    images: Whether the prompts have images.
    """
    row, rotary = jnp.zeros(batch, jnp.int32), {}
    if images and any(form.reads_images and form.model.mrope for form in forms):
        rotary = {"rotary": jnp.zeros((batch, 3, length), jnp.int32), "shift": row}
    prompts = []
    for form in forms:
        prompts.append(PromptRows(jnp.zeros((batch, length), jnp.int32), row, **rotary))
        if images and form.reads_images:
            sources = jnp.zeros((batch, length, form.model.blended(form.pool)), jnp.int32)
            blend = jnp.zeros(sources.shape) if sources.shape[-1] > 1 else None
            prompts[-1] = prompts[-1].replace(sources=sources, blend=blend)
    return prompts


def _options(batch: int) -> Sampling:
    whole, real = jnp.zeros(batch, jnp.int32), jnp.zeros(batch)
    return Sampling(
        real, whole, real, whole, jnp.zeros(1, jnp.int32), jnp.zeros((batch, 2), jnp.uint32)
    )


def _working(program: Program, state: DecodeState, batch: int, sizes: Sizes) -> int:
    """Return the bytes of the largest activations: of a tower, of prefill, or of a step.

    A step holds the models' logits, before and after temperature and filters, and what is drawn
    from.
    """
    readers, caches = [member.model for member in program.members], program.caches(state)
    itemsize = caches[0].k[0].dtype.itemsize
    step = (len(readers) + 5) * batch * program.spare_slots * readers[0].text.vocab_size * 4
    prefills = (
        _prefill(m.text, batch, sizes.length, c.slots, itemsize) for m, c in zip(readers, caches)
    )
    encodes = (
        _tower(model.config, batch, tiles, itemsize)
        for model, tiles in zip(program.towers, sizes.tiles)
        if model
    )
    return max(step, *prefills, *encodes)


def _prefill(text: TextConfig, batch: int, length: int, slots: int, itemsize: int) -> int:
    """Return the bytes of a few residual streams, one MLP and the attention scores of a prompt.

    Layers' own inputs are held three times: as embeddings, as projections and as their sum. Scores
    are float32, before and after softmax, of the prompt or of one block of queries and keys.
    """
    queries, keys = (BLOCK, BLOCK) if length >= 2 * BLOCK else (length, slots)
    mlp = max(text.of_layer(i).intermediate_size for i in range(text.num_hidden_layers))
    inputs = text.hidden_size_per_layer_input * text.num_hidden_layers
    width = 4 * text.hidden_size + 3 * mlp + 3 * inputs
    streams = batch * length * width * itemsize
    return streams + 2 * batch * text.num_attention_heads * queries * keys * 4


def _tower(config: ModelConfig, batch: int, tiles: int, itemsize: int) -> int:
    """Return the bytes of a few residual streams, one MLP and the attention scores of all tiles.

    Scores are those of one block of tiles, or of one block of queries with all windows of a row.
    """
    if isinstance(config, TextConfig) or not tiles:
        return 0
    c: Any = config.vision_config
    if isinstance(config, Gemma4UnifiedConfig):
        return batch * tiles * TILE * (2 * 3 * c.side**2 + 4 * c.hidden_size) * itemsize
    if isinstance(config, Gemma4Config | QwenVLConfig):  # layers attend within whole images
        window = c.window_patches if isinstance(config, QwenVLConfig) else 0
        heads = c.num_heads if window else c.num_attention_heads
        patches = tiles * (window or TILE * c.pooling_kernel_size**2)
        streams = batch * patches * (4 * c.hidden_size + 3 * c.intermediate_size) * itemsize
        return streams + 2 * batch * heads * patches * max(window, owner_block(patches)) * 4
    count, patches = batch * tiles, c.side**2 + c.class_token
    streams = count * patches * (4 * c.hidden_size + c.intermediate_size) * itemsize
    return streams + 2 * min(count, tile_block(patches)) * c.num_attention_heads * patches**2 * 4


def bytes_held(tree: Any) -> int:
    """Return the bytes of a tree on one device; leaves without a sharding are replicated."""

    def held(x: Any) -> int:
        split = getattr(x, "sharding", None)
        shape = x.shape if split is None else split.shard_shape(x.shape)
        return math.prod(shape) * jnp.dtype(x.dtype).itemsize

    return sum(map(held, jax.tree.leaves(tree)))

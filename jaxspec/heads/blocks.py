"""Compute a head's blocks over whole rows that the target reads in one pass, as in training.

Step s reads the s-th tokens of all anchors' blocks together. A token reads the slots before its
anchor, and its own block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.config import TextConfig
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.head import Head, Places, Prompt, Reading, Spans, empty_room
from jaxspec.heads.making import module_of
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.layers import apply
from jaxspec.models.vocabulary import borrowed_rows
from jaxspec.typing import Array, Features, Float, Int, Params, Tokens


def borrowed_tokens(head: TextConfig, target: TextConfig) -> tuple[int, ...]:
    """Return the tokens whose columns a head takes of its target's output matrix.

    () takes the matrix as it is. A tied target has none: its embedding becomes one, unless the head
    is tied too.
    """
    if head.draft_vocabulary or head.tie_word_embeddings or not target.tie_word_embeddings:
        return head.draft_vocabulary
    return tuple(range(head.vocab_size))


def joined(head: Params, target: Params, vocabulary: tuple[int, ...] = ()) -> Params:
    """Return the head's parameters as a `CausalLM`, which borrows missing parts from the target.

    Embedding and output matrix may be missing. With a draft vocabulary the output matrix has the
    rows of its tokens, which `head` may hold.
    """
    target = target.get("language_model", target)
    parts = {
        name: leaf
        for name, leaf in head.items()
        if name in ("norm", "embed_tokens") or name.startswith("layers_")
    }
    model = {"embed_tokens": target["model"]["embed_tokens"]} | parts
    output = head.get("lm_head") or target.get("lm_head")
    if vocabulary and "lm_head" not in head:
        output = {"weight": borrowed_rows(target, vocabulary)}
    return {"model": model} | ({"lm_head": output} if output else {})


class TargetPass(struct.PyTreeNode):
    """Hold the part of a target's pass over whole rows that a head reads and learns from."""

    hidden: Float[Any, "B L D"]
    """Final-normed hidden states."""
    k: tuple[Float[Any, "B _K L _H"], ...] = ()
    """Keys of the target's layers that the head reads."""
    v: tuple[Float[Any, "B _K L _H"], ...] = ()
    states: Float[Any, "B L fused"] | None = None
    """Hidden states of several layers, for a head that reads these."""
    embeds: Float[Any, "B L D"] | None = None
    """The target's embeddings, for a head that reads those of images."""


def read_whole(
    target: LanguageModel,
    params: Params,
    rows: PromptRows,
    features: Features | None,
    *configs: HeadConfig,
) -> tuple[TargetPass, ...]:
    """Return for each head what it reads of the target's pass over whole rows; all share one."""
    count, length = rows.tokens.shape
    whole = rows.replace(length=jnp.full(count, length))
    embeds = target.embed(params, whole, features)
    layers = tuple(sorted({layer for config in configs for layer in config.target_states or ()}))
    hidden, cache = target.read(params, embeds, whole, length, layers or None)

    def part(config: HeadConfig) -> TargetPass:
        states = None if cache.hidden is None or not config.target_states else cache.hidden[:, 0]
        if states is not None and config.target_states != layers:
            of_layers = dict(zip(layers, jnp.split(states, len(layers), axis=-1), strict=True))
            states = jnp.concatenate([of_layers[i] for i in config.target_states or ()], axis=-1)
        width = config.text_config.hidden_size  # without DeepStack's
        image_embeds = embeds[..., :width] if config.shows_images else None
        return TargetPass(hidden, *keys_of(config, cache), states, image_embeds)

    return tuple(map(part, configs))


def keys_of(config: HeadConfig, cache: KVCache) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the keys and values of the target's cache that a head reads."""
    k, v = (tuple(leaves[i] for i in config.target_keys) for leaves in (cache.k, cache.v))
    return k, v


def read_blocks(
    config: HeadConfig,
    head: Params,
    target: Params,
    target_pass: TargetPass,
    rows: PromptRows,
    block: Int[Array, "B A J"],
    spans: Spans | None,
) -> Float[Array, "B A J D"]:
    """Return the states that a head scores in blocks of J tokens.

    Args:
      block: Slots of the blocks' tokens, of which the first is the anchor.
      spans: Slots of the rows' images, for a head that reads them.
    """
    module, embed, anchors = module_of(config), embedder(config, head, target), block[..., 0]
    count, anchored, steps = block.shape
    states = None
    if config.states_width:
        states = target_pass.hidden if target_pass.states is None else target_pass.states
    reading = Reading(target_pass.k, target_pass.v, states)
    prompt = prompt_of(config, embed, rows, spans, target_pass.embeds)

    first = None
    if rows.first is not None:
        first = jnp.where(anchors < 0, 0, jnp.take_along_axis(rows.first, anchors, axis=1))

    def rotary(slots: Int[Array, "B T"]) -> Array:
        if rows.rotary is None or not config.follows_mrope:
            return slots if first is None else slots - first
        return jax.vmap(lambda row, slots: row[:, slots])(rows.rotary, slots)

    def blocks(head_module: Head) -> Array:
        """Compute all blocks in one pass, or one place of every block after another."""
        context = head_module.context(reading, prompt)
        before = None
        if states is not None and module.reads_before:
            last = jnp.maximum(anchors - 1, 0)[..., None]
            before = head_module.combine(jnp.take_along_axis(states, last, axis=1))
        if module.in_one_pass:
            newest, width = embed(pick(rows.tokens, block[..., :1])[..., 0]), config.slots_of(steps)
            x = head_module.block(newest, before, mask_of(config, embed), width)
            x = x.reshape(count, anchored * width, -1)

            def spread(of_anchors: Array) -> Array:
                return jnp.repeat(of_anchors, width, axis=-1)

            at = Places(
                spread(anchors),
                spread(rotary(anchors)) + jnp.tile(jnp.arange(width), anchored),
                0,
                jnp.asarray(np.tile(module.whole_block(width), (anchored, 1)))[None],
                None if first is None else spread(first),
            )
            room = empty_room(config.text_config, count, width, x.dtype, anchored)
            x, _ = head_module.read(x, at, context, reading, room)
            hidden, _ = head_module.closed(x)
            return hidden.reshape(count, anchored, width, -1)[:, :, -steps:]
        dtype, out = target_pass.hidden.dtype, []
        room = empty_room(config.text_config, count, steps, dtype, anchored)
        for step in range(steps):
            embeds = embed(pick(rows.tokens, block[..., step : step + 1])[..., 0])
            slots = anchors if not module.moves else block[..., step]
            at = Places(
                anchors,
                rotary(jnp.maximum(slots - module.behind, 0)),
                step,
                jnp.asarray(np.arange(steps) <= step)[None, None],
                first,
            )
            hidden, state, room = head_module.step(embeds, before, at, context, reading, room)
            before = None if before is None else state
            out.append(hidden)
        return jnp.stack(out, axis=2)

    return apply(module, head, method=blocks)


def prompt_of(
    config: HeadConfig,
    embed: Callable[[Array], Array],
    rows: PromptRows,
    spans: Spans | None,
    image_embeds: Float[Array, "B L D"] | None,
) -> Prompt:
    """Return what a head reads of prompts, or of whole rows, other than the target's pass.

    Args:
      embed: What `embedder` returns.
      image_embeds: The target's embeddings, for a head that reads those of images.
    """
    rotary = rows.rotary if config.follows_mrope else None
    rotary = rows.places if rotary is None else rotary
    embeds = embed(rows.tokens) if module_of(config).behind else None
    return Prompt(embeds, rotary, spans, rows.images, image_embeds, rows.first)


def mask_of(config: HeadConfig, embed: Callable[[Array], Array]) -> Float[Array, " D"] | None:
    """Return the embedding of a head's mask token; None for a head without one."""
    return None if config.mask_token is None else embed(jnp.full((1, 1), config.mask_token))[0, 0]


def embedder(
    config: HeadConfig, head: Params, target: Params
) -> Callable[[Tokens], Float[Array, "B T D"]]:
    """Return the function that embeds tokens as a head does."""
    reader = LanguageModel(config.embedding)
    params = joined(head, target, config.text_config.draft_vocabulary)
    return lambda tokens: reader.embed(params, PromptRows(tokens, tokens[:, 0]), None)


def corrected(
    config: HeadConfig,
    head: Params,
    scores: Float[Array, "B T words"],
    tokens: Tokens,
    embed: Callable[[Array], Array],
) -> Float[Array, "B T words"]:
    """Return the scores of tokens, with the correction of a head that has one.

    Args:
      tokens: The tokens before them.
      embed: What `embedder` returns.
    """
    if not config.markov:
        return scores
    return scores + apply(module_of(config), head, tokens, embed(tokens), method="correction")


def pick(values: Array, at: Int[Array, "B A J"]) -> Array:
    """Return values[b, at[b, a, j]]."""
    return values[jnp.arange(values.shape[0])[:, None, None], at]

"""Compute a head's blocks over whole rows that the target reads in one pass, as in training.

Step s of a block reads the same slots here as in decoding once the tokens before are accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.config import HeadConfig
from jaxspec.models.heads.borrowed import joined
from jaxspec.models.heads.kinds import module_of
from jaxspec.models.heads.reading import Blocks, HeadRows, Reading
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.layers import apply
from jaxspec.typing import Array, Float, Int, Params


def read_whole(
    target: LanguageModel,
    params: Params,
    rows: PromptRows,
    features: Float[Array, "B U P E"] | None,
    config: HeadConfig,
) -> Reading:
    """Return the target's reading of whole rows, for a head."""
    count, length = rows.tokens.shape
    whole = rows.replace(length=jnp.full(count, length))
    embeds = target.embed(params, whole, features)
    reading = module_of(config).reading(
        lambda layers: target.read(params, embeds, whole, length, layers)
    )
    width = config.text_config.hidden_size  # without DeepStack's
    return reading.replace(embeds=embeds[..., :width]) if config.shows_images else reading


def read_blocks(
    config: HeadConfig,
    head: Params,
    target: Params,
    reading: Reading,
    rows: PromptRows,
    block: Int[Array, "B A J"],
    slots: HeadRows | None,
) -> Float[Array, "B A J D"]:
    """Return a head's final hidden states in blocks of J tokens.

    Args:
      block: Slots of the blocks' tokens, of which the first is the anchor.
      slots: The target's slots that a KV head reads.
    """
    module = module_of(config)
    embed = embedder(config, head, target)
    embeds = embed(pick(rows.tokens, block).reshape(len(block), -1)).reshape(*block.shape, -1)

    def rotary(slots: Int[Array, "B ..."]) -> Array:
        if rows.rotary is None or not config.text_config.rope_scaling.mrope_section:
            return slots
        return jax.vmap(lambda row, slots: row[:, slots])(rows.rotary, slots)

    blocks = Blocks(block, embeds, slots, rotary, rows.tokens, embed, rows.images)
    return apply(module, head, *module.inputs(blocks, reading))


def embedder(
    config: HeadConfig, head: Params, target: Params
) -> Callable[[Int[Array, "B T"]], Float[Array, "B T D"]]:
    """Return the function that embeds tokens as a head does."""
    reader = LanguageModel(config.embedding)
    params = joined(head, target, config.text_config.draft_vocabulary)
    return lambda tokens: reader.embed(params, PromptRows(tokens, tokens[:, 0]), None)


def corrected(
    config: HeadConfig,
    head: Params,
    scores: Float[Array, "B T words"],
    tokens: Int[Array, "B T"],
    embed: Callable[[Array], Array],
) -> Float[Array, "B T words"]:
    """Return the scores of tokens, with the correction of a head that has one.

    Args:
      tokens: The tokens before them.
      embed: What `embedder` returns.
    """
    if not config.corrects:
        return scores
    return scores + apply(module_of(config), head, tokens, embed(tokens), method="correction")


def pick(values: Array, at: Int[Array, "B A J"]) -> Array:
    """Return values[b, at[b, a, j]]."""
    return values[jnp.arange(values.shape[0])[:, None, None], at]

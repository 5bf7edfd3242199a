"""A head's blocks over whole rows that the target reads in one pass, as in training.

Step s of a block reads the same slots here as in decoding once the tokens before are accepted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import HeadConfig
from jaxspec.models.heads.borrowed import joined
from jaxspec.models.heads.head_slots import HeadRows
from jaxspec.models.heads.kinds import module_of
from jaxspec.models.heads.reading import Blocks, Reading
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
    return module_of(config).reading(
        lambda layers: target.read(params, embeds, whole, length, layers)
    )


def read_blocks(
    config: HeadConfig,
    head: Params,
    target: Params,
    reading: Reading,
    rows: PromptRows,
    block: Int[Array, "B A J"],
    slots: HeadRows | None,
) -> tuple[Float[Array, "B A J D"], Float[Array, "B A J D"]]:
    """Return a head's final hidden states in blocks of J tokens, and the tokens' embeddings.

    Args:
      block: Slots of the blocks' tokens, of which the first is the anchor.
      slots: The target's slots that a KV head reads.
    """
    drafts, module = LanguageModel(config.text_config), module_of(config)
    params = joined(head, target, drafts.text.draft_vocabulary)
    written = PromptRows(pick(rows.tokens, block).reshape(len(block), -1), rows.length)
    embeds = drafts.embed(params, written, None).reshape(*block.shape, -1)

    def rotary(slots: Int[Array, "B ..."]) -> Array:
        if rows.rotary is None or not config.text_config.rope_scaling.mrope_section:
            return slots
        return jax.vmap(lambda row, slots: row[:, slots])(rows.rotary, slots)

    blocks = Blocks(block, embeds, slots, rotary, lambda: drafts.embed(params, rows, None))
    return apply(module, head, *module.inputs(blocks, reading)), embeds


def pick(values: Array, at: Int[Array, "B A J"]) -> Array:
    """Return values[b, at[b, a, j]]."""
    return values[jnp.arange(values.shape[0])[:, None, None], at]

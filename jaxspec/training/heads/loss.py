"""The loss of a head on blocks at anchors."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec.config import HeadConfig
from jaxspec.config.heads.head import check_rotary
from jaxspec.models.heads.blocks import corrected, embedder, pick, read_blocks, read_whole
from jaxspec.models.heads.borrowed import borrowed_tokens, joined
from jaxspec.models.heads.reading import Reading
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import draft_indices
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.heads.anchors import Anchoring, HeadBatch
from jaxspec.training.loop.step import LossFn
from jaxspec.training.losses import draft_loss
from jaxspec.training.objectives import encode
from jaxspec.typing import Array, Params


def make_loss(target: LanguageModel, config: HeadConfig, anchoring: Anchoring) -> LossFn:
    """Return the loss of {"target": frozen, "head": trainable} on batches of `HeadBatches`."""
    steps, drafts = config.gamma, LanguageModel(config.text_config)
    words = config.text_config.draft_vocabulary
    teacher = LanguageModel(replace(check_rotary(target.text), draft_vocabulary=words))

    def loss_fn(params: Params, batch: HeadBatch) -> tuple[Array, dict[str, Array]]:
        frozen = jax.lax.stop_gradient(params["target"])
        tokens, anchors = batch.tokens, batch.anchors
        reading = batch.reading or read_target(target, frozen, batch.conversations, config)
        at = anchors[..., None] + jnp.arange(steps + 1)
        inside = (anchors >= 0)[..., None] & (at < tokens.shape[1])
        at = jnp.clip(at, 0, tokens.shape[1] - 1)
        wrote = jnp.cumprod(pick(batch.conversations.mask, at) & inside, axis=-1)
        block = at[..., :-1]
        # An assistant holds a whole decoder; other heads are parts of one.
        decoder = params["head"].get("model", params["head"])
        drafting = joined(decoder, frozen, borrowed_tokens(drafts.text, target.text))
        teaching = joined({}, frozen, teacher.text.draft_vocabulary)
        embed = embedder(config, params["head"], frozen)

        @jax.checkpoint
        def drafted(head: Params) -> Array:
            rows = batch.conversations.rows
            return read_blocks(config, head, frozen, reading, rows, block, batch.slots)

        return draft_loss(
            lambda x: corrected(config, params["head"], drafts.scores(drafting, x[0]), x[1], embed),
            (drafted(params["head"]), pick(tokens, block)),
            pick(reading.hidden, block),
            draft_indices(drafts.text, pick(tokens, at[..., 1:])),
            wrote[..., 1:],
            anchoring.loss == "kl",
            anchoring.decay,
            lambda x: teacher.scores(teaching, x),
        )

    return loss_fn


def read_target(
    target: LanguageModel, params: Params, batch: ConversationBatch, config: HeadConfig
) -> Reading:
    """Return the target's reading of whole conversations, for a head."""
    return read_whole(target, params, batch.rows, encode(target, params, batch.images), config)

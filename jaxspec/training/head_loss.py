"""Compute the loss of heads on blocks that begin at anchors, by one pass of their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec.heads.blocks import (
    TargetPass,
    borrowed_tokens,
    corrected,
    embedder,
    joined,
    pick,
    read_blocks,
    read_whole,
)
from jaxspec.heads.config import HeadConfig, check_rotary
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import draft_indices
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.head_batches import Anchoring, Blocks, HeadBatch, Heads
from jaxspec.training.losses import Loss, Sums, count_places, draft_loss
from jaxspec.training.objectives import encode
from jaxspec.typing import Array, Params


def make_loss(target: LanguageModel, heads: Heads) -> Loss:
    """Return the sum of the heads' losses, of {"target": frozen, NAME: trainable, ...} on batches
    of `HeadBatches`. The target reads a batch once.
    """
    losses = {name: _block_loss(target, *head) for name, head in heads.items()}
    configs = [config for config, _ in heads.values()]

    def share(params: Params, batch: HeadBatch, counts: Mapping[str, Array]) -> tuple[Array, Sums]:
        """Return the sum of the heads' losses, and their metrics, over this part of a batch."""
        frozen = jax.lax.stop_gradient(params["target"])
        whole = batch.conversations
        readings = batch.readings or read_target(target, frozen, whole, *configs)
        total, tokens, sums = jnp.zeros(()), jnp.zeros((), jnp.int32), {}
        for (name, loss), reading in zip(losses.items(), readings, strict=True):
            parts = {"head": params[name], "target": frozen}
            value, metrics = loss.share(parts, (whole, batch.blocks[name], reading), counts[name])
            total, tokens = total + value, tokens + metrics["tokens"]
            prefix = f"{name}/" if len(heads) > 1 else ""
            sums |= {f"{prefix}{key}": metric for key, metric in metrics.items()}
        return total, sums | {"loss": total, "tokens": tokens, "filled": whole.filled}

    def count(batch: HeadBatch) -> dict[str, Array]:
        whole = batch.conversations
        return {name: loss.count((whole, batch.blocks[name])) for name, loss in losses.items()}

    return Loss(share, count)


def _block_loss(target: LanguageModel, config: HeadConfig, anchoring: Anchoring) -> Loss:
    """Return the loss of {"target": frozen, "head": trainable} on (conversations, the head's
    blocks, the target's pass).
    """
    steps, drafts = config.gamma, LanguageModel(config.text_config)
    weights = anchoring.of_places(steps)
    vocabulary = config.text_config.draft_vocabulary
    teacher = LanguageModel(replace(check_rotary(target.text), draft_vocabulary=vocabulary))

    def learned(whole: ConversationBatch, blocks: Blocks) -> tuple[Array, Array, Array]:
        """Return the slots of blocks, the tokens after them, and which of these count."""
        tokens, anchors = whole.tokens, blocks.anchors
        at = anchors[..., None] + jnp.arange(steps + 1)
        inside = (anchors >= 0)[..., None] & (at < tokens.shape[1])
        at = jnp.clip(at, 0, tokens.shape[1] - 1)
        wrote = jnp.cumprod(pick(whole.mask, at) & inside, axis=-1)
        labels = draft_indices(drafts.text, pick(tokens, at[..., 1:]))
        return at[..., :-1], labels, wrote[..., 1:]

    def share(
        params: Params, part: tuple[ConversationBatch, Blocks, TargetPass], count: Array
    ) -> tuple[Array, Sums]:
        """Return the loss of a head over this part of a batch's blocks, and metrics."""
        head, frozen = params["head"], params["target"]
        whole, blocks, reading = part
        slots, labels, mask = learned(whole, blocks)
        # An assistant holds a whole decoder; other heads are parts of one.
        decoder = head.get("model", head)
        drafting = joined(decoder, frozen, borrowed_tokens(drafts.text, target.text))
        teaching = joined({}, frozen, teacher.text.draft_vocabulary)
        embed = embedder(config, head, frozen)

        @jax.checkpoint
        def drafted(head: Params) -> Array:
            return read_blocks(config, head, frozen, reading, whole.rows, slots, blocks.spans)

        return draft_loss(
            lambda x: corrected(config, head, drafts.scores(drafting, x[0]), x[1], embed),
            (drafted(head), pick(whole.tokens, slots)),
            pick(reading.hidden, slots),
            labels,
            mask,
            anchoring.loss,
            weights,
            lambda x: teacher.scores(teaching, x),
            count,
        )

    return Loss(share, lambda part: count_places(*learned(*part)[1:]))


def read_target(
    target: LanguageModel, params: Params, batch: ConversationBatch, *configs: HeadConfig
) -> tuple[TargetPass, ...]:
    """Return the target's reading of whole conversations, for each of the heads."""
    return read_whole(target, params, batch.rows, encode(target, params, batch.images), *configs)

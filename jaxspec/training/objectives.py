"""What a draft trains for: the answers' next tokens, a frozen teacher's distributions, or both.

The teacher's may be taken on what the draft says itself (on-policy distillation: DistillSpec, arXiv 2310.08461). It
answers inside the training step, from its parameters at that step: batches stay a function of the step, and a run
that was stopped goes on as if it had not been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import InputError
from jaxspec.loading import LoadedModel, same_tower
from jaxspec.models import LanguageModel, split_tower
from jaxspec.models.inputs import TEXT, PromptRows
from jaxspec.models.vocabulary import places
from jaxspec.prompts.views import VIEWS, View
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.losses import (
    Divergence,
    Metrics,
    agreement,
    count_blocks,
    distillation_loss,
    next_token_loss,
)
from jaxspec.training.step import flatten, in_dtype, partition
from jaxspec.typing import Array, Bool, Float, Int, Params

TEACHER = "teacher"
"""The teacher's parameters stand beside the draft's under this name; freeze it."""


@dataclass(frozen=True)
class Distillation:
    """How a teacher's distributions are learned (logit distillation)."""

    divergence: Divergence = "forward_kl"
    """forward_kl, reverse_kl or tvd."""
    top_k: int | None = None
    """Compare over the teacher's most probable tokens and all others together; None: over all."""
    share: float = 1.0
    """Share of the divergence in the loss; the rest is the next-token loss."""
    on_policy: int = 0
    """Most tokens of an answer of the draft's own, on which it is taught in place of the data's; 0: the data's."""

    def __post_init__(self) -> None:
        if self.on_policy < 0 or (self.on_policy and self.share < 1):
            raise InputError(
                f"distillation: on_policy {self.on_policy} with share {self.share}; a draft has nothing to learn from "
                "its own tokens but what the teacher thinks of them, so give share 1"
            )
        if not 0 < self.share <= 1:
            raise InputError(
                f"distillation: share {self.share} of the loss; give more than 0 and at most 1"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"distillation: top_k {self.top_k}; give 1 or more, or none")


def encode(
    model: LanguageModel, params: Params, images: Mapping[str, Any]
) -> Float[Array, "B U P E"] | None:
    """Tower features of a batch's images, in the parameters' dtype; None where it has none."""
    return (
        model.encode(params, in_dtype(images, jax.tree.leaves(params)[0].dtype)) if images else None
    )


def score(
    model: LanguageModel, params: Params, batch: ConversationBatch, view: View = VIEWS["M"]
) -> Array:
    """Scores [B,L,words] of a batch."""
    return model.score(params, batch.rows, encode(model, params, batch.images), view.pool)


def without_teacher(params: Params) -> Params:
    """Return the draft's own parameters."""
    return {name: part for name, part in params.items() if name != TEACHER}


def tuning_loss(
    model: LanguageModel,
    view: View = VIEWS["M"],
    gamma: int = 5,
    teacher: LanguageModel | None = None,
    distillation: Distillation | None = None,
) -> Callable[[Params, ConversationBatch], tuple[Float[Array, ""], Metrics]]:
    """(params, batch) -> (loss, metrics), for `fit`; the batch is one of `ConversationBatches`, of the same view.

    With a teacher its parameters are `params["teacher"]` and it computes in the same program, as no gradient goes
    through it; where they hold no tower it is shown the draft's features (see `teacher_params`). The metric
    `tokens_per_block` is simulated, see `count_blocks`: it takes the batch's answers, or what the teacher makes of
    them, for what a target would write.
    """

    def loss_fn(params: Params, batch: ConversationBatch) -> tuple[Float[Array, ""], Metrics]:
        own = without_teacher(params)
        features = encode(model, own, batch.images)
        if distillation is not None and distillation.on_policy:
            batch = answered(model, own, batch, features, view, distillation.on_policy)
        logits = model.score(own, batch.rows, features, view.pool)
        tokens = places(model.text, batch.tokens)
        mask = batch.mask & (
            tokens >= 0
        )  # nothing else can be learned by a draft that scores few tokens
        loss, metrics = next_token_loss(logits, tokens, mask)
        agree = agreement(logits, tokens)
        if teacher is not None:
            assert distillation is not None, "a teacher needs a distillation"
            taught = jax.lax.stop_gradient(_taught(teacher, params[TEACHER], batch, features))
            best = places(model.text, jnp.pad(taught.argmax(-1), ((0, 0), (1, 0)))[:, :-1])
            if words := model.text.draft_vocabulary:
                taught = taught[..., np.asarray(words)]
            divergence, learned = distillation_loss(
                logits, taught, mask, distillation.divergence, distillation.top_k
            )
            agree = agreement(logits, best)
            loss = distillation.share * divergence + (1 - distillation.share) * loss
            metrics |= {"divergence": divergence, "acceptance": learned["acceptance"], "loss": loss}
        tokens, blocks = count_blocks(agree, batch.mask, gamma)
        return loss, metrics | {"tokens_per_block": tokens / jnp.maximum(blocks, 1)}

    return loss_fn


def teacher_params(
    teacher: LoadedModel, draft: LoadedModel, view: View, frozen: Sequence[str]
) -> Params:
    """Return a teacher's parameters beside a draft's of which `frozen` does not train: without its tower where the
    draft sees through the same, and it stays the same. Images are encoded once then."""
    if not view.reads_images or not same_tower(teacher, draft):
        return teacher.params
    tower, rest = split_tower(teacher.config, teacher.params)
    trainable, _ = partition(draft.params, frozen)
    return teacher.params if flatten(tower).keys() & trainable.keys() else rest


def _taught(
    teacher: LanguageModel,
    params: Params,
    batch: ConversationBatch,
    features: Float[Array, "B U P E"] | None,
) -> Float[Array, "B L V"]:
    """Return the teacher's logits at the draft's slots; `features` are of the draft's images."""
    read = batch.teacher
    assert read is not None, "the batch has no rows of the teacher"
    if split_tower(teacher.config, params)[0]:
        features = encode(teacher, params, batch.images if read.images is None else read.images)
    logits = teacher.score(params, read.rows, features)
    return jnp.take_along_axis(logits, read.before[..., None], axis=1)


def simulated(
    model: LanguageModel,
    batches: Sequence[ConversationBatch],
    view: View = VIEWS["M"],
    gamma: int = 5,
) -> Callable[[Params], dict[str, float]]:
    """Parameters -> {simulated_tokens_per_block} over held-out batches of a target's own greedy answers, pooled."""

    @jax.jit
    def count(params: Params, batch: ConversationBatch) -> tuple[Array, Array]:
        logits, tokens = score(model, params, batch, view), places(model.text, batch.tokens)
        return count_blocks(agreement(logits, tokens), batch.mask, gamma)

    def evaluate(params: Params) -> dict[str, float]:
        counts = [count(without_teacher(params), batch) for batch in batches]
        tokens, blocks = (sum(int(part) for part in column) for column in zip(*counts, strict=True))
        return {"simulated_tokens_per_block": tokens / max(blocks, 1)}

    return evaluate


def answered(
    model: LanguageModel,
    params: Params,
    batch: ConversationBatch,
    features: Float[Array, "B U P E"] | None,
    view: View,
    max_new_tokens: int,
) -> ConversationBatch:
    """Return the batch with all that follows each row's first question written anew by the draft, sampled at
    temperature 1. `features` are the tower's, of the draft's images.

    An answer ends with EOS, after `max_new_tokens`, or where a row of the batch ends, the draft's or the teacher's.
    Rows without an answer to learn stay so. No gradient goes through the sampling.
    """
    params, features = jax.lax.stop_gradient((params, features))
    read, width = batch.teacher, batch.tokens.shape[1]
    assert read is not None, "the batch has no rows of the teacher"
    begin = jnp.maximum(batch.mask.argmax(axis=1), 1)
    tokens, live = _sample(model, params, batch, begin, features, view, max_new_tokens)
    # From a slot of the draft's answer to that of the teacher's: a text draft's row is shorter by the images before.
    shift = jnp.take_along_axis(read.before, begin[:, None] - 1, axis=1)[:, 0] + 1 - begin
    inside = begin[:, None] + jnp.arange(max_new_tokens)
    live &= inside < jnp.minimum(width, read.rows.tokens.shape[1] - shift)[:, None]
    places = jnp.arange(width)
    return batch.replace(
        rows=_written(batch.rows, begin, tokens, live),
        mask=(places >= begin[:, None]) & (places < (begin + live.sum(axis=1))[:, None]),
        teacher=read.replace(
            rows=_written(read.rows, begin + shift, tokens, live),
            before=jnp.maximum(places + shift[:, None], 0),
        ),
    )


def _sample(
    model: LanguageModel,
    params: Params,
    batch: ConversationBatch,
    begin: Int[Array, " B"],
    features: Float[Array, "B U P E"] | None,
    view: View,
    count: int,
) -> tuple[Int[Array, "B J"], Bool[Array, "B J"]]:
    """Return tokens that follow the rows' first `begin`, and which of them belong to the answers."""
    rows = batch.rows.replace(length=begin)
    embeds = model.embed(params, rows, features, view.pool)
    logits, cache = model.prefill(params, embeds, rows, rows.tokens.shape[1] + count)
    keys = jax.vmap(jax.random.key)(batch.numbers)
    eos = model.text.eos_token_id
    ends = jnp.asarray([eos] if isinstance(eos, int) else list(eos or (-1,)))

    def step(carry: Any, number: Array) -> tuple[Any, tuple[Array, Array]]:
        logits, cache, live = carry
        token = jax.vmap(jax.random.categorical)(
            jax.vmap(jax.random.fold_in, (0, None))(keys, number), logits
        )
        after, cache = model.extend(params, token[:, None], cache)
        return (after[:, 0], cache, live & ~jnp.isin(token, ends)), (token, live)

    start = logits, cache, batch.mask.any(axis=1)
    _, (tokens, live) = jax.lax.scan(step, start, jnp.arange(count))
    return tokens.T, live.T


def _written(rows: PromptRows, begin: Array, tokens: Array, live: Array) -> PromptRows:
    """Return the rows with the live tokens from `begin` on in place of what was there."""
    width = rows.tokens.shape[1]
    after = jnp.arange(width) >= begin[:, None]
    where = jnp.where(live, begin[:, None] + jnp.arange(tokens.shape[1]), width)
    row = jnp.arange(len(begin))[:, None]
    return rows.replace(
        tokens=jnp.where(after, 0, rows.tokens).at[row, where].set(tokens, mode="drop"),
        length=begin + live.sum(axis=1),
        sources=None if rows.sources is None else jnp.where(after[..., None], TEXT, rows.sources),
    )

"""Train a draft on the answers' next tokens, a frozen teacher's distributions, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import check_counts, check_numbers
from jaxspec.loading.models import LoadedModel
from jaxspec.loading.pairs import same_tower
from jaxspec.models.families import split_tower
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.lora import Lora, merged
from jaxspec.models.vocabulary import draft_indices
from jaxspec.prompts.views import VIEWS, View
from jaxspec.training import losses
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.loop.step import flatten, in_dtype, partition
from jaxspec.typing import Array, Bool, Float, Int, Params

TEACHER = "teacher"
"""Name of the teacher's parameters next to the draft's. Freeze it."""
GAMMA = 5
"""Maximum drafts of a simulated block."""


@dataclass(frozen=True)
class Distillation:
    """Set how a draft learns a teacher's distributions (logit distillation)."""

    divergence: losses.Divergence = "forward_kl"
    """forward_kl, reverse_kl or tvd."""
    top_k: int | None = None
    """Compare the teacher's k most probable tokens, and all others as one; None compares all."""
    share: float = 1.0
    """Share of the divergence in the loss; the rest is the next-token loss."""

    def __post_init__(self) -> None:
        check_numbers(0, 1, share=self.share)
        if self.top_k is not None:
            check_counts(top_k=self.top_k)


def encode(
    model: LanguageModel, params: Params, images: Mapping[str, Any]
) -> Float[Array, "B U P E"] | None:
    """Return the tower's features of a batch, in the parameters' dtype; None without images."""
    return (
        model.encode(params, in_dtype(images, jax.tree.leaves(params)[0].dtype)) if images else None
    )


def without_teacher(params: Params) -> Params:
    """Return the draft's own parameters."""
    return {name: part for name, part in params.items() if name != TEACHER}


def tuning_loss(
    model: LanguageModel,
    view: View = VIEWS["M"],
    teacher: LanguageModel | None = None,
    distillation: Distillation | None = None,
    lora: Lora | None = None,
) -> losses.Loss:
    """Return the loss of batches of `ConversationBatches` in this view.

    A teacher computes in the same program, from `params["teacher"]`. Without a tower of its own it
    reads the draft's features (`teacher_params`). The metric `tokens_per_pass` is simulated
    (`count_blocks`), as if the target wrote the batch's answers, or the teacher's best tokens.
    """

    def count(batch: ConversationBatch) -> Array:
        _, learned = _labels(model, batch)
        return (learned[:, 1:] if batch.answers is None else learned).sum(dtype=jnp.float32)

    def share(
        params: Params, batch: ConversationBatch, count: Array
    ) -> tuple[Float[Array, ""], losses.Sums]:
        """Return the loss over this part of a batch, and metrics."""
        trained = merged(without_teacher(params), lora)
        features = encode(model, trained, batch.images)
        if teacher is None:
            loss, sums, agree = _answers_share(model, trained, batch, features, view, count)
        else:
            assert distillation is not None, "a teacher needs a distillation"
            logits = model.score(trained, batch.rows, features, view.pool)
            taught = teacher_logits(teacher, params[TEACHER], batch, features)
            taught = jax.lax.stop_gradient(taught)
            loss, sums, agree = _taught_share(model, logits, taught, batch, distillation, count)
        blocks = losses.count_blocks(agree, batch.mask, GAMMA)
        return loss, sums | {"filled": batch.filled, "tokens_per_pass": blocks}

    return losses.Loss(share, count)


def _labels(
    model: LanguageModel, batch: ConversationBatch
) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
    """Return the tokens, or those of the answers' slots, in the draft's vocabulary, and a mask.

    A draft with a small vocabulary learns only the tokens that it scores.
    """
    tokens = draft_indices(model.text, batch.tokens)
    if batch.answers is None:
        return tokens, batch.mask & (tokens >= 0)
    labels = jnp.take_along_axis(tokens, jnp.maximum(batch.answers, 0) + 1, axis=1)
    return labels, (batch.answers >= 0) & (labels >= 0)


def _answers_share(
    model: LanguageModel,
    params: Params,
    batch: ConversationBatch,
    features: Float[Array, "B U P E"] | None,
    view: View,
    count: Array,
) -> tuple[Float[Array, ""], losses.Sums, Bool[Array, "B L"]]:
    """Return the loss without a teacher, metrics, and where the draft agrees with the answers.

    It scores only the slots `batch.answers`: the scores of 400 tokens with a vocabulary of 49,152
    take 79 MB.
    """
    assert batch.answers is not None, "the batch has no slots of answers"
    slots = jnp.maximum(batch.answers, 0)
    logits = model.score(params, batch.rows, features, view.pool, slots)
    labels, learned = _labels(model, batch)
    loss, sums = losses.cross_entropy(logits, labels, learned, count)
    rows = jnp.arange(len(slots))[:, None]
    # Padding writes past the row, so it is dropped.
    after = jnp.where(batch.answers >= 0, slots + 1, batch.mask.shape[1])
    right = logits.argmax(-1) == labels
    return loss, sums, jnp.zeros(batch.mask.shape, bool).at[rows, after].set(right, mode="drop")


def _taught_share(
    model: LanguageModel,
    logits: Float[Array, "B L V"],
    taught: Float[Array, "B L teacher"],
    batch: ConversationBatch,
    distillation: Distillation,
    count: Array,
) -> tuple[Float[Array, ""], losses.Sums, Bool[Array, "B L"]]:
    """Return the loss with a teacher, metrics, and where the draft agrees with its best tokens."""
    tokens, mask = _labels(model, batch)
    loss, sums = losses.next_token_loss(logits, tokens, mask, count)
    best = draft_indices(model.text, jnp.pad(taught.argmax(-1), ((0, 0), (1, 0)))[:, :-1])
    if vocabulary := model.text.draft_vocabulary:
        taught = taught[..., np.asarray(vocabulary)]
    divergence, acceptance = losses.distillation_loss(
        logits, taught, mask, count, distillation.divergence, distillation.top_k
    )
    loss = distillation.share * divergence + (1 - distillation.share) * loss
    sums |= {"divergence": divergence, "acceptance": acceptance, "loss": loss}
    return loss, sums, losses.agreement(logits, best)


def teacher_params(
    teacher: LoadedModel, draft: LoadedModel, view: View, frozen: Sequence[str]
) -> Params:
    """Return a teacher's parameters, without its tower where the draft's is equal and frozen.

    Images are then encoded once for both.
    """
    if not view.reads_images or not same_tower(teacher, draft):
        return teacher.params
    tower, decoder = split_tower(teacher.params)
    trainable, _ = partition(draft.params, frozen)
    return teacher.params if flatten(tower).keys() & trainable.keys() else decoder


def teacher_logits(
    teacher: LanguageModel,
    params: Params,
    batch: ConversationBatch,
    features: Float[Array, "B U P E"] | None,
) -> Float[Array, "B L V"]:
    """Return the teacher's logits at the draft's slots. `features` are the draft's."""
    read = batch.teacher
    assert read is not None, "the batch has no rows of the teacher"
    if split_tower(params)[0]:
        features = encode(teacher, params, batch.images if read.images is None else read.images)
    logits = teacher.score(params, read.rows, features)
    return jnp.take_along_axis(logits, read.before[..., None], axis=1)


def simulated(
    model: LanguageModel, batches: Sequence[ConversationBatch], view: View, lora: Lora | None
) -> Callable[[Params], dict[str, float]]:
    """Return a function of parameters: the tokens per pass, simulated on a target's answers."""
    loss = tuning_loss(model, view, lora=lora)

    @jax.jit
    def simulate(params: Params, batch: ConversationBatch) -> tuple[Array, Array]:
        _, sums = loss.share(params, batch, loss.count(batch))
        return sums["tokens_per_pass"]

    def evaluate(params: Params) -> dict[str, float]:
        draft = jax.device_put(without_teacher(params))
        counts = [simulate(draft, batch) for batch in batches]
        tokens, blocks = (sum(int(part) for part in column) for column in zip(*counts, strict=True))
        return {"simulated_tokens_per_pass": tokens / max(blocks, 1)}

    return evaluate

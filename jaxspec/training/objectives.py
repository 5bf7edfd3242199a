"""What a draft trains for: the answers' next tokens, a frozen teacher's distributions, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.loading import LoadedModel, same_tower
from jaxspec.decoding.views import VIEWS, View
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel, split_tower
from jaxspec.models.inputs import PromptRows
from jaxspec.training.conversations import TEACHER
from jaxspec.training.distillation import Divergence, distillation_loss
from jaxspec.training.losses import next_token_loss
from jaxspec.training.on_policy import answered
from jaxspec.training.optimizer import flatten, partition
from jaxspec.training.simulation import agreement, count_blocks
from jaxspec.typing import Array, Float, Int, Params

Metrics = dict[str, Float[Array, ""]]
HELD_BY = TEACHER.rstrip("/")
"""The teacher's parameters stand beside the draft's under this name; freeze it."""
_ROWS = {field.name for field in fields(PromptRows)}
_OURS = {*_ROWS, "mask", "before", "seed"}


@dataclass(frozen=True)
class Distillation:
    """How a teacher's distributions are learned (logit distillation)."""

    divergence: Divergence = "forward_kl"
    """forward_kl, reverse_kl or tvd."""
    top_k: int | None = None
    """Compare over the teacher's likeliest tokens and all others together; None: over all."""
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
            raise InputError(f"distillation: share {self.share} of the loss; give more than 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"distillation: top_k {self.top_k}; give 1 or more, or none")


def score(model: LanguageModel, params: Params, batch: Mapping[str, Any], view: View = VIEWS["M"]) -> Array:
    """Logits [B,L,V] of a batch as `ConversationBatches` makes it."""
    return model.score(params, rows_of(batch), encode(model, params, batch), view.pool)


def rows_of(batch: Mapping[str, Any]) -> PromptRows:
    """The rows of a batch as the draft reads them."""
    return PromptRows(**{name: value for name, value in batch.items() if name in _ROWS})


def encode(model: LanguageModel, params: Params, batch: Mapping[str, Any]) -> Float[Array, "B U P E"] | None:
    """Tower features of the draft's images in a batch, in the parameters' dtype; None where it has none."""
    dtype = jax.tree.leaves(params)[0].dtype
    images = {name: value for name, value in batch.items() if name not in _OURS and not name.startswith(TEACHER)}
    shown = {k: v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v for k, v in images.items()}
    return model.encode(params, shown) if shown else None


def tuning_loss(
    model: LanguageModel,
    view: View = VIEWS["M"],
    gamma: int = 5,
    teacher: LanguageModel | None = None,
    distillation: Distillation | None = None,
) -> Callable[[Params, Mapping[str, Array]], tuple[Float[Array, ""], Metrics]]:
    """(params, batch) -> (loss, metrics), for `fit`; the batch is one of `ConversationBatches`, of the same view.

    With a teacher its parameters are `params["teacher"]` and it computes in the same program, as no gradient goes
    through it; where they hold no tower it is shown the draft's features (see `teacher_params`). The metric
    `tokens_per_block` is simulated, see `simulation`: it takes the batch's answers, or what the teacher makes of them,
    for what a target would write.
    """

    def loss_fn(params: Params, batch: Mapping[str, Array]) -> tuple[Float[Array, ""], Metrics]:
        own = {name: part for name, part in params.items() if name != HELD_BY}
        features = encode(model, own, batch)
        if distillation is not None and distillation.on_policy:
            batch = answered(model, own, batch, rows_of(batch), features, view, distillation.on_policy)
        logits = model.score(own, rows_of(batch), features, view.pool)
        loss, metrics = next_token_loss(logits, batch["tokens"], batch["mask"])
        agree = agreement(logits, batch["tokens"])
        if teacher is not None:
            assert distillation is not None, "a teacher needs a distillation"
            taught = jax.lax.stop_gradient(_taught(teacher, params[HELD_BY], batch, features))
            divergence, learned = distillation_loss(
                logits, taught, batch["mask"], distillation.divergence, distillation.top_k
            )
            agree = agreement(logits, jnp.pad(taught.argmax(-1), ((0, 0), (1, 0)))[:, :-1])
            loss = distillation.share * divergence + (1 - distillation.share) * loss
            metrics |= {"divergence": divergence, "acceptance": learned["acceptance"], "loss": loss}
        tokens, blocks = count_blocks(agree, batch["mask"], gamma)
        return loss, metrics | {"tokens_per_block": tokens / jnp.maximum(blocks, 1)}

    return loss_fn


def teacher_params(teacher: LoadedModel, draft: LoadedModel, view: View, frozen: Sequence[str]) -> Params:
    """A teacher's parameters beside a draft's of which `frozen` does not train: without its tower where the draft
    sees through the same, and it stays the same. Images are encoded once then."""
    if not view.reads_images or not same_tower(teacher, draft):
        return teacher.params
    tower, rest = split_tower(teacher.config, teacher.params)
    trainable, _ = partition(draft.params, frozen)
    return teacher.params if flatten(tower).keys() & trainable.keys() else rest


def _taught(
    teacher: LanguageModel,
    params: Params,
    batch: Mapping[str, Array],
    features: Float[Array, "B U P E"] | None,
) -> Float[Array, "B L V"]:
    """The teacher's logits at the draft's slots; `features` are of the draft's images."""
    whole = {name.removeprefix(TEACHER): value for name, value in batch.items() if name.startswith(TEACHER)}
    if split_tower(teacher.config, params)[0]:
        shared = {name: value for name, value in batch.items() if name not in _OURS and not name.startswith(TEACHER)}
        images = shared if whole.get("sources") is not None and not whole.keys() - _ROWS else {}
        features = encode(teacher, params, images | whole)
    logits = teacher.score(params, rows_of(whole), features)
    before: Int[Array, "B L"] = batch["before"]
    return jnp.take_along_axis(logits, before[..., None], axis=1)


def simulated(
    model: LanguageModel, batches: Sequence[Mapping[str, np.ndarray]], view: View = VIEWS["M"], gamma: int = 5
) -> Callable[[Params], dict[str, float]]:
    """Parameters -> {simulated_tokens_per_block} over held-out batches of a target's own greedy answers, pooled."""

    @jax.jit
    def count(params: Params, batch: Mapping[str, Array]) -> tuple[Array, Array]:
        logits = score(model, params, batch, view)
        return count_blocks(agreement(logits, batch["tokens"]), batch["mask"], gamma)

    def evaluate(params: Params) -> dict[str, float]:
        params = {name: part for name, part in params.items() if name != HELD_BY}
        counts = [count(params, dict(batch)) for batch in batches]
        tokens, blocks = (sum(int(part) for part in column) for column in zip(*counts, strict=True))
        return {"simulated_tokens_per_block": tokens / max(blocks, 1)}

    return evaluate

"""What a draft trains for: the answers' next tokens, a frozen teacher's distributions, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.views import VIEWS, View
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import PromptRows
from jaxspec.training.conversations import TEACHER
from jaxspec.training.distillation import Divergence, distillation_loss
from jaxspec.training.losses import next_token_loss
from jaxspec.training.on_policy import answered
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
    """Of the divergence in the loss; the rest is the next-token loss."""
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
    """Logits [B,L,V] of a batch as `ConversationBatches` makes it; images in the parameters' dtype."""
    return model.score(params, *_inputs(params, batch), view.pool)


def _inputs(params: Params, batch: Mapping[str, Any]) -> tuple[PromptRows, dict[str, Array]]:
    """What a draft reads of a batch: its rows, and the images."""
    dtype = jax.tree.leaves(params)[0].dtype
    images = {k: v for k, v in batch.items() if k not in _OURS and not k.startswith(TEACHER)}
    rows = PromptRows(**{k: v for k, v in batch.items() if k in _ROWS})
    return rows, {k: v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v for k, v in images.items()}


def tuning_loss(
    model: LanguageModel,
    view: View = VIEWS["M"],
    gamma: int = 5,
    teacher: LanguageModel | None = None,
    distillation: Distillation | None = None,
) -> Callable[[Params, Mapping[str, Array]], tuple[Float[Array, ""], Metrics]]:
    """(params, batch) -> (loss, metrics), for `fit`; the batch is one of `ConversationBatches`, of the same view.

    With a teacher its parameters are `params["teacher"]` and it computes in the same program, as no gradient goes
    through it. The metric `tokens_per_block` is simulated, see `simulation`: it takes the batch's answers, or what the
    teacher makes of them, for what a target would write.
    """

    def loss_fn(params: Params, batch: Mapping[str, Array]) -> tuple[Float[Array, ""], Metrics]:
        own = {name: part for name, part in params.items() if name != HELD_BY}
        if distillation is not None and distillation.on_policy:
            batch = answered(model, own, batch, *_inputs(own, batch), view, distillation.on_policy)
        logits = score(model, own, batch, view)
        loss, metrics = next_token_loss(logits, batch["tokens"], batch["mask"])
        agree = agreement(logits, batch["tokens"])
        if teacher is not None:
            assert distillation is not None, "a teacher needs a distillation"
            taught = jax.lax.stop_gradient(_taught(teacher, params[HELD_BY], batch))
            divergence, learned = distillation_loss(
                logits, taught, batch["mask"], distillation.divergence, distillation.top_k
            )
            agree = agreement(logits, jnp.pad(taught.argmax(-1), ((0, 0), (1, 0)))[:, :-1])
            loss = distillation.share * divergence + (1 - distillation.share) * loss
            metrics |= {"divergence": divergence, "acceptance": learned["acceptance"], "loss": loss}
        tokens, blocks = count_blocks(agree, batch["mask"], gamma)
        return loss, metrics | {"tokens_per_block": tokens / jnp.maximum(blocks, 1)}

    return loss_fn


def _taught(teacher: LanguageModel, params: Params, batch: Mapping[str, Array]) -> Float[Array, "B L V"]:
    """The teacher's logits at the draft's slots."""
    whole = {name.removeprefix(TEACHER): value for name, value in batch.items() if name.startswith(TEACHER)}
    shared = {name: value for name, value in batch.items() if name not in _OURS and not name.startswith(TEACHER)}
    images = shared if whole.get("sources") is not None and not whole.keys() - _ROWS else {}
    logits = score(teacher, params, images | whole)
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

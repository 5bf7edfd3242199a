"""Estimate memory and operations of a step in which a target teaches a draft model or a head, from
configs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxspec.config import ModelConfig
from jaxspec.decoding.inputs import Member
from jaxspec.engine.memory import at_place, bytes_held, prompt_zeros
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.making import abstract_head, head_shardings
from jaxspec.models.families import abstract_params, image_zeros, split_tower, towers_alike
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import abstract_mesh, shardings
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import ConversationBatch, TeacherRows
from jaxspec.training.head_batches import Anchoring, Blocks, HeadBatch
from jaxspec.training.head_loss import make_loss
from jaxspec.training.head_recipe import ALONE
from jaxspec.training.loop.batches import rows_sharding
from jaxspec.training.loop.measured import model_flops
from jaxspec.training.loop.step import Flat, TrainState, set_up
from jaxspec.training.objectives import TEACHER, Distillation, tuning_loss
from jaxspec.typing import Params

BLOCKS = 128
"""Blocks of a row, as in the recipes of heads of 7B targets."""


@dataclass(frozen=True)
class AbstractStep:
    """Describe the step of `fit` with abstract arrays on a mesh."""

    step: Any
    """(state, frozen, batch) -> (state, metrics), to lower and compile."""
    state: TrainState
    frozen: Flat
    """The target's parameters, with the tower that both models share."""
    batch: ConversationBatch | HeadBatch
    flops: float
    """Estimated operations of one step on all devices; see `model_flops`."""

    @property
    def held(self) -> dict[str, int]:
        """Return the bytes of one device during a step, by use. Activations come on top."""
        trained = self.state.params
        parts: dict[str, Any] = {
            "frozen": self.frozen,
            "trained": trained,
            "optimizer": self.state.opt_state,
            "gradient": trained,
            "batch": self.batch,
        }
        return {name: bytes_held(part) for name, part in parts.items()}


def mesh_for(devices: int, batch: int) -> AbstractMesh:
    """Return a mesh: fsdp devices as many as divide the batch, the others on the model axis."""
    fsdp = math.gcd(devices, batch)
    return abstract_mesh(devices // fsdp, fsdp)


def abstract_step(
    target: ModelConfig,
    draft: ModelConfig | HeadConfig,
    mesh: Mesh | AbstractMesh,
    batch: int,
    length: int,
    dtype: Any,
) -> AbstractStep:
    """Return the step over rows of `length` tokens and one image each; nothing is allocated.

    A draft whose tower has the target's shapes shares it, and it does not train. A head learns from
    `BLOCKS` blocks a row.
    """
    teacher, reader = abstract_params(target), LanguageModel(target)
    read = partial(_blank_rows, reader, batch, length)
    if isinstance(draft, HeadConfig):
        head, anchoring = draft.for_target(target), Anchoring(min(BLOCKS, length))
        tree, frozen = abstract_head(head), ["target", *(f"{ALONE}/{part}" for part in head.fixed)]

        def sharding_of(mesh: Any) -> Params:
            placed = head_shardings(head, tree, mesh)
            return {ALONE: placed, "target": shardings(target, teacher, mesh)}

        def blocks() -> HeadBatch:
            anchors = jnp.zeros((batch, anchoring.anchors), jnp.int32)
            spans = jnp.zeros((batch, 1, 2), jnp.int32) if head.reads_spans else None
            return HeadBatch(read(), {ALONE: Blocks(anchors, spans)})

        rows: Any = jax.eval_shape(blocks)
        text, loss = head.text_config, make_loss(reader, {ALONE: (head, anchoring)})
        params, drafted = {ALONE: tree, "target": teacher}, batch * anchoring.anchors * head.gamma
        # Scoring costs two for the target, two for the head, and two for its gradient.
        scoring = 6 * text.scored_tokens * reader.text.hidden_size * drafted
    else:
        student, drafts = abstract_params(draft), LanguageModel(draft)
        frozen, shared = [TEACHER], towers_alike(target, draft)
        if shared:
            teacher = split_tower(teacher)[1]
            frozen += split_tower(student)[0]

        def sharding_of(mesh: Any) -> Params:
            return shardings(draft, student, mesh) | {TEACHER: shardings(target, teacher, mesh)}

        def conversations() -> ConversationBatch:
            rows, taught = _blank_rows(drafts, batch, length), read()
            images = None if shared or not taught.images else taught.images
            return rows.replace(teacher=TeacherRows(taught.rows, images, rows.tokens))

        rows = jax.eval_shape(conversations)
        loss = tuning_loss(drafts, teacher=reader, distillation=Distillation("forward_kl"))
        params, drafted, scoring = {**student, TEACHER: teacher}, batch * length, 0
    config = TrainConfig(steps=1, batch=batch, frozen=tuple(frozen), dtype=dtype, remat=True)
    state, still, step = set_up(config, params, loss, mesh, sharding_of, abstract=True)
    rows = at_place(rows, rows_sharding(mesh))
    flops = model_flops({}, still, rows.tokens.size) + model_flops(state.params, {}, drafted)
    return AbstractStep(step, state, still, rows, flops + scoring)


def _blank_rows(reader: LanguageModel, batch: int, length: int) -> ConversationBatch:
    """Return rows of one image each, as a model reads them."""
    sees = reader.has_vision
    (rows,) = prompt_zeros([Member(reader)], batch, length, sees)
    images = image_zeros(reader.config, batch, 1)
    return ConversationBatch(rows, rows.tokens > 0, images, rows.length.astype(jnp.uint32))

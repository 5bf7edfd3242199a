"""Estimate memory and operations of a step in which a target teaches a draft, from configs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxspec.config import ModelConfig
from jaxspec.engine.memory import at_place, bytes_held
from jaxspec.models.families import abstract_params, split_tower, towers_alike
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import abstract_mesh, shardings
from jaxspec.training.batches import rows_sharding
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.loop.measured import model_flops
from jaxspec.training.loop.step import (
    Flat,
    TrainState,
    in_dtype,
    init_state,
    like_parameters,
    make_optimizer,
    make_step,
    partition,
    placed_on,
)
from jaxspec.training.objectives import TEACHER, Distillation, tuning_loss
from jaxspec.typing import Params


@dataclass(frozen=True)
class AbstractStep:
    """Describe the step of `fit` for logit distillation, with abstract arrays on a mesh."""

    step: Callable[..., Any]
    """(state, frozen, batch) -> (state, metrics)."""
    state: TrainState
    frozen: Flat
    """The target's parameters, with the tower that both models share."""
    batch: ConversationBatch

    @property
    def held(self) -> dict[str, int]:
        """Return the bytes of one device during a step, by use. Activations come on top."""
        trained = self.state.params
        parts = {
            "frozen": self.frozen,
            "trained": trained,
            "optimizer": self.state.opt_state,
            "gradient": trained,
        }
        return {name: bytes_held(part) for name, part in (parts | {"batch": self.batch}).items()}

    @property
    def flops(self) -> float:
        """Return the estimated operations of one step on all devices; see `model_flops`."""
        return model_flops(self.state.params, self.frozen, self.batch.tokens.size)


def mesh_for(devices: int, batch: int) -> AbstractMesh:
    """Return a mesh: fsdp devices as many as divide the batch, the others on the model axis."""
    fsdp = math.gcd(devices, batch)
    return abstract_mesh(devices // fsdp, fsdp)


def abstract_step(
    target: ModelConfig,
    draft: ModelConfig,
    mesh: Mesh | AbstractMesh,
    batch: int,
    length: int,
    dtype: Any,
) -> AbstractStep:
    """Return the step over rows of `length` tokens and one image each; nothing is allocated.

    A draft whose tower has the target's shapes shares it, and it does not train.
    """
    teacher, student = abstract_params(target), abstract_params(draft)
    models = LanguageModel(target), LanguageModel(draft)
    frozen = [TEACHER]
    shared = towers_alike(target, draft)
    if shared:
        teacher = split_tower(target, teacher)[1]
        frozen += split_tower(draft, student)[0]
    config = TrainConfig(steps=1, batch=batch, frozen=tuple(frozen), dtype=dtype, remat=True)
    loss = tuning_loss(models[1], teacher=models[0], distillation=Distillation("forward_kl"))

    def sharding_of(mesh: Any) -> Params:
        return shardings(draft, student, mesh) | {TEACHER: shardings(target, teacher, mesh)}

    params = {**student, TEACHER: teacher}
    trainable, still = partition(params, config.frozen)
    where = placed_on(mesh, params, sharding_of)
    optimizer = make_optimizer(config, trainable)
    state = jax.eval_shape(partial(init_state, optimizer=optimizer), trainable)
    state = at_place(state, like_parameters(state, where, mesh))
    still = jax.eval_shape(partial(in_dtype, dtype=dtype), still)
    still = at_place(still, {path: where[path] for path in still})
    blank = partial(ConversationBatch.zeros, models[1], models[0], batch, length, shared)
    rows = at_place(jax.eval_shape(blank), rows_sharding(mesh))
    return AbstractStep(make_step(loss, optimizer, config), state, still, rows)

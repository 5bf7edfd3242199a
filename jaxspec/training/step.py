"""Training state and one optimiser step, with frozen parameters kept out of gradient and optimiser state."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.typing import Array, Params

LossFn = Callable[[Params, Any], tuple[Array, dict[str, Array]]]


class TrainState(struct.PyTreeNode):
    step: Array
    params: dict[str, Array]
    """The trainable parameters, flat: 'language_model/lm_head/kernel' -> array."""
    opt_state: optax.OptState


def partition(params: Params, frozen: Sequence[str]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Flat (trainable, frozen) parameters; a path is frozen if any of the regexes matches from its start."""
    flat: dict[str, Array] = dict(flatten_dict(params, sep="/"))  # pyright: ignore[reportArgumentType, reportAssignmentType]
    held = {k: v for k, v in flat.items() if any(re.match(pattern, k) for pattern in frozen)}
    return {k: v for k, v in flat.items() if k not in held}, held


def merge(trainable: dict[str, Array], held: dict[str, Array]) -> Params:
    return unflatten_dict({**trainable, **held}, sep="/")


def make_optimizer(
    learning_rate: float, steps: int, warmup: int, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """AdamW with linear warm-up, cosine decay to a tenth, and clipping by global norm; decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, min(warmup, steps // 2), steps, learning_rate / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b2=0.98, weight_decay=weight_decay, mask=_is_matrix),
    )


def _is_matrix(params: dict[str, Array]) -> dict[str, bool]:
    return {k: v.ndim > 1 for k, v in params.items()}


def make_step(loss_fn: LossFn, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A jitted (state, frozen, batch) -> (state, metrics); the state is donated."""

    def step(state: TrainState, held: dict[str, Array], batch: Any) -> tuple[TrainState, dict[str, Array]]:
        def loss(trainable: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            return loss_fn(merge(trainable, held), batch)

        grads, metrics = jax.grad(loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = metrics | {"grad_norm": optax.global_norm(grads)}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(step, donate_argnums=0)


def init_state(params: dict[str, Array], optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

"""AdamW, its schedule, and the path table of what trains and how fast."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.errors import InputError
from jaxspec.training.config import TrainConfig
from jaxspec.typing import Array, Params

Flat = dict[str, Array]
"""Parameters by path: 'language_model/lm_head/kernel' -> array."""


def flatten(params: Params) -> dict[str, Any]:
    """Nested dict -> leaves by path."""
    return dict(flatten_dict(params, sep="/"))  # pyright: ignore[reportArgumentType, reportCallIssue]


def partition(params: Params, frozen: Sequence[str]) -> tuple[Flat, Flat]:
    """(trainable, frozen) parameters by path; a path is frozen if any of the regexes matches from its start."""
    flat = flatten(params)
    _check_patterns("frozen", frozen, flat)
    held = {k: v for k, v in flat.items() if any(re.match(pattern, k) for pattern in frozen)}
    if len(held) == len(flat):
        raise InputError(f"frozen: {', '.join(frozen)} match every parameter; leave something to train")
    return {k: v for k, v in flat.items() if k not in held}, held


def merge(trainable: Mapping[str, Any], held: Mapping[str, Any]) -> Params:
    return unflatten_dict({**trainable, **held}, sep="/")


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Linear warm-up from 0 to the peak rate, then cosine decay over all remaining steps."""
    return optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        min(config.warmup, config.steps // 2),
        config.steps,
        config.learning_rate * config.final_rate,
    )


def same_rates(config: TrainConfig, steps: int, done: int) -> bool:
    """Whether a run of so many steps has had the same rate at each of the first `done` of them."""
    at = np.arange(done)
    return np.array_equal(make_schedule(config)(at), make_schedule(replace(config, steps=steps))(at))


def make_optimizer(config: TrainConfig, trainable: Mapping[str, Any]) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decay on matrices only, then each path's factor of the rate."""
    _check_patterns("rates", [pattern for pattern, _ in config.rates], trainable)
    factors = {path: rate_factor(config.rates, path) for path in trainable}
    parts = [
        optax.clip_by_global_norm(config.clip),
        optax.adamw(make_schedule(config), b2=config.beta2, weight_decay=config.weight_decay, mask=_is_matrix),
    ]
    if config.rates:

        def scale(updates: Any, _: Any) -> Any:
            return {path: factors[path] * update for path, update in updates.items()}

        parts.append(optax.stateless(scale))
    return optax.chain(*parts)


def rate_factor(rates: Sequence[tuple[str, float]], path: str) -> float:
    """The factor of the first regex that matches from the path's start; 1 where none does."""
    return next((factor for pattern, factor in rates if re.match(pattern, path)), 1.0)


def _is_matrix(params: Flat) -> dict[str, bool]:
    return {k: jnp.ndim(v) > 1 for k, v in params.items()}


def _check_patterns(field: str, patterns: Sequence[str], flat: Mapping[str, Any]) -> None:
    idle = [pattern for pattern in patterns if not any(re.match(pattern, path) for path in flat)]
    if idle:
        parts = sorted({path.partition("/")[0] for path in flat})
        raise InputError(f"{field}: {idle[0]!r} matches no parameter; the paths begin with {', '.join(parts)}")

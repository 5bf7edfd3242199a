"""The compiled training step, with what it costs and what it gives; operations are counted on its jaxpr."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh

from jaxspec.decoding.plan import chip_of
from jaxspec.errors import Diverged
from jaxspec.sharding import on_mesh
from jaxspec.training.config import TrainConfig
from jaxspec.training.step import Flat, LossFn, TrainState, gradient, make_schedule, make_step
from jaxspec.typing import Array


class MeasuredStep:
    """(state, batch) -> state; the state is donated, and one step is queued while another runs."""

    def __init__(
        self,
        config: TrainConfig,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        frozen: Flat,
        mesh: Mesh,
        places: Any,
    ) -> None:
        """`places` are the shardings of the state, which it keeps from step to step."""
        self._config, self._loss_fn, self._frozen, self._mesh = config, loss_fn, frozen, mesh
        step = make_step(loss_fn, optimizer, config)
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        self._schedule = make_schedule(config)
        self._metrics: dict[str, Array] = {}
        self._work: dict[Any, dict[str, float]] = {}
        self._restart()

    def __call__(self, state: TrainState, batch: Any, waited: float) -> TrainState:
        """Run one step. `waited` is for how many seconds the batch was waited for; they count if no step ran then."""
        before: dict[str, Any] = self._metrics
        if before:
            self._waited += waited * all(value.is_ready() for value in before.values())
        else:
            self._restart()
        shapes = jax.tree.structure(batch), *(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in self._work:
            with self._untimed():
                self._work[shapes] = self._count(state, batch)
                state = self._run(state, batch)
                jax.block_until_ready(self._metrics)
            return state
        state = self._run(state, batch)
        jax.block_until_ready(before)
        self._steps += 1
        self._done.update(self._work[shapes])
        return state

    def _run(self, state: TrainState, batch: Any) -> TrainState:
        with on_mesh(self._mesh):
            state, self._metrics = self._step(state, self._frozen, batch)
        return state

    def read(self, step: int) -> dict[str, float]:
        """Metrics of the last step, and speeds since the reading before.

        `step_ms`; samples, tokens (positions that are computed, padding included) and operations a second;
        `data_wait`, the share of time in which the devices had nothing to do for lack of a batch; and, of devices
        whose speed is known, `mfu`, model FLOPs utilisation: what the model needs, activations that are computed anew
        not counted, as a share of what the devices can do. The first step of each shape of batches is compiled, and
        is not timed.

        Raises Diverged where the loss or the gradient is not a number, as `pause` does.
        """
        found = self._checked(step)
        found["learning_rate"] = float(np.asarray(self._schedule(step - 1)))
        if self._steps:
            seconds = time.perf_counter() - self._since
            found |= {name: amount / seconds for name, amount in self._done.items()}
            found |= {"step_ms": 1e3 * seconds / self._steps, "data_wait": self._waited / seconds}
            chip = chip_of(self._mesh.devices.flat[0])
            if chip is not None:
                found["mfu"] = found["model_flops_per_second"] / (
                    1e12 * chip.tflops * self._mesh.size
                )
        self._restart()
        return found

    @contextmanager
    def pause(self, step: int) -> Iterator[None]:
        """Time within is not training's: evaluations and checkpoints."""
        self._checked(step)
        with self._untimed():
            yield

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        jax.block_until_ready(self._metrics)  # a step that still runs is timed to its end
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def _checked(self, step: int) -> dict[str, float]:
        found = {name: float(value) for name, value in self._metrics.items()}
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(found.get(name, 0.0))]
        if wrong:
            raise Diverged(
                f"step {step}: {wrong[0]} is {found[wrong[0]]}; try a lower learning rate"
            )
        return found

    def _restart(self) -> None:
        self._steps, self._waited, self._since = 0, 0.0, time.perf_counter()
        self._done: Counter[str] = Counter()

    def _count(self, state: TrainState, batch: Any) -> dict[str, float]:
        """Return what one step on such a batch has: samples, tokens, and operations of the model's gradient."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, self._frozen, batch)
        )
        counts = {
            "samples_per_second": float(self._config.batch),
            "model_flops_per_second": model_flops(self._loss_fn, self._config, *shapes),
        }
        tokens = getattr(batch, "tokens", None)
        return counts if tokens is None else counts | {"tokens_per_second": float(tokens.size)}


def model_flops(
    loss_fn: LossFn, config: TrainConfig, trainable: Flat, frozen: Flat, batch: Any
) -> float:
    """Operations of the gradient on such a batch, none of them twice; all may be mere shapes."""
    once = replace(config, accumulate=1, remat=False)
    return matmul_flops(partial(gradient, loss_fn, once), trainable, frozen, batch)


def matmul_flops(function: Callable[..., Any], *args: Any) -> float:
    """Multiplications and additions of the matrix products and convolutions that the outputs depend on.

    Loops count all their turns; of a branch the dearer side counts. What jit leaves out, as unread layers of a
    tower are, counts nothing.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Jaxpr) -> float:
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    total = 0.0
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
            total += _eqn_flops(eqn)
    return total


def _eqn_flops(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2.0 * eqn.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval, params["dimension_numbers"]
        return 2.0 * eqn.outvars[0].aval.size * kernel.size / kernel.shape[numbers.rhs_spec[0]]
    inner = [_flops(part) for value in params.values() for part in _jaxprs(value)]
    if name == "cond":
        return max(inner, default=0.0)
    return (params["length"] if name == "scan" else 1) * sum(inner)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _jaxprs(part)

"""The compiled training step, with what it costs and what it gives."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxspec.errors import Diverged
from jaxspec.sharding import on_mesh
from jaxspec.training.config import TrainConfig
from jaxspec.training.flops import matmul_flops, peak_flops
from jaxspec.training.optimizer import Flat, make_schedule
from jaxspec.training.step import LossFn, TrainState, gradient, make_step
from jaxspec.typing import Array


class MeasuredStep:
    """(state, batch) -> state; the state is donated, and one step is queued while another runs."""

    def __init__(
        self,
        config: TrainConfig,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        held: Flat,
        mesh: Mesh,
        places: Any,
    ) -> None:
        """`places` are the shardings of the state, which it keeps from step to step."""
        self._config, self._loss_fn, self._held, self._mesh = config, loss_fn, held, mesh
        step = make_step(loss_fn, optimizer, config)
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        self._schedule = make_schedule(config)
        self._metrics: dict[str, Array] = {}
        self._work: dict[Any, dict[str, float]] = {}
        self._restart()

    def __call__(self, state: TrainState, batch: dict[str, Array], waited: float) -> TrainState:
        """One step. `waited` is for how many seconds the batch was waited for; they count if no step ran then."""
        before: dict[str, Any] = self._metrics
        if before:
            self._waited += waited * all(value.is_ready() for value in before.values())
        else:
            self._restart()
        shapes = tuple(sorted((name, value.shape) for name, value in batch.items()))
        if shapes not in self._work:
            with self._untimed():
                self._work[shapes] = self._count(state, batch)
                state = self._run(state, batch)
                jax.block_until_ready(self._metrics)
            return state
        state = self._run(state, batch)
        jax.block_until_ready(before)
        self._steps += 1
        self._done = {name: self._done.get(name, 0.0) + amount for name, amount in self._work[shapes].items()}
        return state

    def _run(self, state: TrainState, batch: dict[str, Array]) -> TrainState:
        with on_mesh(self._mesh):
            state, self._metrics = self._step(state, self._held, batch)
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
            peak = peak_flops(self._mesh.devices.flat[0])
            if peak is not None:
                found["mfu"] = found["model_flops_per_second"] / (peak * self._mesh.size)
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
            raise Diverged(f"step {step}: {wrong[0]} is {found[wrong[0]]}; try a lower learning rate")
        return found

    def _restart(self) -> None:
        self._steps, self._waited, self._since = 0, 0.0, time.perf_counter()
        self._done: dict[str, float] = {}

    def _count(self, state: TrainState, batch: dict[str, Array]) -> dict[str, float]:
        """Return what one step on such a batch has: samples, tokens, and operations of the model's gradient."""
        config = replace(self._config, accumulate=1, remat=False)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.params, self._held, batch))
        flops = matmul_flops(partial(gradient, self._loss_fn, config), *shapes)
        counts = {"samples_per_second": float(config.batch), "model_flops_per_second": flops}
        return counts | ({"tokens_per_second": float(batch["tokens"].size)} if "tokens" in batch else {})

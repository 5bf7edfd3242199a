"""Run the training step, and measure the metrics and speeds of each line of the log."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.engine.plan import chip_of
from jaxspec.errors import Diverged
from jaxspec.sharding import on_mesh
from jaxspec.training.config import TrainConfig
from jaxspec.training.loop.step import Flat, TrainState, make_schedule
from jaxspec.typing import Array


class MeasuredStep:
    """Map (state, batch) to the next state, which takes the donated state's place.

    One step is queued while another runs. The first step of each batch shape is compiled and not
    timed.
    """

    def __init__(self, config: TrainConfig, step: Any, frozen: Flat, mesh: Mesh) -> None:
        """Begin to time steps; `step` is that of `set_up`."""
        self._config, self._step, self._frozen, self._mesh = config, step, frozen, mesh
        self._schedule = make_schedule(config)
        self._metrics: dict[str, Array] = {}
        self._shapes: set[Any] = set()
        self._began = time.perf_counter()
        self._lost = {"compile": 0.0, "data": 0.0, "save": 0.0, "evaluate": 0.0}
        self._restart_clock()

    def __call__(self, state: TrainState, batch: Any, waited: float) -> TrainState:
        """Run one step.

        Args:
          waited: Seconds spent waiting for the batch. They count if no step ran meanwhile.
        """
        before: dict[str, Any] = self._metrics
        if before:
            idle = waited * all(value.is_ready() for value in before.values())
            self._waited += idle
            self._lost["data"] += idle
        else:
            self._restart_clock()
        shapes = jax.tree.structure(batch), *(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in self._shapes:
            self._shapes.add(shapes)
            with self._untimed("compile"):
                state = self._run(state, batch)
                jax.block_until_ready(self._metrics)
            return state
        state = self._run(state, batch)
        jax.block_until_ready(before)
        self._steps += 1
        tokens = getattr(batch, "tokens", None)
        count = self._config.batch if tokens is None else tokens.size
        flops = model_flops(state.params, self._frozen, count)
        self._done["samples_per_second"] += self._config.batch
        self._done["model_flops_per_second"] += flops
        if tokens is not None:
            self._done["tokens_per_second"] += count
        if "tokens" in self._metrics:
            self._learned.append(self._metrics["tokens"])
        return state

    def _run(self, state: TrainState, batch: Any) -> TrainState:
        with on_mesh(self._mesh):
            state, self._metrics = self._step(state, self._frozen, batch)
        return state

    def read(self, step: int) -> dict[str, float]:
        """Return the metrics of the last step, and the speeds since the previous reading.

        step_ms: Milliseconds of a step.
        samples_per_second, tokens_per_second: Rates; tokens count padding too.
        learned_tokens_per_second: Rate of the positions in the mean of the loss.
        data_wait: Share of the time in which the devices waited for a batch.
        model_flops_per_second: Rate of `model_flops`.
        mfu: Model FLOPs utilisation, the share of the devices' peak, where that is known.
        goodput: Share of the time since the run began or went on in which steps ran.
        compile_s, data_s, save_s, evaluate_s: Seconds of that time that they took instead.

        Raises Diverged where the loss or the gradient is not a number.
        """
        metrics = self._finite_metrics(step)
        metrics["learning_rate"] = float(np.asarray(self._schedule(step - 1)))
        if self._steps:
            seconds = time.perf_counter() - self._since
            if self._learned:
                self._done["learned_tokens_per_second"] = sum(map(float, self._learned))
            metrics |= {name: amount / seconds for name, amount in self._done.items()}
            metrics |= {"step_ms": 1e3 * seconds / self._steps, "data_wait": self._waited / seconds}
            if (chip := chip_of(self._mesh.devices.flat[0])) is not None:
                peak = 1e12 * chip.tflops * self._mesh.size
                metrics["mfu"] = metrics["model_flops_per_second"] / peak
            metrics |= {f"{name}_s": lost for name, lost in self._lost.items()}
            run = time.perf_counter() - self._began
            metrics["goodput"] = 1 - sum(self._lost.values()) / run
        self._restart_clock()
        return metrics

    def check(self, step: int, state: TrainState) -> None:
        """Raise Diverged where an array of the state holds a value that is not finite."""
        finite, _ = jax.tree_util.tree_flatten_with_path(_are_finite(state))
        for path, is_finite in finite:
            if not is_finite:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise Diverged(f"step {step}: {name} is not finite; lower the learning rate")

    @contextmanager
    def pause(self, step: int, what: Literal["evaluate", "save"]) -> Iterator[None]:
        """Do not time the block. Raises Diverged as `read` does."""
        self._finite_metrics(step)
        with self._untimed(what):
            yield

    @contextmanager
    def _untimed(self, what: str) -> Iterator[None]:
        jax.block_until_ready(self._metrics)  # a running step is timed to its end
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self._since += spent
        self._lost[what] += spent

    def _finite_metrics(self, step: int) -> dict[str, float]:
        values = {name: float(value) for name, value in self._metrics.items()}
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(values.get(name, 0.0))]
        if wrong:
            raise Diverged(
                f"step {step}: {wrong[0]} is {values[wrong[0]]}; lower the learning rate"
            )
        return values

    def _restart_clock(self) -> None:
        self._steps, self._waited, self._since = 0, 0.0, time.perf_counter()
        self._done: defaultdict[str, float] = defaultdict(float)
        self._learned: list[Array] = []


@jax.jit
def _are_finite(state: TrainState) -> Any:
    """Return for each array whether all its values are finite."""
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), state)


def model_flops(trainable: Mapping[str, Any], frozen: Mapping[str, Any], tokens: int) -> float:
    """Estimate the operations of one step: per token 6 a trained weight, 2 a frozen one (6N)."""
    trained, fixed = (
        sum(math.prod(leaf.shape) for path, leaf in part.items() if "embed_tokens" not in path)
        for part in (trainable, frozen)
    )
    return tokens * (6.0 * trained + 2.0 * fixed)

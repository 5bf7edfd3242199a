"""Train in child processes that a test signals or kills, and drives over pipes.

A child prints a line when it asks for a batch.
"""

from __future__ import annotations

import os
import queue
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cluster import join_cluster
from jaxspec.command import input_errors
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.loop.trainer import fit
from jaxspec.training.losses import mean_of_rows
from jaxspec.training.recipes import Stage
from tests.conftest import ROOT
from tests.tiny import training

LINE = TrainConfig(steps=80, batch=4, warmup=2, save_every=8, log_every=1, mesh=MeshConfig(data=1))
LVLM = replace(training.STAGE, mesh=MeshConfig(data=2, fsdp=2))
HEAD_STAGE = TrainConfig(steps=3, batch=4, warmup=1, log_every=1, mesh=MeshConfig(fsdp=2, model=2))
HEAD = HeadRecipe(
    target="target",
    head={"image_slots": 1},
    stages=(Stage("head", HEAD_STAGE, (("talk", 1.0),)),),
    anchoring=Anchoring(anchors=3),
    buckets=(96,),
    tile_buckets=(2,),
)
GATE = 6
"""The `gate` of `train_lvlm` where none is given."""


class Child:
    """Run a child of these arguments (see `main`); threads read all that it says, so that it never
    waits.
    """

    def __init__(self, *arguments: object) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.child", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,))
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def await_line(self, wanted: Callable[[str], bool]) -> None:
        """Read on to the next line that is wanted."""
        while (line := self._lines.get(timeout=300)) is not None:
            self.said.append(line)
            if wanted(line):
                return
        raise AssertionError("the child ended without such a line:\n" + "".join(self.said[-30:]))

    def open_gate(self) -> None:
        """Close the child's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, code: int) -> str:
        """Wait for the child's end, with this exit code, and return all that it said."""
        for reader in self._readers:
            reader.join()
        while not self._lines.empty():
            self.said.append(self._lines.get() or "")
        assert self.process.wait() == code, "".join(self.said[-30:])
        return "".join(self.said)


def train_line(directory: Path, announce: Callable[[int], None]) -> Any:
    """Train two megabytes of parameters, so that writing them takes a while; its metrics say which
    batch a step saw.
    """

    def batch(step: int) -> dict[str, np.ndarray]:
        announce(step)
        x = np.random.default_rng(step).normal(size=(4, 512)).astype(np.float32)
        return {"x": x, "step": np.full(4, step, np.float32)}

    @mean_of_rows
    def loss(params: Any, batch: Any) -> Any:
        value = jnp.mean((batch["x"] @ params["line"]["kernel"] - 1) ** 2)
        return value, {"loss": value, "batch": batch["step"].mean()}

    return fit(
        LINE, {"line": {"kernel": np.zeros((512, 1024), np.float32)}}, loss, batch, directory
    )


def train_full_disk(directory: Path, announce: Callable[[int], None]) -> Any:
    """Train sixteen megabytes of parameters in many files; the disk fills up while they are
    saved.
    """

    def batch(step: int) -> dict[str, np.ndarray]:
        announce(step)
        if step == 12:  # while step 8 is written
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        return {"x": np.ones((4, 1), np.float32)}

    @mean_of_rows
    def loss(params: Any, batch: Any) -> Any:
        value = batch["x"].mean() * sum(jnp.mean(kernel**2) for kernel in params.values())
        return value, {"loss": value}

    draws = np.random.default_rng(0)
    kernels = {str(i): draws.normal(size=(512, 256)).astype(np.float32) for i in range(32)}
    with input_errors("child"):
        return fit(LINE, kernels, loss, batch, directory)


def train_lvlm(directory: Path, announce: Callable[[int], None], gate: int) -> Any:
    """Train the tiny LVLM over the devices of all processes.

    gate: First batch that waits for a line on standard input.
    """

    def batch(step: int) -> ConversationBatch:
        announce(step)
        if step >= gate:
            sys.stdin.readline()
        return training.batch(step)

    return training.train(LVLM, directory, batch)


def setup(devices: int = 1) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_num_cpu_devices", devices)


def main(model: str, directory: str, cluster: str = "", gate: str = str(GATE)) -> None:
    setup(2 if cluster else 1)
    join_cluster(cluster)
    lvlm = partial(train_lvlm, gate=int(gate))
    train = {"line": train_line, "lvlm": lvlm, "full_disk": train_full_disk}[model]
    train(Path(directory), lambda step: print("batch", step, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])

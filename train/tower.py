"""Pretrain the mini vision tower, instead of CLIP, on the pages' attributes.

    python -m train.tower
    python -m train.recipe mini_target

Each of the 16 image tokens learns to name the contents of its cell (kind, colour, size, word) and
of the page (background, bars), through linear heads that are thrown away. The output is the mini
target before its training: its tokeniser, this tower, and random parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import CLIPImageProcessor

from configs.models.mini import TARGET, TOWER
from jaxspec.checkpoints.huggingface import SaveOptions, save
from jaxspec.cli.options import run_script
from jaxspec.config import LlavaConfig
from jaxspec.models.families import init_params
from jaxspec.models.layers import apply
from jaxspec.models.lvlms.vision import VisionTower
from jaxspec.training.config import TrainConfig
from jaxspec.training.loop.batches import own_rows
from jaxspec.training.loop.trainer import fit
from jaxspec.training.losses import Loss, mean_of_rows
from jaxspec.typing import Array, Params
from picturebook.rendering import LABEL_CLASSES, render, tower_labels
from picturebook.scenes import Chart, Scene, sample_chart, sample_scene
from train.setup import begin, own_output
from train.tokenizer import make_tokenizer

CELL_OF_TOKEN = np.asarray([(y // 2) * 2 + x // 2 for y in range(4) for x in range(4)])
LAYER = -2
PER_CELL = ("kind", "colour", "size", "word")
TRAIN = TrainConfig(steps=2600, batch=128, learning_rate=1e-3, warmup=200, weight_decay=0.02)


class Task(NamedTuple):
    """Hold what a tower learns, and the model that it becomes a part of."""

    params: Params
    """The parameters to train."""
    loss: Loss
    batch: Callable[[int], dict[str, np.ndarray]]
    """Makes the batch of a step."""
    config: LlavaConfig
    tokenizer: Any
    completed: Callable[[Params], Params]
    """Makes the model's parameters from the trained ones."""


def script(
    task_of: Callable[[TrainConfig], Task], steps: TrainConfig, folder: Path
) -> Callable[..., None]:
    """Return the `main` of a script that pretrains a tower; its parameters are the options."""

    def main(
        train: TrainConfig = steps,
        runs: Path = folder,
        out: Path | None = None,
        cluster: str = "",
        debug: bool = False,
    ) -> None:
        """Pretrain the tower. A stopped run goes on.

        Args:
          runs: Folder of checkpoints and metrics.
          out: The model with this tower, a Hugging Face directory; by default RUNS/hf.
          cluster: Place of this process among several hosts: `auto`, or HOST:PORT,COUNT,INDEX.
          debug: Try the command out: two steps of as few samples as the mesh takes, into
            runs/debug.
        """
        runs, out = begin(runs, out, cluster, debug)
        train = train.shortened() if debug else train
        task = task_of(train)
        batches = own_rows(task.batch, train.make_mesh())
        params = fit(train, task.params, task.loss, batches, runs)
        if jax.process_index() == 0:
            size = task.config.vision_config.image_size
            processor = CLIPImageProcessor(
                size={"shortest_edge": size},
                crop_size={"height": size, "width": size},
                image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            )
            parts = {"tokenizer": task.tokenizer, "image_processor": processor}
            parts["write_more"] = own_output(out, runs)
            save(out, task.config, task.completed(params), SaveOptions(overwrite=True), **parts)
            print(f"wrote {out}")

    return main


def pixels(pages: Sequence[Scene | Chart], rng: np.random.Generator) -> np.ndarray:
    """Return pages as a tower reads them, float32 [pages, Y, X, 3] from -1 to 1."""
    images = np.stack([render(page, rng) for page in pages])
    return (images.astype(np.float32) / 255 - 0.5) / 0.5


def batch_of(step: int, train: TrainConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((train.seed, 17, step))
    pages = [
        sample_chart(rng) if rng.random() < 0.15 else sample_scene(rng) for _ in range(train.batch)
    ]
    labels = [tower_labels(page) for page in pages]
    stacked = {name: np.stack([label[name] for label in labels]) for name in LABEL_CLASSES}
    return {"pixels": pixels(pages, rng)} | stacked


@mean_of_rows
def tower_loss(params: Params, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Return mean cross entropy over tokens of all heads, and each head's accuracy."""
    states, _ = apply(VisionTower(TOWER), params["vision_tower"], batch["pixels"])
    tokens = states[LAYER][:, 1:]
    loss, metrics = jnp.zeros(()), {}
    for name, classes in LABEL_CLASSES.items():
        labels = (
            batch[name][:, CELL_OF_TOKEN, None]
            if name in PER_CELL
            else batch[name].reshape(len(tokens), 1, -1)
        )
        labels = jnp.broadcast_to(labels, (*tokens.shape[:2], labels.shape[-1]))
        head = params["heads"][name]
        logits = (tokens @ head["kernel"] + head["bias"]).reshape(*labels.shape, classes)
        loss += optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        visible = labels > 0 if name != "background" else labels >= 0
        metrics[name] = ((logits.argmax(-1) == labels) * visible).sum() / jnp.maximum(
            visible.sum(), 1
        )
    return loss, {"loss": loss, "accuracy": metrics["kind"]} | metrics


def init(train: TrainConfig) -> Params:
    """Return a random tower and its heads."""
    page = jnp.zeros((1, TOWER.image_size, TOWER.image_size, 3))
    keys = jax.random.split(jax.random.key(train.seed), len(LABEL_CLASSES) + 1)
    heads = {}
    for key, (name, classes) in zip(keys[1:], LABEL_CLASSES.items(), strict=True):
        width = classes * (3 if name.startswith("bar") else 1)
        heads[name] = {
            "kernel": jax.random.normal(key, (TOWER.hidden_size, width)) * 0.02,
            "bias": jnp.zeros(width),
        }
    tower = jax.jit(VisionTower(TOWER).init)(keys[0], page)["params"]
    return {"vision_tower": tower, "heads": heads}


def task(train: TrainConfig) -> Task:
    """Return the tower and its heads as a task; the heads are thrown away."""

    def completed(params: Params) -> Params:
        fresh = init_params(TARGET, jax.random.key(train.seed))
        return {**fresh, "vision_tower": params["vision_tower"]}

    batch = partial(batch_of, train=train)
    return Task(init(train), tower_loss, batch, TARGET, make_tokenizer(), completed)


main = script(task, TRAIN, Path("runs/train/tower"))

if __name__ == "__main__":
    run_script(main, __doc__)

"""Pretrains the mini vision tower, in the place of CLIP, on the pages' attributes.

    python -m train.tower
    python -m train.recipe mini_target

Each of the 16 image tokens learns to name the contents of its cell (kind, colour, size, word) and
of the page (background, bars), through linear heads that are thrown away. The output is the mini
target before its training: its tokeniser, this tower, and random parameters.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import CLIPImageProcessor

from configs.models.mini import TARGET, TOWER
from jaxspec.checkpoints import huggingface
from jaxspec.command import run_script
from jaxspec.config import VisionConfig
from jaxspec.models import init_params
from jaxspec.models.layers import apply
from jaxspec.models.vision import VisionTower
from jaxspec.training.config import TrainConfig
from jaxspec.training.trainer import fit
from jaxspec.typing import Array, Params
from picturebook.rendering import LABEL_CLASSES, render, tower_labels
from picturebook.scenes import sample_chart, sample_scene
from train.setup import begin, own_output
from train.tokenizer import make_tokenizer

CELL_OF_TOKEN = np.asarray([(y // 2) * 2 + x // 2 for y in range(4) for x in range(4)])
LAYER = -2
PER_CELL = ("kind", "colour", "size", "word")
TRAIN = TrainConfig(steps=2600, batch=128, learning_rate=1e-3, warmup=200, weight_decay=0.02)


def batch_of(step: int, train: TrainConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((train.seed, 17, step))
    pages = [
        sample_chart(rng) if rng.random() < 0.15 else sample_scene(rng) for _ in range(train.batch)
    ]
    labels = [tower_labels(page) for page in pages]
    images = np.stack([render(page, rng) for page in pages])
    return {"pixels": (images.astype(np.float32) / 255 - 0.5) / 0.5} | {
        name: np.stack([label[name] for label in labels]) for name in LABEL_CLASSES
    }


def loss_fn(params: Params, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
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
        shown = labels > 0 if name != "background" else labels >= 0
        metrics[name] = ((logits.argmax(-1) == labels) * shown).sum() / jnp.maximum(shown.sum(), 1)
    return loss, {"loss": loss, "accuracy": metrics["kind"]} | metrics


def init(train: TrainConfig) -> Params:
    """Return a random tower and its heads."""
    pixels = jnp.zeros((1, TOWER.image_size, TOWER.image_size, 3))
    keys = jax.random.split(jax.random.key(train.seed), len(LABEL_CLASSES) + 1)
    heads = {}
    for key, (name, classes) in zip(keys[1:], LABEL_CLASSES.items(), strict=True):
        width = classes * (3 if name.startswith("bar") else 1)
        heads[name] = {
            "kernel": jax.random.normal(key, (TOWER.hidden_size, width)) * 0.02,
            "bias": jnp.zeros(width),
        }
    tower = jax.jit(VisionTower(TOWER).init)(keys[0], pixels)["params"]
    return {"vision_tower": tower, "heads": heads}


def image_processor(tower: VisionConfig = TOWER) -> CLIPImageProcessor:
    size = tower.image_size
    return CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def main(
    train: TrainConfig = TRAIN,
    runs: Path = Path("runs/train/tower"),
    out: Path | None = None,
    cluster: str = "",
    debug: bool = False,
) -> None:
    """Pretrain the tower. A stopped run goes on.

    Args:
      runs: Folder of checkpoints and metrics.
      out: The model with this tower, a Hugging Face directory; by default RUNS/hf.
      cluster: Place of this process among several hosts: `auto`, or HOST:PORT,COUNT,INDEX.
      debug: Try the command out: two steps of as few samples as the mesh takes, into runs/debug.
    """
    runs, out = begin(runs, out, cluster, debug)
    train = train.shortened() if debug else train
    tower = fit(train, init(train), loss_fn, lambda step: batch_of(step, train), runs)[
        "vision_tower"
    ]
    if jax.process_index() == 0:
        params = {**init_params(TARGET, jax.random.key(train.seed)), "vision_tower": tower}
        huggingface.save(
            out,
            TARGET,
            params,
            huggingface.SaveOptions(overwrite=True),
            tokenizer=make_tokenizer(),
            image_processor=image_processor(),
            write_more=own_output(out, runs),
        )
        print(f"wrote {out}")


if __name__ == "__main__":
    run_script(main, __doc__)

"""Pretrain the eyes of SmolLM2: a vision tower and a projector, on picture-book pages.

    python -m train.eyes
    python -m train.recipe smollm2_eyes

Each of the 144 image tokens learns to be one token of the page's text (`picturebook/lines.py`), in
the language model's own embeddings, so that an image reads as text from the first step of the
recipe on. The output is a LLaVA before its tuning: SmolLM2, this tower and this projector.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs.models.eyes import TOWER
from jaxspec.cli.options import run_script
from jaxspec.config import LlavaConfig, RotaryConfig
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import init_params
from jaxspec.models.layers import apply
from jaxspec.models.lvlms.llava import Llava
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.training.config import TrainConfig
from jaxspec.training.losses import Loss, mean_of_rows
from jaxspec.typing import Array, Params
from jaxspec_demo.models import with_image_token
from picturebook.lines import LINES, page_lines
from picturebook.scenes import Chart, Scene, below, sample_chart, sample_scene
from train.tower import Task, pixels, script

TARGET = "smollm2-135m"
SHARPNESS = 8.0
"""Distances to embeddings, in units of their mean norm, times this are log-probabilities."""
TRAIN = TrainConfig(steps=1200, batch=32, learning_rate=1.5e-3, warmup=100, weight_decay=0.02)


def full_page(rng: np.random.Generator) -> Scene | Chart:
    """Return a page that is fuller than the dialogues' pages: two thirds have four things."""
    if rng.random() < 0.1:
        return sample_chart(rng)
    count = 4 if rng.random() < 0.6 else None
    return sample_scene(rng, count, signs=below(rng, 3))


class Pages:
    """Make batches of pages, with the token that each image token learns to be.

    Args:
      tokenizer: The language model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        @cache
        def tokens(phrase: str, width: int) -> list[int]:
            ids = tokenizer.encode(f" {phrase}", add_special_tokens=False)
            assert len(ids) <= width, (
                f"{phrase!r}: {len(ids)} tokens, and there is room for {width}"
            )
            return ids + tokenizer.encode(",", add_special_tokens=False) * (width - len(ids))

        self.tokens = tokens

    def labels(self, page: Scene | Chart) -> np.ndarray:
        """Return the token of each image token of a page, [144]."""
        lines = page_lines(page)
        return np.asarray(
            [i for line in lines for p in line for i in self.tokens(p, LINES // len(line))]
        )

    def batch(self, step: int, train: TrainConfig) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((train.seed, 23, step))
        pages = [full_page(rng) for _ in range(train.batch)]
        labels = np.stack([self.labels(page) for page in pages])
        return {"pixels": pixels(pages, rng), "labels": labels}


def loss_of(config: LlavaConfig, embeddings: np.ndarray, vocabulary: np.ndarray) -> Loss:
    """Return the loss of image tokens: the nearest embedding, and the distance to the right one.

    Args:
      vocabulary: Ids of all tokens of the pages' texts.
    """
    table = jnp.asarray(embeddings[vocabulary], jnp.float32)
    unit = jnp.mean((table**2).sum(-1))
    index = np.full(len(embeddings), -1, np.int32)
    index[vocabulary] = np.arange(len(vocabulary))

    @mean_of_rows
    def loss(params: Params, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Return the loss of a batch, and metrics."""
        model = Llava(config)
        features = apply(model, params, batch["pixels"][:, None], method="encode")
        tokens = apply(model, params, features, method="project")
        labels = jnp.asarray(index)[batch["labels"]]
        distances = (tokens**2).sum(-1, keepdims=True) - 2 * tokens @ table.T + (table**2).sum(-1)
        distances = distances / unit
        logits = -SHARPNESS * distances
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        off = jnp.take_along_axis(distances, labels[..., None], axis=-1).mean()
        right = distances.argmin(-1) == labels
        return entropy + off, {
            "loss": entropy + off,
            "distance": off,
            "accuracy": right.mean(),
            "pages": right.all(-1).mean(),
        }

    return loss


def positions(side: int, width: int, scale: float = 0.1) -> np.ndarray:
    """Return sines and cosines of each patch's row and column, [side * side, width]."""
    waves = np.arange(width // 4) / (width // 4)
    angles = np.arange(side)[:, None] * np.pi / side**waves
    codes = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    grid = [np.concatenate([codes[y], codes[x]]) for y in range(side) for x in range(side)]
    return np.asarray(grid, np.float32) * scale


def init(config: LlavaConfig, train: TrainConfig) -> Params:
    """Return a random tower, whose positions are sines and cosines, and a random projector."""
    small = replace(
        config, text_config=replace(config.text_config, num_hidden_layers=1, vocab_size=8)
    )
    params = init_params(small, jax.random.key(train.seed))
    params = {
        "vision_tower": jax.tree.map_with_path(_widened, params["vision_tower"]),
        "multi_modal_projector": params["multi_modal_projector"],
    }
    table = params["vision_tower"]["vision_model"]["embeddings"]["position_embedding"]
    side, width = TOWER.side, TOWER.hidden_size
    table["embedding"] = np.concatenate([np.zeros((1, width), np.float32), positions(side, width)])
    return params


def _widened(path: Any, leaf: Array) -> Array:
    """Scale a matrix so that outputs vary as much as inputs; big models' 0.02 learns slowly."""
    if path[-1].key == "kernel":  # of the patches, [height, width, in, out]
        inputs = math.prod(leaf.shape[:-1])
    elif path[-1].key == "weight" and leaf.ndim == 2:
        inputs = leaf.shape[1]
    else:
        return leaf
    return leaf / 0.02 / math.sqrt(inputs)


def task(train: TrainConfig) -> Task:
    """Return SmolLM2's tower and projector as a task."""
    language = LoadedModel.load(TARGET)
    assert isinstance(language.config, RotaryConfig)
    tokenizer = with_image_token(language.tokenizer)
    index = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    config = LlavaConfig(language.config, TOWER, image_token_index=index, vision_feature_layer=-1)
    pages = Pages(language.tokenizer)
    rng = np.random.default_rng(0)
    vocabulary = np.unique(np.concatenate([pages.labels(full_page(rng)) for _ in range(20_000)]))
    table = np.asarray(language.params["model"]["embed_tokens"]["embedding"])
    return Task(
        init(config, train),
        loss_of(config, table, vocabulary),
        lambda step: pages.batch(step, train),
        config,
        tokenizer,
        lambda params: {**params, "language_model": language.params},
    )


main = script(task, TRAIN, Path("runs/train/eyes_tower"))

if __name__ == "__main__":
    run_script(main, __doc__)

"""Make a tiny LVLM that divides over eight devices, and batches that are a function of the step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config import LlamaConfig, LlavaConfig, VisionConfig
from jaxspec.heads.config import HeadConfig
from jaxspec.models.inputs import TEXT, PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import shardings
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import ConversationBatch, slots_before
from jaxspec.training.head_recipe import ALONE, HeadRecipe, train_heads
from jaxspec.training.loop.batches import own_rows
from jaxspec.training.loop.trainer import fit
from jaxspec.training.objectives import tuning_loss
from jaxspec.training.recipes import DataSets, Run
from jaxspec.typing import Params
from tests.tiny.models import random_params

BATCH, WIDTH, IMAGE = 16, 12, 5

CONFIG = LlavaConfig(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        max_position_embeddings=32,
    ),
    VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    ),
    image_token_index=IMAGE,
)

STAGE = TrainConfig(
    steps=20,
    batch=BATCH,
    learning_rate=3e-3,
    warmup=4,
    log_every=1,
    save_every=10,
    frozen=("vision_tower",),
)


def batch(step: int) -> ConversationBatch:
    """Return rows of one image and counting tokens, of different lengths."""
    rng = np.random.default_rng((7, step))
    tokens = (rng.integers(8, 40, (BATCH, 1)) + np.arange(WIDTH)).astype(np.int32)
    tokens[:, 1:5] = IMAGE
    length = rng.integers(7, WIDTH + 1, BATCH).astype(np.int32)
    mask = np.arange(WIDTH) < length[:, None]
    mask[:, :5] = False
    sources = np.where(tokens == IMAGE, np.arange(WIDTH) - 1, TEXT)[..., None].astype(np.int32)
    pixels = rng.normal(size=(BATCH, 1, 8, 8, 3)).astype(np.float32)
    numbers = np.arange(BATCH, dtype=np.uint32)
    rows, answers = PromptRows(tokens, length, sources), slots_before(mask)
    return ConversationBatch(rows, mask, {"pixels": pixels}, numbers, answers=answers)


def params() -> Params:
    return random_params(CONFIG, scale=0.1)


def train(stage: TrainConfig, directory: Path, batches: Any = batch) -> Params:
    return fit(
        stage,
        params(),
        tuning_loss(LanguageModel(CONFIG)),
        own_rows(batches, stage.make_mesh()),
        directory,
        sharding_of=partial(shardings, CONFIG, params()),
    )


def train_head(
    recipe: HeadRecipe, directory: Path, data: DataSets | None = None, run: Run = fit
) -> tuple[HeadConfig, Params]:
    """Return the configuration and the parameters of one recipe's head."""
    return train_heads({ALONE: recipe}, directory, data, run)[ALONE]


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> np.ndarray:
    """Return the losses of steps 1, 2, ...; each step was logged once."""
    lines = metrics(directory)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return np.asarray([line["loss"] for line in lines])

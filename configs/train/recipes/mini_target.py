"""The mini target, from scratch before the frozen tower that `python -m train.tower` pretrains.

The shipped one saw the same mixture of dialogues in another order.
"""

from __future__ import annotations

from configs.models.mini import TARGET
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

TOWER = "runs/train/tower/hf"

TUNE = TrainConfig(
    steps=1800,
    batch=32,
    learning_rate=1.2e-3,
    warmup=100,
    weight_decay=0.02,
    frozen=("vision_tower",),
)

config = Recipe(
    target=TOWER,
    start=TARGET,
    stages=(Stage("tune", TUNE, (("picturebook", 1.0),)),),
    buckets=(96, 128, 160, 288),
    tile_buckets=(2, 5),
)

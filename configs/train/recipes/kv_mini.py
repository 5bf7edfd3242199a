"""AASD's KV head in form, without hidden states, for the mini target, on picturebook's own answers.

The shipped head is this one with `--head.feature last_hidden`.
"""

from __future__ import annotations

from configs.train.recipes.mini_draft import TARGET
from configs.train.recipes.mini_target import config as mini_target
from jaxspec.training.config import TrainConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.recipes import Stage

TRAIN = TrainConfig(
    steps=2000, batch=16, learning_rate=2e-3, warmup=30, weight_decay=0.02, save_every=50
)

config = HeadRecipe(
    target=TARGET,
    head={"image_slots": 4, "slot_bias": True, "gamma": 5},
    stages=(Stage("kv_head", TRAIN, (("picturebook", 1.0),)),),
    anchoring=Anchoring(anchors=32),
    buckets=mini_target.buckets,
    tile_buckets=mini_target.tile_buckets,
)

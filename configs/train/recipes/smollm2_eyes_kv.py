"""A KV head of `smollm2-eyes`, on its own answers to questions about drawn pages.

The commands before it are in docs/data.md.
"""

from __future__ import annotations

from configs.train.recipes.smollm2_eyes import config as smollm2_eyes
from configs.train.recipes.smollm2_kv import READINGS
from jaxspec.training.config import TrainConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.recipes import Stage

ANSWERS = (("eyes_pages_t0", 1.0),)
TRAIN = TrainConfig(
    steps=1200,
    batch=8,
    learning_rate=1.5e-3,
    warmup=50,
    weight_decay=0.02,
    save_every=25,
    log_every=10,
)

config = HeadRecipe(
    target="smollm2-eyes",
    head={"image_slots": 16, "slot_bias": True, "feature": "last_hidden", "gamma": 4},
    stages=(Stage("kv_head", TRAIN, ANSWERS),),
    anchoring=Anchoring(anchors=32, decay=0.9),
    buckets=smollm2_eyes.buckets,
    tile_buckets=smollm2_eyes.tile_buckets,
    draft_vocabulary=2048,
    keep_readings=READINGS,
)

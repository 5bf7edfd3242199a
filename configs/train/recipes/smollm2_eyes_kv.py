"""A KV head of `smollm2-eyes` that drafts in one pass, on the drawn pages that its target learned from."""

from __future__ import annotations

from jaxspec.training.config import TrainConfig
from jaxspec.training.kv_head import Anchoring, HeadRecipe
from jaxspec.training.recipes import Stage

from configs.train.recipes.smollm2_eyes import DATA
from configs.train.recipes.smollm2_eyes import config as smollm2_eyes

TRAIN = TrainConfig(steps=400, batch=4, learning_rate=1.5e-3, warmup=20, weight_decay=0.02, save_every=20, log_every=10)

config = HeadRecipe(
    target="smollm2-eyes",
    head={
        "image_slots": 16,
        "slot_bias": True,
        "feature": "last_hidden",
        "gamma": 7,
        "parallel": True,
        "markov": 64,
    },
    stages=(Stage("kv_head", TRAIN, DATA),),
    anchoring=Anchoring(anchors=64, decay=0.9),
    buckets=smollm2_eyes.buckets,
    tile_buckets=smollm2_eyes.tile_buckets,
    draft_vocabulary=2048,
)

"""A KV head of LLaVA-1.5-7B that reads last hidden states, for draft lengths up to 7.

The first stage is only text (ShareGPT), which trains all except the KV projector; the second has
images (MSD's and ViSpec's order).
"""

from __future__ import annotations

from dataclasses import replace

from jaxspec.training.config import TrainConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.recipes import Stage

TEXT = TrainConfig(
    steps=4000,
    batch=64,
    learning_rate=5e-5,
    warmup=200,
    weight_decay=0.0,
    packing=True,
    dtype="bfloat16",
)
IMAGES = replace(TEXT, steps=8000)

config = HeadRecipe(
    target="llava-hf/llava-1.5-7b-hf",
    head={"image_slots": 64, "slot_bias": True, "feature": "last_hidden", "gamma": 7},
    stages=(
        Stage("text", TEXT, (("sharegpt", 1.0),)),
        Stage("images", IMAGES, (("llava_v1_5_mix665k", 1.0),)),
    ),
    anchoring=Anchoring(anchors=128),
    buckets=(1024, 1536, 2048),
    tile_buckets=(0, 1, 2),
)

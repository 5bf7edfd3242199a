"""A KV head of SmolLM2-135M that reads last hidden states, on the target's own answers and on those
that came with the questions.

The commands before it are in docs/training.md.
"""

from __future__ import annotations

from jaxspec.training.config import TrainConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.recipes import Stage

TARGET = "smollm2-135m"
ANSWERS = (("smollm2_t0", 1.0), ("prompts", 1.0))
"""Half and half: the target writes few answers an hour on a CPU, and all are learned by its own
distributions.
"""
READINGS = "runs/readings"
WORDS, BUCKETS = 8192, (128, 192, 256, 384, 512)
TRAIN = TrainConfig(
    steps=4000, batch=4, learning_rate=1.5e-3, warmup=50, weight_decay=0.02, save_every=50
)
"""The target reads a row once, and few blocks are taken of it at a time: rows come again with other
blocks.
"""

config = HeadRecipe(
    target=TARGET,
    head={"feature": "last_hidden", "gamma": 3},
    stages=(Stage("kv_head", TRAIN, ANSWERS),),
    anchoring=Anchoring(anchors=64),
    buckets=BUCKETS,
    draft_vocabulary=WORDS,
    keep_readings=READINGS,
)

"""A KV head of SmolLM2-135M that reads last hidden states, on what the target answers: greedy and at temperature 1.

The commands before it are in docs/training.md.
"""

from __future__ import annotations

from jaxspec.training.config import TrainConfig
from jaxspec.training.kv_head import Anchoring, HeadRecipe
from jaxspec.training.recipes import Stage

TARGET = "smollm2-135m"
ANSWERS = (("smollm2_t0", 3.0), ("smollm2_t1", 1.0))
WORDS, BUCKETS = 8192, (128, 192, 256, 384, 512)
TRAIN = TrainConfig(steps=1500, batch=8, learning_rate=5e-4, warmup=50, weight_decay=0.02, save_every=50)
"""Most of a step is the target's own pass over its rows."""

config = HeadRecipe(
    target=TARGET,
    head={"feature": "last_hidden", "gamma": 5},
    stages=(Stage("kv_head", TRAIN, ANSWERS),),
    anchoring=Anchoring(anchors=32),
    buckets=BUCKETS,
    draft_vocabulary=WORDS,
)

"""A KV head of Qwen2.5-Coder that reads last hidden states, on the target's own answers.

    python -m train.prompts --data path/to/data
    python -m train.prepare text --data runs/data/prompts/train.jsonl --name prompts
    python -m train.distill_data --target Qwen/Qwen2.5-Coder-0.5B-Instruct \\
        --data runs/data/prompts --name coder_t0 --batch-size 64 --max-new-tokens 320 --keep-cut
    python -m train.recipe coder_kv

`--target Qwen/Qwen2.5-Coder-1.5B-Instruct` and its answers train heads of the larger one.
"""

from __future__ import annotations

from jaxspec.training.config import TrainConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.recipes import Stage

TRAIN = TrainConfig(
    steps=1000,
    batch=16,
    learning_rate=2e-4,  # at 1e-3 an EAGLE-1 head of the 1.5B diverged at step 192
    warmup=50,
    weight_decay=0.02,
    dtype="bfloat16",
    save_every=500,
)

config = HeadRecipe(
    target="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    head={"feature": "last_hidden", "gamma": 5},
    stages=(Stage("tune", TRAIN, (("coder_t0", 1.0),)),),
    anchoring=Anchoring(anchors=64),
    buckets=(128, 256, 384, 512),
    draft_vocabulary=8192,
)

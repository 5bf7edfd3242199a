"""A text draft of SmolLM2-135M of 6M parameters, 4.7M of them its embedding, on the same answers as
`smollm2_kv`.
"""

from __future__ import annotations

from configs.train.recipes.smollm2_kv import ANSWERS, BUCKETS, TARGET, WORDS
from jaxspec.config import LlamaConfig
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

DRAFT = LlamaConfig(
    vocab_size=49152,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=3,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
TRAIN = TrainConfig(steps=6000, batch=16, learning_rate=3e-3, warmup=200, weight_decay=0.02)

config = Recipe(
    target=TARGET,
    start=DRAFT,
    stages=(Stage("tune", TRAIN, ANSWERS),),
    buckets=BUCKETS,
    view="T",
    draft_vocabulary=WORDS,
)

"""AASD's FT-LLaMA (Table 1): a text draft of 112M from scratch, on RedPajama's sample, then on
OIG's chip2 and OASST1.

The paper says only the sets and the size. Depth, width and heads are those of the 115M draft of
Goel et al. (2024), the authors that it follows; the MLPs are made to fit 112M. The first stage has
Llama's rates but for a higher peak, as small models bear, and sees the sample about once; the
second is Vicuna's, three times over, at a higher rate too.
"""

from __future__ import annotations

from jaxspec.config import LlamaConfig
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

DRAFT = LlamaConfig(
    vocab_size=32064,
    hidden_size=1024,
    intermediate_size=2432,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
PRETRAIN = TrainConfig(
    steps=3500,
    batch=256,
    learning_rate=6e-4,
    warmup=200,
    beta2=0.95,
    weight_decay=0.1,
    dtype="bfloat16",
)
TUNE = TrainConfig(
    steps=5200,
    batch=128,
    learning_rate=1e-4,
    warmup=156,
    final_rate=0.0,
    beta2=0.999,
    weight_decay=0.0,
    dtype="bfloat16",
)

config = Recipe(
    target="llava-hf/llava-1.5-7b-hf",
    start=DRAFT,
    stages=(
        Stage("pretrain", PRETRAIN, (("redpajama_1t_sample", 1.0),), plain=True),
        Stage("tune", TUNE, (("oig_small_chip2", 20.0), ("oasst1", 1.0))),
    ),
    buckets=(128, 256, 512, 1024, 2048),
    view="T",
)

"""IbED's and TABED's 68M draft: LLaVA-1.5's two stages on Llama-68M, with the target's tower (TABED, Table 15).

First the projector alone, on captions; then projector and decoder, on visual instructions; the tower never, so that
target and draft share its features. One epoch each, of 558,128 and 665,298 samples.
"""

from __future__ import annotations

from jaxspec.training.config import TrainConfig
from jaxspec.training.recipes import Recipe, Stage

# AdamW as transformers' Trainer has it, with a cosine to zero after 3 % of warm-up.
ALIGN = TrainConfig(
    steps=2181,
    batch=256,
    learning_rate=1e-3,
    warmup=66,
    final_rate=0.0,
    beta2=0.999,
    weight_decay=0.0,
    frozen=("vision_tower", "language_model"),
    dtype="bfloat16",
)
TUNE = TrainConfig(
    steps=5198,
    batch=128,
    learning_rate=2e-5,
    warmup=156,
    final_rate=0.0,
    beta2=0.999,
    weight_decay=0.0,
    frozen=("vision_tower",),
    dtype="bfloat16",
)

config = Recipe(
    target="llava-hf/llava-1.5-7b-hf",
    start="JackFram/llama-68m",
    stages=(
        Stage("align", ALIGN, (("blip_laion_cc_sbu_558k", 1.0),), plain=True),
        Stage("tune", TUNE, (("llava_v1_5_mix665k", 1.0),)),
    ),
    buckets=(640, 768, 1024, 1536, 2048),
)

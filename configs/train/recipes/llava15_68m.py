"""IbED's and TABED's 68M draft: LLaVA-1.5's two stages on Llama-68M, with the target's tower
(TABED, Table 15).

The first stage trains the projector, on captions. The second trains projector and decoder, on
visual instructions. The tower never trains, so target and draft share its features. Each stage is
one epoch, of 558,128 and 665,298 samples.

haotian-liu/LLaVA, whose code the paper names, writes Vicuna's system prompt before each
conversation of the second stage. Answers by `train.distill_data` and all tables here ask without
it, as the chat template of llava-hf does: give `--system ''` for a draft that learns from these
answers.
"""

from __future__ import annotations

from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)

# AdamW as transformers' Trainer has it. Warm-up is 0.03 of the steps, rounded up; then a cosine to
# zero.
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
    system=VICUNA,
)

"""SmolLM2-135M with eyes: a LLaVA whose language model keeps its weights but for low-rank updates
of attention.

Run `python -m train.eyes` first: its tower stays, and its projector trains on.
"""

from __future__ import annotations

from jaxspec.models.lora import Lora
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

EYES = "runs/train/eyes_tower/hf"

TUNE = TrainConfig(
    steps=500,
    batch=2,
    accumulate=2,
    learning_rate=8e-4,
    warmup=20,
    weight_decay=0.0,
    frozen=("vision_tower", "language_model"),
    rates=(("multi_modal_projector", 0.2),),
    save_every=10,
    log_every=5,
)
DATA = (
    ("picturebook:interview", 0.45),
    ("picturebook:describe,read,exist,reason,chart", 0.35),
    ("picturebook:edit,brush,spot", 0.1),
    ("picturebook:facts,sums", 0.1),
)

config = Recipe(
    target=EYES,
    start=EYES,
    stages=(Stage("tune", TUNE, DATA),),
    lora=Lora(rank=16, alpha=32, base="smollm2-135m"),
    buckets=(128, 256, 400, 448),
    tile_buckets=(0, 1, 2),
)

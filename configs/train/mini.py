"""How the shipped mini models were trained: tower, then target, draft and captioner with the tower frozen."""

from __future__ import annotations

from dataclasses import replace

from jaxspec.training.config import MeshConfig, TrainConfig

TOWER = TrainConfig(steps=2600, batch=128, learning_rate=1e-3, warmup=200, weight_decay=0.02)
TARGET = TrainConfig(
    steps=1800, batch=32, learning_rate=1.2e-3, warmup=100, weight_decay=0.02, frozen=("vision_tower",)
)
DRAFT = TrainConfig(steps=500, batch=64, learning_rate=3e-3, warmup=100, weight_decay=0.02, frozen=("vision_tower",))
CAPTIONER = replace(DRAFT, steps=600)

TOWER_DEBUG, TARGET_DEBUG, DRAFT_DEBUG, CAPTIONER_DEBUG = (
    replace(stage, steps=2, batch=2, save_every=1, log_every=1, mesh=MeshConfig(data=1))
    for stage in (TOWER, TARGET, DRAFT, CAPTIONER)
)

TARGET_BUCKETS = (96, 128, 160, 288)
DRAFT_BUCKETS = (96,)
CAPTIONER_BUCKETS = (80,)
DRAFT_KINDS = (
    "attributes", "describe", "read", "exist", "reason", "chart", "edit", "brush", "spot", "facts", "sums",
)  # fmt: skip
"""The draft never sees five images: saga and album are out of its distribution, as PororoSV and VIST are."""

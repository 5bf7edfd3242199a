"""How KV heads are trained: the shipped mini head's preset, and the one that its ablations are compared by."""

from __future__ import annotations

from dataclasses import replace

from configs.train.mini import DRAFT_BUCKETS, DRAFT_KINDS, TARGET_BUCKETS
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.kv_head import Anchoring, HeadPreset

MINI = HeadPreset(
    target="jaxspec/assets/mini/target",
    head={"image_slots": 4, "slot_bias": True, "gamma": 5},
    train=TrainConfig(
        steps=300, batch=16, learning_rate=2e-3, warmup=30, weight_decay=0.02, frozen=("target",), save_every=50
    ),
    anchoring=Anchoring(anchors=32),
    buckets=TARGET_BUCKETS,
    images=(2, 5),
)
ABLATION = replace(MINI, train=replace(MINI.train, steps=80), buckets=DRAFT_BUCKETS, images=(2,), kinds=DRAFT_KINDS)
"""Short dialogues and few steps: what a variant of the head is worth beside the others, not how far it can go."""

MINI_DEBUG = replace(
    ABLATION,
    train=replace(MINI.train, steps=2, batch=2, save_every=1, log_every=1, mesh=MeshConfig(data=1)),
    anchoring=Anchoring(anchors=2),
)
PRESETS = {"mini": MINI, "ablation": ABLATION, "debug": MINI_DEBUG}

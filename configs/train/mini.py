"""How the mini models are trained: tower, then target, draft and captioner with the tower frozen.

The shipped ones saw the same mixtures of dialogues in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Pages:
    """What of picturebook a model is trained on, and the shapes that its batches have."""

    buckets: tuple[int, ...]
    """Buckets of row lengths; longer rows are cut at the last."""
    images: tuple[int, ...]
    """Buckets of the most images of one row."""
    kinds: tuple[str, ...] | None = None
    """Names of the mixture to keep; None keeps all."""


TARGET_PAGES = Pages((96, 128, 160, 288), (2, 5))
DRAFT_KINDS = (
    "attributes", "describe", "read", "exist", "reason", "chart", "edit", "brush", "spot", "facts", "sums",
)  # fmt: skip
"""The draft never sees five images: saga and album are out of its distribution, as PororoSV and VIST are."""
DRAFT_PAGES = Pages((96,), (2,), DRAFT_KINDS)
CAPTIONER_PAGES = Pages((80,), (1,), ("caption",))

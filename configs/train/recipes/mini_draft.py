"""The mini draft and its data; the mini models' other drafts differ from it in a line
or two.
"""

from __future__ import annotations

from configs.models.mini import DRAFT
from configs.train.recipes.mini_target import TOWER
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage
from jaxspec_demo import ASSETS

TARGET = str(ASSETS / "mini" / "target")

KINDS = (
    *("attributes", "describe", "read", "exist", "reason", "chart", "edit", "brush", "spot"),
    *("facts", "sums"),
)
"""The draft never sees five images: saga and album are out of its distribution, as PororoSV and
VIST are.
"""
PAGES = ((f"picturebook:{','.join(KINDS)}", 1.0),)
TUNE = TrainConfig(
    steps=500, batch=64, learning_rate=3e-3, warmup=100, weight_decay=0.02, frozen=("vision_tower",)
)

config = Recipe(
    target=TOWER,
    start=DRAFT,
    stages=(Stage("tune", TUNE, PAGES),),
    buckets=(96,),
    tile_buckets=(2,),
)

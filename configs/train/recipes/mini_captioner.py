"""The mini captioner, from scratch before the shipped draft's tower."""

from __future__ import annotations

from dataclasses import replace

from configs.models.mini import CAPTIONER
from configs.train.recipes.mini_draft import TUNE
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage
from jaxspec_demo import ASSETS

config = Recipe(
    target=str(ASSETS / "mini" / "draft"),
    start=CAPTIONER,
    stages=(Stage("tune", replace(TUNE, steps=600), (("picturebook:caption", 1.0),)),),
    buckets=(80,),
    tile_buckets=(1,),
)

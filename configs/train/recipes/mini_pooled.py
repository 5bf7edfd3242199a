"""The mini draft, trained on with its 16 image tokens pooled to 4; `--view P1` pools to one."""

from __future__ import annotations

from dataclasses import replace

from configs.train import mini
from configs.train.recipes.mini_text import ASSETS, PAGES, TARGET
from jaxspec.training.recipes import Recipe, Stage

config = Recipe(
    target=TARGET,
    start=str(ASSETS / "draft"),
    stages=(Stage("tune", replace(mini.DRAFT, steps=200, learning_rate=1e-3), PAGES),),
    buckets=mini.DRAFT_PAGES.buckets,
    view="P4",
    units=(2,),
)

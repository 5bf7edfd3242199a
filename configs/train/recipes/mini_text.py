"""A text-only draft of the mini target, of the mini draft's size: pages are newlines to it."""

from __future__ import annotations

from dataclasses import replace

from configs.models.mini import DRAFT
from configs.train.recipes.mini_draft import PAGES, TARGET, TUNE
from jaxspec.training.draft_recipe import Recipe
from jaxspec.training.recipes import Stage

config = Recipe(
    target=TARGET,
    start=DRAFT.text_config,
    stages=(Stage("tune", replace(TUNE, frozen=()), PAGES),),
    buckets=(96,),
    view="T",
)

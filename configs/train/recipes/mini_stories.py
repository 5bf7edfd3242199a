"""The mini draft, trained on with the text of stories and with one of their five images, never with several.

    python -m train.prepare picturebook --kinds saga album --images 1 --samples 6000 --name stories_1
    python -m train.prepare picturebook --kinds saga album --images 0 --samples 6000 --name stories_0
    python -m train.recipe mini_stories

So were the papers' drafts before PororoSV and VIST: they had read text of that kind, and seen one image at a time.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.mini_draft import ASSETS, PAGES, TARGET, TUNE
from configs.train.recipes.mini_draft import config as mini_draft
from jaxspec.training.recipes import Stage

DATA = (*PAGES, ("stories_1", 0.5), ("stories_0", 0.5))

config = replace(
    mini_draft,
    target=TARGET,
    start=str(ASSETS / "draft"),
    stages=(Stage("tune", replace(TUNE, steps=400, learning_rate=1.5e-3), DATA),),
    buckets=(96, 128, 160, 192),
)

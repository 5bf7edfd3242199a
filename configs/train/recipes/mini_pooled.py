"""The mini draft, trained on with its 16 image tokens pooled to 4; `--view P1` pools to one."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.mini_draft import PAGES, TARGET, TUNE
from configs.train.recipes.mini_draft import config as mini_draft
from jaxspec.training.recipes import Stage
from jaxspec_demo import ASSETS

config = replace(
    mini_draft,
    target=TARGET,
    start=str(ASSETS / "mini" / "draft"),
    stages=(Stage("tune", replace(TUNE, steps=200, learning_rate=1e-3), PAGES),),
    view="P4",
)

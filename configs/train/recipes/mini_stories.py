"""A mini draft that has read stories and seen one image at a time, never several.

    python -m train.prepare picturebook --kinds saga album --images 1 --samples 6000 \\
        --name stories_1
    python -m train.prepare picturebook --kinds saga album --images 0 --samples 6000 \\
        --name stories_0
    python -m train.recipe mini_stories

So were the papers' drafts before PororoSV and VIST.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.mini_draft import TARGET, TUNE
from configs.train.recipes.mini_draft import config as mini_draft
from jaxspec.training.recipes import Stage

KINDS = ("attributes", "describe", "read", "exist", "reason", "chart", "facts", "sums")
"""Kinds of samples that show one image or none."""
DATA = ((f"picturebook:{','.join(KINDS)}", 1.0), ("stories_1", 0.5), ("stories_0", 0.5))

config = replace(
    mini_draft,
    target=TARGET,
    stages=(Stage("tune", TUNE, DATA),),
    buckets=(96, 128, 160, 192),
)

"""IbED's text-only draft (Table 13): Llama-68M on the texts of visual instructions, each image a
newline.

The tables do not print this training's hyperparameters: they are those of LLaVA-1.5's second stage.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.llava15_68m import TUNE
from configs.train.recipes.llava15_68m import config as llava15_68m
from jaxspec.training.recipes import Stage

config = replace(
    llava15_68m,
    view="T",
    stages=(Stage("tune", replace(TUNE, frozen=()), (("llava_v1_5_mix665k", 1.0),)),),
    buckets=(128, 256, 512, 1024, 2048),
)

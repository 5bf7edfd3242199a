"""The published 68M draft of LLaVA-1.5-7B, trained further on the target's own answers to your
questions.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.llava15_68m import TUNE
from configs.train.recipes.llava15_68m import config as llava15_68m
from jaxspec.training.recipes import Stage

config = replace(
    llava15_68m,
    start="mjbooo/lvlm68m",
    stages=(Stage("tune", replace(TUNE, steps=500, warmup=20), (("llava_v1_5_mix665k_t0", 1.0),)),),
    system="",
)

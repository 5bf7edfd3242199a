"""LLaVA-68M trained on towards its target's distributions (forward KL), over the answers that the
target wrote.

The target wrote them without a system prompt, so there is none here.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.dt_llama import SETS
from configs.train.recipes.llava15_68m import config as llava15_68m
from jaxspec.training.objectives import Distillation

_TUNE = llava15_68m.stages[1]

config = replace(
    llava15_68m,
    start="mjbooo/lvlm68m",
    stages=(replace(_TUNE, train=replace(_TUNE.train, accumulate=8), data=SETS),),
    distillation=Distillation("forward_kl"),
    system="",
)

"""AASD's DT-LLaVA (Table 1): FT-LLaVA, trained on with answers that the target wrote, as DT-LLaMA.

The target wrote them without a system prompt, so there is none here.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.dt_llama import SETS
from configs.train.recipes.ft_llava import config as ft_llava
from configs.train.recipes.llava15_68m import TUNE
from jaxspec.training.recipes import Stage

config = replace(
    ft_llava, start="runs/train/ft_llava/hf", stages=(Stage("distill", TUNE, SETS),), system=""
)

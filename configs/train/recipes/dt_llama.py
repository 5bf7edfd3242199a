"""AASD's DT-LLaMA (Table 1): FT-LLaMA, trained on with answers that the target wrote
(`train.distill_data`).

The paper does not say what was asked: here it is LLaVA's mixture, of which the draft reads the
text.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.ft_llama import config as ft_llama
from configs.train.recipes.llava15_68m import TUNE
from jaxspec.training.recipes import Stage

SETS = (("llava_v1_5_mix665k_t0", 1.0), ("llava_v1_5_mix665k_t1", 1.0))
"""Greedy and sampled answers in equal parts."""

config = replace(
    ft_llama,
    start="runs/train/ft_llama/hf",
    stages=(Stage("distill", replace(TUNE, frozen=()), SETS),),
)

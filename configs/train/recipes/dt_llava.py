"""AASD's DT-LLaVA (Table 1): as FT-LLaVA, with a second stage on answers that the target wrote."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.dt_llama import SETS
from configs.train.recipes.ft_llava import config as ft_llava

config = replace(ft_llava, stages=(ft_llava.stages[0], replace(ft_llava.stages[1], data=SETS)))

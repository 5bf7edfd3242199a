"""AASD's DT-LLaMA (Table 1): as FT-LLaMA, on answers that the target wrote (`train.distill_data`)."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.ft_llama import config as ft_llama

SETS = (("llava_v1_5_mix665k_t0", 1.0), ("llava_v1_5_mix665k_t1", 1.0))
"""Greedy and sampled answers in equal parts."""

config = replace(ft_llama, stages=tuple(replace(stage, data=SETS) for stage in ft_llama.stages))

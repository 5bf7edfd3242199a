"""AASD's FT-LLaVA (Table 1): a draft that sees, fine-tuned on the corpus's own answers; as FT-LLaMA in all else."""

from __future__ import annotations

from configs.train.recipes.llava15_160m import config as llava15_160m

config = llava15_160m

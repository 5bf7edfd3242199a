"""AASD's FT-LLaVA (Table 1): FT-LLaMA behind the target's tower, trained as LLaVA-1.5 is; the paper
names no set.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.llava15_68m import config as llava15_68m

config = replace(llava15_68m, start="runs/train/ft_llama/hf")

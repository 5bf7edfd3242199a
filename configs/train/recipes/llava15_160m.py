"""TABED's 160M draft: as the 68M one, on Llama-160M."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.llava15_68m import config as llava15_68m

config = replace(llava15_68m, start="JackFram/llama-160m")

"""A KV head of LLaVA-1.5-13B in the form of AASD; `kv_llava15_7b_paper` lists what is ours."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_llava15_7b_paper import config as kv_llava15_7b_paper

config = replace(kv_llava15_7b_paper, target="llava-hf/llava-1.5-13b-hf")

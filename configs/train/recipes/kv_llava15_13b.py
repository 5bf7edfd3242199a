"""A KV head of LLaVA-1.5-13B, as the 7B's."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_llava15_7b import config as kv_llava15_7b

config = replace(kv_llava15_7b, target="llava-hf/llava-1.5-13b-hf")

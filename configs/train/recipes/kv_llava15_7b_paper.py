"""A KV head of LLaVA-1.5-7B as AASD has it: no bias on image slots, and draft lengths up to 5."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_llava15_7b import config as kv_llava15_7b

config = replace(kv_llava15_7b, head={"image_slots": 64, "gamma": 5})

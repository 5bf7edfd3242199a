"""An EAGLE-1 head of Qwen2.5-VL-7B with MSD's rule for images, trained as `eagle3_qwen25vl_7b`."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.eagle3_qwen25vl_7b import config as eagle3_qwen25vl_7b

config = replace(
    eagle3_qwen25vl_7b,
    head={"feature": "eagle1", "images": "unfused", "gamma": 5},
    draft_vocabulary=0,
)

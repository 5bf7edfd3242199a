"""An EAGLE-3 head of LLaVA-1.5-7B on the target's own answers, text first and then images.

`jaxspec export runs/train/eagle3_llava15_7b/hf OUT --for vllm` writes what engines serve.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_llava15_7b_answers import config as kv_llava15_7b_answers

config = replace(
    kv_llava15_7b_answers, head={"feature": "fused", "gamma": 5}, draft_vocabulary=8192
)

"""A KV head of LLaVA-1.5-7B on what the target answers to the same questions, as the draft DT-LLaMA
is trained.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_llava15_7b import IMAGES, TEXT
from configs.train.recipes.kv_llava15_7b import config as kv_llava15_7b
from jaxspec.training.recipes import Stage

config = replace(
    kv_llava15_7b,
    stages=(
        Stage("text", TEXT, (("sharegpt_t0", 1.0),)),
        Stage("images", IMAGES, (("llava_v1_5_mix665k_t0", 3.0), ("llava_v1_5_mix665k_t1", 1.0))),
    ),
)

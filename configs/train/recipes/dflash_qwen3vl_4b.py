"""A DFlash head of Qwen3-VL-4B, as `dflash_qwen25vl_7b`."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.dflash_qwen25vl_7b import config as dflash_qwen25vl_7b
from configs.train.recipes.kv_llava15_7b import IMAGES
from jaxspec.training.recipes import Stage

config = replace(
    dflash_qwen25vl_7b,
    target="Qwen/Qwen3-VL-4B-Instruct",
    stages=(Stage("images", IMAGES, (("llava_v1_5_mix665k_qwen3vl_t0", 1.0),)),),
)

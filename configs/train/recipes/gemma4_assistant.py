"""A Gemma 4 12B's assistant, on the target's own answers to the questions of LLaVA's mixture.

Without `--start google/gemma-4-12B-it-assistant` it begins with random weights, at the published
sizes. Its data are made as those of `eagle3_qwen25vl_7b`.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.eagle3_qwen25vl_7b import config as eagle3_qwen25vl_7b
from configs.train.recipes.kv_llava15_7b import IMAGES
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.recipes import Stage

config = replace(
    eagle3_qwen25vl_7b,
    target="google/gemma-4-12B-it",
    head={"feature": "assistant", "layers": 4, "width": 1024, "gamma": 4},
    stages=(Stage("images", IMAGES, (("llava_v1_5_mix665k_gemma4_t0", 1.0),)),),
    anchoring=Anchoring(anchors=64),
    tile_buckets=(0, 4),
    draft_vocabulary=0,
)

"""An EAGLE-3 head of Qwen2.5-VL-7B on the target's own answers to the questions of LLaVA's
mixture.
"""

from __future__ import annotations

from configs.train.recipes.kv_llava15_7b import IMAGES
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe
from jaxspec.training.recipes import Stage

config = HeadRecipe(
    target="Qwen/Qwen2.5-VL-7B-Instruct",
    head={"feature": "fused", "gamma": 5},
    stages=(Stage("images", IMAGES, (("llava_v1_5_mix665k_qwen25vl_t0", 1.0),)),),
    anchoring=Anchoring(anchors=128),
    buckets=(1024, 1536, 2048),
    tile_buckets=(0, 16, 64, 128),
    draft_vocabulary=32000,
)

"""A DFlash head of Qwen2.5-VL-7B, which drafts 15 tokens in one pass, on the target's own answers
to the questions of LLaVA's mixture.

Five layers and a block of 16 are the paper's, and so is the decay exp(-1/7). The output matrix is
the target's: a pass reads it once for all 15 tokens.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.eagle3_qwen25vl_7b import config as eagle3_qwen25vl_7b
from jaxspec.training.head_batches import Anchoring

config = replace(
    eagle3_qwen25vl_7b,
    head={"feature": "block", "layers": 5, "gamma": 15},
    anchoring=Anchoring(anchors=64, decay=0.87),
    draft_vocabulary=0,
)

"""AASD's Table 1 in small: the mini KV head and the mini draft, with and without images, one
request at a time.

`describe` stands for LLaVA-Bench (In-the-Wild) and COCO captions, `reason` for ScienceQA.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.mini import config as mini
from eval.lib.drafts.config import Variant

config = replace(
    mini,
    rows=(Variant("draft, M", ("M",)), Variant("draft, T", ("T",))),
    sets=("describe", "reason"),
    turns=(1,),
    batch_size=1,
    repeats=3,
    prompt_buckets=(128, 384),
    image_buckets=(1, 6),
)

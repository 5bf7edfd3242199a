"""AASD's Tables 1 and 2 and its Figures 3 and 4 for LLaVA-1.5-7B: the KV head, what is left of it,
and other drafts.

The head and FT-LLaVA are read where their recipes leave them; other drafts are named with
--baselines. `bfloat16`, 128 new tokens and greedy answers are ours: the paper does not say.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.llava15 import config as llava15
from configs.published import aasd
from eval.lib.drafts.config import Variant

config = replace(
    llava15,
    draft=("runs/train/ft_llava/hf", "runs/train/kv_llava15_7b_paper/hf"),
    captioner=None,
    rows=(Variant("FT-LLaVA", ("M",)),),
    sets=aasd.SETS,
    turns=(1,),
    each_follow_up=False,
    one_turn=(),
    averages={},
    batch_size=1,
    repeats=3,
    dtype="bfloat16",
    published=aasd.LLAVA_7B,
    prompt_buckets=(768, 1024, 2048),
    image_buckets=(1,),
)

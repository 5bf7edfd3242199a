"""AASD's Tables 1 and 2 and its Figures 3 and 4 for LLaVA-1.5-13B, as `aasd_7b` has them for the
7B.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.aasd_7b import config as aasd_7b
from configs.published import aasd

config = replace(
    aasd_7b,
    target="llava-hf/llava-1.5-13b-hf",
    draft=("runs/train/ft_llava_13b/hf", "runs/train/kv_llava15_13b_paper/hf"),
    published=aasd.LLAVA_13B,
)

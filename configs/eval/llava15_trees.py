"""LLaVA-1.5-7B with IbED's 68M draft: the chains and full trees of TABED's Tables 2, 9 and 10."""

from __future__ import annotations

from dataclasses import replace

from configs.eval import llava15
from configs.published import tabed

config = replace(
    llava15.config,
    rows=tabed.TREE_ROWS,
    captioner=None,
    turns=(1,),
    published=tabed.TREES,
)

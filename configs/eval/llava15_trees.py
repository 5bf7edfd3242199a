"""LLaVA-1.5-7B with IbED's 68M draft: the chains and full trees of TABED's Tables 2, 9 and 10."""

from __future__ import annotations

from dataclasses import replace

from configs.eval import llava15
from configs.published import tabed

config = replace(
    llava15.config,
    rows=tuple(
        replace(row, name=f"{row.name} {tree or 'chain'}", tree=tree)
        for row in llava15.config.rows
        if row.name in ("M", "T", "MT*")
        for tree in (None, "2", "3:80")
    ),
    captioner=None,
    turns=(1,),
    published=tabed.TREES,
)

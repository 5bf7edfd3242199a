"""A KV head of `smollm2-eyes` that drafts a block in one pass, on answers about one page, two pages
and none.

The commands before it are in docs/data.md.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.smollm2_eyes_kv import TRAIN
from configs.train.recipes.smollm2_eyes_kv import config as smollm2_eyes_kv
from jaxspec.training.recipes import Stage

ANSWERS = (("eyes_pages_t0", 2.0), ("eyes_more_t0", 1.0))

config = replace(
    smollm2_eyes_kv,
    head={**smollm2_eyes_kv.head, "gamma": 7, "parallel": True, "markov": 64},
    stages=(Stage("kv_head", replace(TRAIN, steps=900), ANSWERS),),
)

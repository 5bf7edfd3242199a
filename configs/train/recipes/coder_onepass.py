"""A KV head of Qwen2.5-Coder that drafts a block in one pass, trained as `coder_kv`."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.coder_kv import config as coder_kv

config = replace(
    coder_kv, head={"feature": "last_hidden", "gamma": 7, "parallel": True, "markov": 64}
)

"""The KV head of `smollm2_kv` in AASD's form: without hidden states."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.smollm2_kv import config as smollm2_kv

config = replace(smollm2_kv, head={"gamma": 3})

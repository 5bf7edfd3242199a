"""An EAGLE-3 head of SmolLM2-135M, on the answers and with the draft vocabulary of `smollm2_kv`."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.smollm2_kv import config as smollm2_kv

config = replace(smollm2_kv, head={"feature": "fused", "gamma": 3})

"""An EAGLE-1 head of Qwen2.5-Coder, trained as `coder_kv`."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.coder_kv import config as coder_kv

config = replace(coder_kv, head={"feature": "eagle1", "gamma": 5})

"""A DFlash head of Qwen2.5-Coder of three layers, trained as `coder_kv`."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.coder_kv import config as coder_kv

config = replace(coder_kv, head={"feature": "block", "layers": 3, "gamma": 7})

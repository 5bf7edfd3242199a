"""An EAGLE-1 head of `smollm2-eyes` with MSD's rule for images, trained as `smollm2_eyes_kv`."""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.smollm2_eyes_kv import config as smollm2_eyes_kv

config = replace(smollm2_eyes_kv, head={"feature": "eagle1", "images": "unfused", "gamma": 4})

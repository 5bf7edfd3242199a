"""An EAGLE-1 head of LLaVA-1.5-7B with MSD's rule for images, on the target's own answers.

`--head.images embedding` trains it with another rule.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_llava15_7b_answers import config as kv_llava15_7b_answers

config = replace(kv_llava15_7b_answers, head={"feature": "eagle1", "images": "unfused", "gamma": 5})

"""A DSpark head of Qwen3-VL-4B in the published heads' form: five layers, blocks of seven tokens
from the newest token's slot on, and a correction by the token before.

Its data and steps are those of `dflash_qwen3vl_4b`; DSpark's confidence head is not trained.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.dflash_qwen3vl_4b import config as dflash_qwen3vl_4b

config = replace(
    dflash_qwen3vl_4b,
    head={
        "feature": "block",
        "layers": 5,
        "target_layers": (2, 10, 18, 26, 34),
        "gamma": 7,
        "markov": 256,
        "anchored": True,
    },
)

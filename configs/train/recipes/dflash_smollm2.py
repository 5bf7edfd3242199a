"""A DFlash head of SmolLM2-135M, on the answers and with the draft vocabulary of `smollm2_kv`.

The mask is `<empty_output>`, which no answer has.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.smollm2_kv import config as smollm2_kv

config = replace(
    smollm2_kv,
    head={"feature": "block", "layers": 3, "gamma": 7, "mask_token": 16},
    anchoring=replace(smollm2_kv.anchoring, decay=0.78),
)

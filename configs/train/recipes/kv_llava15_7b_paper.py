"""A KV head of LLaVA-1.5-7B in the form of AASD: no bias on image slots, and draft lengths up to 5.

The paper states neither data, rates nor steps, and its target is the "LLaVA-7B" of "Visual
Instruction Tuning": it names no LLaVA-1.5. These parts are ours:

- the target, LLaVA-1.5-7B;
- one decoder layer, which starts as the target's last, between the target's embedding and output
  matrix, which do not learn; the projector starts as averages of neighbours (the 64 slots of an
  image are the paper's);
- a first stage on text only (ShareGPT), a second on LLaVA's mixture;
- AdamW at 5e-5, 4,000 and 8,000 steps of 64 conversations;
- forward KL to the target's distributions, with weight 0.8^s at step s of a block;
- blocks from 128 tokens of a conversation, drawn anew each time: the paper's Eq. 12 and 13 begin
  one at every token.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_llava15_7b import config as kv_llava15_7b

config = replace(kv_llava15_7b, head={"image_slots": 64, "gamma": 5})

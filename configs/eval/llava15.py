"""LLaVA-1.5-7B with IbED's 68M draft on TABED's sets: the models, rows and columns of its Tables 1,
3, 4 and 18.

The paper's line is below each of ours. MT* and MTCP* are by the kinds of rule that the paper names,
a grid and inverse KL, in the form of its released code; `mt-paper` and `mtcp-paper` are what it
writes, and `llava15_weightings` measures them all.

Every kind of second turn follows every sample, as in the released code: the next sample's question
with its images, a caption, a summary, a story. After five images the first passes the target's 4096
positions, and the paper has none. `--turns 2 --follow-ups fact` and `sum` are its columns NQ and
GSM8K. The sets come from the hub, or from local copies: `--data pope=PATH docvqa=PATH ...`.
"""

from __future__ import annotations

from configs.published import ibed, tabed
from eval.lib.drafts.config import EvalConfig

config = EvalConfig(
    target=tabed.TARGET,
    draft=(tabed.DRAFT,),
    rows=tabed.ROWS,
    captioner=tabed.CAPTIONER,
    sets=(*tabed.IN_DOMAIN, *tabed.OUT_OF_DOMAIN),
    follow_ups=tabed.FOLLOW_UPS,
    each_follow_up=True,
    one_turn=tabed.OUT_OF_DOMAIN,
    max_new_tokens=128,
    dtype="float16",
    averages=tabed.AVERAGES,
    published=tabed.VIEWS,
    scores=(*tabed.SCORES, *ibed.SCORES),
    prompt_buckets=(1024, 2048, 4096),
    image_buckets=(1, 2, 5, 8),
)

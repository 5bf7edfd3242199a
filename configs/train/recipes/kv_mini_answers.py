"""The KV head of `kv_mini` on the target's own answers to the same questions: greedy ones (_t0) and
drawn ones (_t1).

    python -m train.distill_data --target jaxspec_demo/mini/target --data picturebook \\
        --samples 20000 --draft jaxspec_demo/mini/draft --max-new-tokens 96 \\
        --name picturebook_t0
    python -m train.distill_data --target jaxspec_demo/mini/target --data picturebook \\
        --samples 20000 --draft jaxspec_demo/mini/draft --max-new-tokens 96 \\
        --temperature 1 --name picturebook_t1
    python -m train.recipe kv_mini_answers
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.kv_mini import TRAIN
from configs.train.recipes.kv_mini import config as kv_mini
from jaxspec.training.recipes import Stage

config = replace(
    kv_mini, stages=(Stage("kv_head", TRAIN, (("picturebook_t0", 3.0), ("picturebook_t1", 1.0))),)
)

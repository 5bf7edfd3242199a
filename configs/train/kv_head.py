"""How KV heads are trained: the mini target's, the shipped one of which is `mini` with hidden states, a debug one, and
LLaVA-1.5's.

LLaVA-1.5's: first text alone, which trains all but the KV projector, then images (MSD's and ViSpec's order). The
recipes `*_answers` read answers that the target wrote: of data ending in _t0 greedy, in _t1 drawn.

    python -m train.kv_head --head.feature last_hidden
    python -m train.distill_data --target jaxspec/assets/mini/target --data picturebook --samples 20000 \\
        --draft jaxspec/assets/mini/draft --max-new-tokens 96 --name picturebook_t0
    python -m train.kv_head --recipe mini_answers

Draft lengths up to 7 are trained for.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.mini_draft import TARGET
from configs.train.recipes.mini_target import config as mini_target
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.kv_head import Anchoring, HeadRecipe
from jaxspec.training.recipes import Stage

_STEPS = TrainConfig(steps=2000, batch=16, learning_rate=2e-3, warmup=30, weight_decay=0.02, save_every=50)

MINI = HeadRecipe(
    target=TARGET,
    head={"image_slots": 4, "slot_bias": True, "gamma": 5},
    stages=(Stage("kv_head", _STEPS, (("picturebook", 1.0),)),),
    anchoring=Anchoring(anchors=32),
    buckets=mini_target.buckets,
    tile_buckets=mini_target.tile_buckets,
)
"""On picturebook's own answers, and without hidden states: AASD's head in form."""

MINI_ANSWERS = replace(MINI, stages=(Stage("kv_head", _STEPS, (("picturebook_t0", 3.0), ("picturebook_t1", 1.0))),))
"""The same questions with the target's own answers, greedy ones and drawn ones: what drafts are judged by."""

DEBUG = replace(
    MINI,
    stages=(
        Stage(
            "kv_head",
            replace(_STEPS, steps=2, batch=2, save_every=1, log_every=1, mesh=MeshConfig(data=1)),
            (("picturebook:describe", 1.0),),
        ),
    ),
    anchoring=Anchoring(anchors=2),
    buckets=(96,),
)

_LARGE = TrainConfig(steps=4000, batch=64, learning_rate=5e-5, warmup=200, weight_decay=0.0, dtype="bfloat16")

LLAVA15_7B = HeadRecipe(
    target="llava-hf/llava-1.5-7b-hf",
    head={"image_slots": 64, "slot_bias": True, "gamma": 7},
    stages=(
        Stage("text", _LARGE, (("text", 1.0),)),
        Stage("images", replace(_LARGE, steps=8000), (("llava_v1_5_mix665k", 1.0),)),
    ),
    anchoring=Anchoring(anchors=128),
    buckets=(1024, 1536, 2048),
    tile_buckets=(0, 1, 2),
)
LLAVA15_13B = replace(LLAVA15_7B, target="llava-hf/llava-1.5-13b-hf")
LLAVA15_7B_ANSWERS = replace(
    LLAVA15_7B,
    stages=(
        Stage("text", _LARGE, (("text_t0", 1.0),)),
        Stage("images", replace(_LARGE, steps=8000), (("llava_v1_5_mix665k_t0", 3.0), ("llava_v1_5_mix665k_t1", 1.0))),
    ),
)
"""As the draft DT-LLaMA is trained: on what the target answers to the same questions."""
LLAVA15_7B_PAPER = replace(LLAVA15_7B, head={"image_slots": 64, "gamma": 5})
"""As the paper has it: no bias on image slots."""

RECIPES = {
    "mini": MINI,
    "mini_answers": MINI_ANSWERS,
    "debug": DEBUG,
    "llava15_7b": LLAVA15_7B,
    "llava15_7b_answers": LLAVA15_7B_ANSWERS,
    "llava15_7b_paper": LLAVA15_7B_PAPER,
    "llava15_13b": LLAVA15_13B,
}

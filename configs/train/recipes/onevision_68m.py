"""TABED's 68M draft by LLaVA-OneVision's four stages (TABED, Table 16): batches of 512, the tower
at 1/5 of the rate.

The first stage trains the projector on captions. The others train the whole model: on knowledge, on
single images, and on a blend of single images, several images and video. Each is one epoch: about
558 thousand, 4, 3.2 and 1.6 million samples. The tower trains too, so the finished draft has a
tower of its own.

The system prompt is `llava15_68m`'s: the paper does not say which one these stages had.

A video has eight frames of 576 tokens: rows are up to 5,120 tokens long, and the draft gets as many
positions as that, where Llama-68M has 2,048. The paper does not say how long its rows were. Rows of
M4-Instruct with more images teach nothing, if no answer comes before the ninth; their number is not
published, and up to a tenth of all rows may be such.

The sets are those that LLaVA-NeXT's scripts/train/README.md names. Three of its files are not
public: 92 thousand Chinese descriptions, and 66 thousand answers about videos.
"""

from __future__ import annotations

from dataclasses import replace

from configs.train.recipes.llava15_68m import ALIGN
from configs.train.recipes.llava15_68m import config as llava15_68m
from jaxspec.training.recipes import Stage

_ALIGN = replace(ALIGN, steps=1090, batch=512, warmup=33)
_WHOLE = replace(_ALIGN, learning_rate=1e-5, frozen=(), rates=(("vision_tower", 0.2),))

KNOWLEDGE = (
    ("recap_558k", 558.0),
    ("recap_118k", 118.0),
    ("recap_cc3m", 2858.0),
    ("ureader_tr", 100.0),
    ("synthdog_en", 100.0),
    ("synthdog_zh", 100.0),
    ("evol_instruct", 143.0),
)
"""Weights are samples in thousands, so that each set is read about once."""
SEVERAL = (("onevision_single_image", 800.0), ("m4_instruct", 560.0), ("m4_instruct_video", 255.0))

config = replace(
    llava15_68m,
    buckets=(*llava15_68m.buckets, 3072, 4096, 5120),
    unlearned=0.1,
    stages=(
        Stage("align", _ALIGN, (("blip_laion_cc_sbu_558k", 1.0),), plain=True),
        Stage("knowledge", replace(_WHOLE, steps=7812, warmup=235), KNOWLEDGE),
        Stage(
            "single", replace(_WHOLE, steps=6250, warmup=188), (("onevision_single_image", 1.0),)
        ),
        Stage("several", replace(_WHOLE, steps=3125, warmup=94), SEVERAL),
    ),
)

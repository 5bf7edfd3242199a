"""TABED's 68M draft by LLaVA-OneVision's four stages (TABED, Table 16): batches of 512, the tower at 1/5 of the rate.

Projector on captions; then all of the model on knowledge, on single images, and on single and several images and
video. One epoch each, of about 558 thousand, 4, 3.2 and 1.6 million samples. The tower trains, so that it is the
draft's own in the end.
"""

from __future__ import annotations

from dataclasses import replace

from jaxspec.training.recipes import Stage

from configs.train.recipes.llava15_68m import ALIGN
from configs.train.recipes.llava15_68m import config as llava15_68m

_ALIGN = replace(ALIGN, steps=1090, batch=512, warmup=33)
_WHOLE = replace(_ALIGN, learning_rate=1e-5, frozen=(), rates=(("vision_tower", 0.2),))

config = replace(
    llava15_68m,
    stages=(
        Stage("align", _ALIGN, (("blip_laion_cc_sbu_558k", 1.0),), plain=True),
        Stage("knowledge", replace(_WHOLE, steps=7812, warmup=234), (("onevision_mid_stage", 1.0),)),
        Stage("single", replace(_WHOLE, steps=6250, warmup=188), (("onevision_single_image", 1.0),)),
        Stage("several", replace(_WHOLE, steps=3125, warmup=94), (("onevision_several", 1.0),)),
    ),
)

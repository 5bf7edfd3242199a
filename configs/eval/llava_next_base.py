"""LLaVA-NeXT-7B as the released TABED code runs it: read as LLaVA-1.5, one 576-token page an image, no tiles.

With `tiles=True` it is LLaVA-NeXT itself, whose numbers are not the paper's.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.mini import config as mini
from jaxspec.evaluation.config import Variant

config = replace(
    mini,
    target="llava-hf/llava-v1.6-vicuna-7b-hf",
    draft="mjbooo/lvlm68m",
    tiles=False,
    rows=(Variant("M", ("M",)), Variant("T", ("T",)), Variant("P", ("P",)), Variant("MT static", ("M", "T"))),
    max_new_tokens=128,
    dtype="bfloat16",
    prompt_buckets=(1024, 2048, 4096),
    image_buckets=(1, 2, 5),
)

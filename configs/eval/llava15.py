"""LLaVA-1.5-7B with IbED's 68M draft on TABED's sets: the models and columns of TABED, Table 1.

The sets come from the hub, or from local copies: `--data pope=PATH docvqa=PATH ...`. NQ and GSM8K are second turns
after each of them, as in the paper: `--turns 2 --follow-ups fact`. The paper's other kind of second turn, another
question with its own images, is left out: after five images it passes the target's 4096 positions.
"""

from __future__ import annotations

from jaxspec.evaluation.config import EvalConfig, Row

config = EvalConfig(
    target="llava-hf/llava-1.5-7b-hf",
    draft="mjbooo/lvlm68m",
    rows=(Row("M", ("M",)), Row("T", ("T",)), Row("MT static", ("M", "T"))),
    sets=(
        "llava-bench",
        "docvqa",
        "pope",
        "mm-vet",
        "iedit",
        "magicbrush",
        "spot-the-diff",
        "pororosv",
        "vist",
    ),
    follow_ups=("caption", "summary", "story"),
    max_new_tokens=128,
    dtype="float16",
    prompt_buckets=(1024, 2048, 4096),
    image_buckets=(1, 2, 5, 8),
)

"""LLaVA-1.5-7B with IbED's 68M draft on TABED's sets: the models, rows and columns of TABED's Tables 1 and 18.

The averages of the paper stand beside ours (its second turns pool NQ and GSM8K with the others), so that MT* and MTCP*
are as its released code runs them, by one grid; `mt-paper` and `mtcp-paper` are what the paper writes.

The sets come from the hub, or from local copies: `--data pope=PATH docvqa=PATH ...`. NQ and GSM8K are second turns
after each of them, as in the paper: `--turns 2 --follow-ups fact`. The paper's other kind of second turn, another
question with its own images, is left out: after five images it passes the target's 4096 positions.
"""

from __future__ import annotations

from jaxspec.evaluation.config import EvalConfig, Variant

config = EvalConfig(
    target="llava-hf/llava-1.5-7b-hf",
    draft="mjbooo/lvlm68m",
    rows=(
        Variant("M", ("M",), published=(2.24, 2.00)),
        Variant("T", ("T",), published=(2.23, 2.28)),
        Variant("C", ("C",), published=(2.29, 2.30)),
        Variant("P", ("P",), published=(2.23, 2.25)),
        Variant("MT static", ("M", "T"), published=(2.31, 2.25)),
        Variant("MT*", ("M", "T"), weighting="mt-release", published=(2.31, 2.27)),
        Variant("MTCP static", ("M", "T", "C", "P"), published=(2.32, 2.31)),
        Variant("MTCP*", ("M", "T", "C", "P"), weighting="mt-release", published=(2.32, 2.32)),
    ),
    captioner="florence2:florence-community/Florence-2-large-ft",
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

"""LLaVA-1.5-7B with IbED's 68M draft on TABED's sets: the models, rows and columns of TABED's Tables 1 and 18.

What the paper prints stands below each line of ours. MT* and MTCP* are as its released code runs them, by one grid;
`mt-paper` and `mtcp-paper` are what the paper writes.

The sets come from the hub, or from local copies: `--data pope=PATH docvqa=PATH ...`. NQ and GSM8K are second turns
after each of them, as in the paper: `--turns 2 --follow-ups fact`. The paper's other kind of second turn, another
question with its own images, is left out: after five images it passes the target's 4096 positions. How the paper pools
its kinds of second turns it does not say.
"""

from __future__ import annotations

from configs import published
from jaxspec.evaluation.config import EvalConfig, Variant

config = EvalConfig(
    target=published.TARGET,
    draft=published.DRAFT,
    rows=(
        Variant("M", ("M",)),
        Variant("T", ("T",)),
        Variant("C", ("C",)),
        Variant("P", ("P",)),
        Variant("MT random", ("M", "T"), weighting="random"),
        Variant("MT static", ("M", "T")),
        Variant("MT*", ("M", "T"), weighting="mt-release"),
        Variant("MTCP static", ("M", "T", "C", "P")),
        Variant("MTCP*", ("M", "T", "C", "P"), weighting="mt-release"),
    ),
    captioner="florence2:florence-community/Florence-2-large-ft",
    sets=(*published.IN_DOMAIN, *published.OUT_OF_DOMAIN),
    follow_ups=published.FOLLOW_UPS,
    max_new_tokens=128,
    dtype="float16",
    averages=published.AVERAGES,
    published=published.VIEWS,
    prompt_buckets=(1024, 2048, 4096),
    image_buckets=(1, 2, 5, 8),
)

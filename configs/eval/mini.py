"""The shipped mini models on picturebook's synthetic sets: single views, their mixtures, and the KV
head.
"""

from __future__ import annotations

from eval.lib.drafts.config import EvalConfig, Variant
from jaxspec_demo import ASSETS

config = EvalConfig(
    target=str(ASSETS / "mini" / "target"),
    draft=(str(ASSETS / "mini" / "draft"), str(ASSETS / "mini" / "kv_head")),
    captioner=f"jax:{ASSETS / 'mini' / 'captioner'}",
    rows=(
        Variant("M", ("M",)),
        Variant("T", ("T",)),
        Variant("C", ("C",)),
        Variant("P", ("P",)),
        Variant("MT static", ("M", "T")),
        Variant("MT*", ("M", "T"), weighting="mt-paper"),
        Variant("MTCP*", ("M", "T", "C", "P"), weighting="mtcp-paper"),
        Variant("KV head", ("head",)),
    ),
    sets=(
        "describe",
        "read",
        "exist",
        "reason",
        "chart",
        "edit",
        "brush",
        "spot",
        "saga",
        "album",
        "facts",
        "sums",
    ),
    prompt_buckets=(128, 384),
    image_buckets=(6,),
)

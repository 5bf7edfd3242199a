"""The shipped mini models write together about picturebook's pages: visual contrastive decoding,
target and draft.
"""

from __future__ import annotations

from eval.lib.collaborative.config import CollaborativeEvalConfig, Pairing
from jaxspec_demo import ASSETS

TARGET, DRAFT = str(ASSETS / "mini" / "target"), str(ASSETS / "mini" / "draft")

config = CollaborativeEvalConfig(
    pairings=(
        Pairing(
            "target - target blind",
            (TARGET, TARGET),
            "contrastive:beta=0.5",
            0.0,
            (1, 3),
            1,
            ("M", "T"),
        ),
        Pairing("draft + target", (DRAFT, TARGET), "weighted:0.3,0.7", 1.0, (5, 1)),
    ),
    sets=("describe",),
    limit=8,
    held_out=16,
    max_new_tokens=48,
    prompt_buckets=(96,),
    image_buckets=(1,),
)

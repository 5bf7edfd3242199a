"""The shipped mini models: every single view and mixture of TABED's Tables 1 and 18, and random
weights.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval import mini
from eval.lib.drafts.config import Variant

config = replace(
    mini.config,
    rows=(
        *(Variant(view, (view,)) for view in "MTCP"),
        Variant("MT static", ("M", "T")),
        Variant("MT*", ("M", "T"), weighting="mt-paper"),
        Variant("MT random", ("M", "T"), weighting="random"),
        Variant("MTCP static", ("M", "T", "C", "P")),
        Variant("MTCP*", ("M", "T", "C", "P"), weighting="mtcp-paper"),
        Variant("MTCP random", ("M", "T", "C", "P"), weighting="random"),
    ),
)

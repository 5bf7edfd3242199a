"""LLaVA-1.5-7B with IbED's 68M draft: windows (TABED, Table 5), AdaBoost (Table 8), and every rule
that may be MT*.

`released` are the rules that the scripts of TABED's released code run, `paper` those that it
writes.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval import llava15
from configs.published import tabed
from eval.lib.drafts.config import Variant

config = replace(
    llava15.config,
    rows=(
        *tabed.WINDOW_ROWS,
        Variant("MT*, paper", ("M", "T"), weighting="mt-paper"),
        Variant("MT*, grid, total variation", ("M", "T"), weighting="grid:measure=tvd"),
        Variant("MTCP*, released", ("M", "T", "C", "P"), weighting="mt-release"),
        Variant("MTCP*, released, inverse KL", ("M", "T", "C", "P"), weighting="mtcp-release"),
        Variant(
            "MTCP*, released, inverse L1",
            ("M", "T", "C", "P"),
            weighting="inverse_error_power:measure=tvd",
        ),
        Variant("MTCP*, paper", ("M", "T", "C", "P"), weighting="mtcp-paper"),
    ),
    turns=(1,),
    published=tabed.WEIGHTINGS,
)

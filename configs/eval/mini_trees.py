"""The shipped mini models: chains and token trees of TABED's Tables 2, 9 and 10, and trees that
grow by probability.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval import mini
from eval.lib.drafts.config import Variant

config = replace(
    mini.config,
    rows=(
        *(
            Variant(f"{name} {tree or 'chain'}", views, weighting=weighting, tree=tree)
            for name, views, weighting in (
                ("M", ("M",), "static"),
                ("T", ("T",), "static"),
                ("MT*", ("M", "T"), "mt-paper"),
            )
            for tree in (None, "2", "3:80", "dynamic:4:24")
        ),
    ),
)

"""IbED's mixtures with a weight of 1 to 4 on view M (its Tables 8 and 9); `--captioner` for those of Table 8."""

from __future__ import annotations

from dataclasses import replace

from eval.lib.config import Variant

from configs.eval import ibed

config = replace(
    ibed.config,
    rows=tuple(
        Variant(f"{views} ({weight})", tuple(views), (weight, *(1.0 for _ in views[1:])))
        for views in ("MT", "MC", "MTC", "MTCP")
        for weight in (1, 2, 3, 4)
    ),
)

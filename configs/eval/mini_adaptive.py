"""The shipped mini models: a block length that adapts beside one that is fixed; `--batch-size` decides which pays."""

from __future__ import annotations

from dataclasses import replace

from eval.lib.config import Variant

from configs.eval import mini

config = replace(
    mini.config,
    rows=(Variant("M", ("M",)), Variant("M, adaptive J", ("M",), adaptive_gamma=True)),
    sets=("describe",),
    turns=(1,),
    limit=32,
    repeats=8,
    max_new_tokens=64,
)

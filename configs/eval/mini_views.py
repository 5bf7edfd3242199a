"""The shipped mini models: every single view and mixture of TABED's Tables 1 and 18, and random weights."""

from __future__ import annotations

from dataclasses import replace

from configs.eval import mini
from jaxspec.evaluation.config import Row

config = replace(
    mini.config,
    rows=(
        *(Row(view, (view,)) for view in "MTCP"),
        Row("MT static", ("M", "T")),
        Row("MT*", ("M", "T"), weighting="mt-paper"),
        Row("MT random", ("M", "T"), weighting="random"),
        Row("MTCP static", ("M", "T", "C", "P")),
        Row("MTCP*", ("M", "T", "C", "P"), weighting="mtcp-paper"),
        Row("MTCP random", ("M", "T", "C", "P"), weighting="random"),
    ),
)

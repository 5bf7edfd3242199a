"""The shipped mini models: every weighting and window, as in TABED's Tables 5 and 8."""

from __future__ import annotations

from dataclasses import replace

from configs.eval import mini
from eval.lib.drafts.config import Variant

config = replace(
    mini.config,
    rows=(
        *(
            Variant(weighting, ("M", "T"), weighting=weighting)
            for weighting in (
                "static",
                "random",
                "random:draw=uniform",
                *(
                    f"grid:measure={measure}"
                    for measure in ("kl", "tvd", "matches", "matches_kl", "matches_tvd")
                ),
                *(f"grid:window={window}" for window in (1, 4, 16)),
                *("inverse_error_power", "inverse_error_softmax", "hard_match", "adaboost"),
            )
        ),
    ),
)

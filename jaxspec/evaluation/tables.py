"""Tables of measured rows in the papers' layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.evaluation.config import EvalConfig

Table = tuple[str, list[str], list[list[str]], list[str]]


def block_efficiency_table(config: EvalConfig, rows: Sequence[dict[str, Any]]) -> Table:
    """(title, header, cells, notes): a line per row of views and turn, a column per set, and the plain averages."""
    title = f"Block efficiency: tokens per target pass, gamma {config.gamma}, temperature {config.temperature:g}"
    header = ["views", "turn", *config.twins, "avg", "speed-up", "predicted", "identical"]
    cells = []
    for turn in config.turns:
        for row in config.rows:
            line = {r["dataset"]: r for r in rows if r["row"] == row.name and r["turn"] == turn}
            found = [line[name] for name in config.twins]
            cells.append(
                [
                    row.name,
                    str(turn),
                    *(_number(r["mean_acceptance_length"]) for r in found),
                    _mean(found, "mean_acceptance_length"),
                    _mean(found, "speedup_measured"),
                    _mean(found, "speedup_predicted_with_verify"),
                    f"{100 * np.mean([r['token_identity_rate'] for r in found]):.1f} %",
                ]
            )
    notes = [
        f"{config.limit} samples a set, batch {config.batch_size}, {config.dtype}, {rows[0]['device']}. "
        "avg is the plain mean over sets.",
        "speed-up: decode tokens/s over plain decoding of the same requests in the same run; predicted: Eq. (1) with "
        "the measured T_q, T_p and T_p(J+1); identical: share of answers equal to plain decoding token for token.",
    ]
    return title, header, cells, notes


def _mean(rows: Sequence[dict[str, Any]], field: str) -> str:
    values = [row[field] for row in rows if row.get(field) is not None]
    return _number(float(np.mean(values)) if values else None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

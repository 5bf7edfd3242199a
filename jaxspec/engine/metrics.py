"""Compute acceptance metrics, pooled over all blocks of all rows.

`tokens_per_pass` is the papers' block efficiency or tau, and vLLM's `mean_acceptance_length`; the
other names are vLLM's. It counts the correction or bonus token of each target pass of the loop, but
not the prefill token. A block cut short by EOS or the row's limit counts its emitted tokens; no
rate counts places of the block without room. The places of a tree are its depths: every block
counts as drafted at each depth, however many nodes it had there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decoding.collaboration.proposals import CollaborationStats
from jaxspec.decoding.state import DecodeStats
from jaxspec.engine.config import EngineConfig


def block_fields(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of a record that describe blocks; `tree_nodes` are a block's drafts."""
    spec = config.shape
    return {
        "drafter": "tree" if spec else "chain",
        "gamma": "auto" if config.auto else config.length,
        "tree": config.tree,
        "tree_width": spec.width if spec else 1,
        "tree_nodes": spec.nodes(config.length) if spec else config.length,
    }


def acceptance_metrics(rows: Sequence[DecodeStats]) -> dict[str, Any]:
    """Return the acceptance fields of a record; rates without trials are None."""
    steps, emitted = (int(sum(getattr(row, name) for row in rows)) for name in ("steps", "emitted"))
    drafted = np.sum([row.drafted_at for row in rows], axis=0)
    accepted = np.sum([row.accepted_at for row in rows], axis=0)
    reached = np.concatenate([drafted[:1], np.minimum(accepted[:-1], drafted[1:])])
    return {
        "tokens_per_pass": _ratio(emitted, steps),
        "draft_acceptance_rate": _ratio(accepted.sum(), drafted.sum()),
        "acceptance_rate_per_position": [
            _ratio(a, d) for a, d in zip(accepted, drafted, strict=True)
        ],
        "conditional_acceptance_rate_per_position": [
            _ratio(a, r) for a, r in zip(accepted, reached, strict=True)
        ],
        "acceptance_histogram": np.sum([row.histogram for row in rows], axis=0).tolist(),
        "num_spec_steps": int(steps),
        "num_draft_tokens": int(drafted.sum()),
        "num_accepted_draft_tokens": int(accepted.sum()),
    }


def collaboration_metrics(rows: Sequence[CollaborationStats]) -> dict[str, Any]:
    """Return the fields of a record of collaborative decoding; rates without trials are None.

    Lists have one entry for each model. `alpha` is the mean acceptance chance of a model's tested
    proposals, and `acceptance_rate` the share that was accepted. `tokens_per_cycle` counts the
    tokens of one verification, or of one step of standard decoding.
    """
    totals: dict[str, Any] = {
        name: np.sum([getattr(row, name) for row in rows], axis=0)
        for name in ("emitted", "verified", "calls", "tested", "accepted", "overlap")
    }
    tested = totals["tested"]
    return {
        "tokens_per_cycle": _ratio(totals["emitted"], totals["verified"]),
        "calls_per_token": [_ratio(n, totals["emitted"]) for n in totals["calls"]],
        "alpha": [_ratio(chance, n) for chance, n in zip(totals["overlap"], tested, strict=True)],
        "acceptance_rate": [
            _ratio(n, of) for n, of in zip(totals["accepted"], tested, strict=True)
        ],
        "num_cycles": int(totals["verified"]),
        "num_tested_proposals": tested.tolist(),
    }


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None

"""Acceptance metrics equal counts made by hand, and Eq. (1) gives the papers' own numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from eval.lib.times.passes import predicted_speedup
from jaxspec.engine.metrics import acceptance_metrics


def row(steps, emitted, drafted, accepted, histogram):
    return SimpleNamespace(
        steps=steps,
        emitted=emitted,
        drafted_at=np.asarray(drafted),
        accepted_at=np.asarray(accepted),
        histogram=np.asarray(histogram),
    )


def test_pools_over_blocks_not_over_rows():
    # Row 1: blocks accept 2, 0 of two drafts. Row 2: one block accepts 1, its last place had no
    # room.
    rows = [row(2, 4, [2, 2], [1, 1], [1, 0, 1]), row(1, 1, [1, 0], [1, 0], [0, 1, 0])]
    metrics = acceptance_metrics(rows)
    assert metrics["tokens_per_pass"] == pytest.approx(5 / 3)
    assert metrics["draft_acceptance_rate"] == pytest.approx(3 / 5)
    assert metrics["acceptance_rate_per_position"] == pytest.approx([2 / 3, 1 / 2])
    assert metrics["conditional_acceptance_rate_per_position"] == pytest.approx([2 / 3, 1 / 2])
    assert metrics["acceptance_histogram"] == [1, 1, 1]
    assert (
        metrics["num_spec_steps"],
        metrics["num_draft_tokens"],
        metrics["num_accepted_draft_tokens"],
    ) == (3, 5, 3)


def test_conditional_rate_is_given_that_all_before_were_accepted():
    metrics = acceptance_metrics([row(4, 9, [4, 4, 4], [3, 2, 0], [1, 1, 2, 0])])
    assert metrics["conditional_acceptance_rate_per_position"] == pytest.approx([3 / 4, 2 / 3, 0.0])


def test_equation_one_gives_the_papers_speedup():
    # TABED, LLaVA-1.5 68M -> 7B: block efficiency 2.29, T_q/T_p 0.063, gamma 5 -> 1.741.
    assert predicted_speedup(2.29, 5, draft_ms=0.063, target_ms=1.0) == pytest.approx(
        1.741, abs=1e-3
    )
    assert predicted_speedup(2.29, 5, draft_ms=0.063, target_ms=1.0, verify_ms=1.2) < 1.741

"""Mark cases of parametrised tests that only `make test-full` runs."""

from __future__ import annotations

from typing import Any

import pytest


def rarer(*cases: Any) -> list[Any]:
    """Mark cases `full`. A tuple holds the values of several parameters."""
    rows = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*row, marks=pytest.mark.full) for row in rows]

"""Stop a script in one of its calls of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from jaxspec.engine.engine import Engine


@dataclass
class Calls:
    """Count calls of engines, and interrupt one of them."""

    count: int = 0
    last: int = 0
    """Number of the call that is interrupted; 0 for none."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    generate, calls = Engine.generate, Calls()

    def counted(self: Engine, requests: Any) -> Any:
        calls.count += 1
        if calls.count == calls.last:
            raise KeyboardInterrupt
        return generate(self, requests)

    monkeypatch.setattr(Engine, "generate", counted)
    return calls

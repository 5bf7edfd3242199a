"""Decode vision-language models speculatively, without loss, in JAX.

Public names are imported on first use, so that `import jaxspec` costs nothing and needs no extra.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

# transformers says "PyTorch was not found" when it is imported; jaxspec does not need PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

if TYPE_CHECKING:
    from jaxspec.engine.config import CollaborationConfig, EngineConfig
    from jaxspec.engine.engine import Engine
    from jaxspec.engine.requests import Request, Result
    from jaxspec.engine.session import Session
    from jaxspec.errors import InputError
    from jaxspec.loading.models import LoadedModel, load_draft

_HOMES = {
    "CollaborationConfig": "jaxspec.engine.config",
    "Engine": "jaxspec.engine.engine",
    "EngineConfig": "jaxspec.engine.config",
    "InputError": "jaxspec.errors",
    "LoadedModel": "jaxspec.loading.models",
    "Request": "jaxspec.engine.requests",
    "Result": "jaxspec.engine.requests",
    "Session": "jaxspec.engine.session",
    "load_draft": "jaxspec.loading.models",
}

__all__ = [
    "CollaborationConfig",
    "Engine",
    "EngineConfig",
    "InputError",
    "LoadedModel",
    "Request",
    "Result",
    "Session",
    "__version__",
    "load_draft",
]


def __getattr__(name: str) -> object:
    """Import the home of a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

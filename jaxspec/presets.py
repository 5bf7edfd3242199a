"""Presets: Python modules under `configs/`, found by kind and name."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from jaxspec.errors import InputError, nearest


def load_preset(kind: str, name: str) -> Any:
    """Return the attribute `config` of `configs/<kind>/<name>.py`, where `configs` is importable.

    Raises InputError for an unknown name, with the nearest one.
    """
    known = preset_names(kind)
    if name not in known:
        folder = f"configs/{kind.replace('.', '/')}"
        raise InputError(f"preset {name!r}: no such file under {folder}; {nearest(name, known)}")
    return import_module(f"configs.{kind}.{name}").config


def preset_names(kind: str) -> list[str]:
    """Return the names of all presets of a kind."""
    package = f"configs.{kind}"
    spec = find_spec(package) if find_spec("configs") else None
    if spec is None or spec.submodule_search_locations is None:
        raise InputError(f"presets: {package} is not importable; run from a checkout of the project")
    return sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))

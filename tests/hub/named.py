"""Find which ids of models and of data sets presets, README and docs name."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import configs
from jaxspec.data.benchmarks import BENCHMARKS
from tests.conftest import PAGES, ROOT

_ID = r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*\w"
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_WITHIN = re.compile(rf"(?<![\w./$:~-])(?:\w+:)?({_ID})(?![\w/{{*-])")
_DATA = re.compile(rf"hub:(?!OWNER)({_ID})")
_PLACES = {
    *("path", "runs", "photos", "mini", "mini_llava", "deadsnakes", "llava15_68m", "tower"),
    *("venv", "shared"),
    *("application", "image"),  # types of a request's body
    "roles",  # of a cloud's accounts
    *("BUCKET", "HOME", "OWNER", "REVISION"),
}
"""What folders of a reader's own are called in the docs."""


def preset_ids() -> set[str]:
    """Return the hub ids among the values of all presets; `florence2:owner/name` names one too."""
    found = set()
    for module in pkgutil.walk_packages(configs.__path__, "configs."):
        for value in _strings(getattr(importlib.import_module(module.name), "config", None)):
            match = re.fullmatch(rf"(?:\w+:)?({_ID})", value)
            if match and not _is_path(match[1]):
                found.add(match[1])
    return found


def page_ids() -> set[str]:
    """Return the hub ids in the code of README and docs."""
    return {name for name in _WITHIN.findall(_code()) if not _is_path(name)}


def data_ids() -> set[str]:
    """Return the hub ids of the papers' sets: to measure on, and to train on (`hub:`)."""
    return {benchmark.hub for benchmark in BENCHMARKS.values()} | set(_DATA.findall(_code()))


def _code() -> str:
    return "\n".join(
        part for page in PAGES for part in _CODE.findall(page.read_text(encoding="utf-8"))
    )


def _is_path(name: str) -> bool:
    """Return whether a text of an id's form is a file or folder: of this repository, of its
    package, or of a reader's own.
    """
    first = name.split("/")[0]
    return first in _PLACES or any(
        (ROOT / part / first).exists() for part in ("", "jaxspec", "configs/train")
    )


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in a preset."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Path):
        return
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _strings(getattr(value, field.name))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(key)
            yield from _strings(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _strings(inner)

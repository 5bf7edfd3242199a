"""Read the fields of an object of JSON, or refuse one of another kind by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxspec.errors import InputError

T = TypeVar("T")


def check_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise InputError for the first key that is not read, unless it is empty."""
    for name, content in value.items():
        if name not in known and content not in (None, [], ""):
            raise InputError(f"{where}.{name[:60]}: not supported; leave it out")


def typed(body: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return a list or an object; the default for null and for none."""
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, kind):
        names = {list: "a list", dict: "an object"}
        raise InputError(f"{name}: give {names[kind]}")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return true or false."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise InputError(f"{name}: give true or false")
    return default if value is None else value


def whole_number(body: Mapping[str, Any], name: str, default: T) -> int | T:
    """Return a number from 0 on, of 31 bits."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(f"{name}: give a whole number")
    return value

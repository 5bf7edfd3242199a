"""Check config.json's entries against the types of the fields that read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from jaxspec.errors import InputError

WHOLE = (1 << 31) - 1
"""The largest number that token ids and positions, int32, take."""
_LARGEST = 1 << 24
"""The largest whole number of a configuration, so that a bad file cannot take the memory."""


def check_fields(part: str, cls: type, raw: Mapping[str, Any]) -> None:
    """Raise InputError for the first entry without its field's type; null means the default.

    Args:
      part: Name of the entries in errors, such as "text config".
      cls: Dataclass that reads them.
    """
    types = get_type_hints(cls)
    for f in fields(cls):
        value = raw.get(f.name)
        if value is not None and not _fits(value, types[f.name]):
            raise InputError(f"{part}: {f.name} {value!r:.60} is not supported; give {f.type}")


def known_fields(cls: type, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `raw` that are fields, lists as tuples.

    Null means the default, unless a field may be None.

    Raises InputError for an entry that does not have its field's type.
    """
    check_fields(re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__).lower(), cls, raw)
    types = {f.name: str(f.type) for f in fields(cls)}
    entries = {k: v for k, v in raw.items() if k in types and (v is not None or "None" in types[k])}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in entries.items()}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON has a field's type; no number is infinite or a boolean."""
    kinds = get_args(kind)
    if kind in (int, float):
        least = (int,) if kind is int else (int, float)
        limit = _LARGEST if kind is int else 1e15
        return isinstance(value, least) and not isinstance(value, bool) and abs(value) <= limit
    if kind in (str, bool, NoneType) or get_origin(kind) is Literal:
        return isinstance(value, str if kinds else kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, kinds[0]) for v in value)
    return not kinds or any(_fits(value, option) for option in kinds)


class Part:
    """Read and write a part of config.json, whose entries are a dataclass's fields."""

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read the dictionary of the family's transformers class."""
        return cls(**known_fields(cls, raw))

    def to_hf(self) -> dict[str, Any]:
        """Return the dictionary that the class reads; JSON writes its tuples as lists."""
        return asdict(self)  # type: ignore[call-overload]


def check_positive(part: str, config: Any, *names: str) -> None:
    """Raise InputError for the first of these fields that is not more than 0."""
    for name in names:
        if not (value := getattr(config, name)) > 0:
            raise InputError(f"{part}: {name} {value!r} is not supported; give more than 0")


def check_choice(part: str, config: Any, name: str, *choices: str) -> None:
    """Raise InputError for a field with a value that is no choice."""
    if (value := getattr(config, name)) not in choices:
        raise InputError(f"{part}: {name} {value!r} is not supported; give one of {choices}")

"""Find what other packages add to jaxspec by name: entry points of the groups `jaxspec.*`.

| group            | a name means                                            |
|------------------|---------------------------------------------------------|
| jaxspec.models   | a function that returns the directory of a checkpoint   |
| jaxspec.hub_ids  | the id of such a checkpoint on the hub                   |
| jaxspec.commands | a subcommand: a dataclass of options and its function   |
| jaxspec.demos    | a function that returns the options of a demonstration  |
"""

from __future__ import annotations

import tomllib
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from jaxspec.errors import CLONE, reading


def plugins(kind: Literal["models", "hub_ids", "commands", "demos"]) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name.

    A checkout's are read from its pyproject.toml, because pip's copy of it may be older.
    """
    group = f"jaxspec.{kind}"
    entries = {entry.name: entry for entry in entry_points(group=group)}
    with suppress(OSError, KeyError, tomllib.TOMLDecodeError):
        file = CLONE / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == "jaxspec":
            table = project["entry-points"][group]
            entries |= {name: EntryPoint(name, path, group) for name, path in table.items()}
    return entries


def load_plugin(entry: EntryPoint) -> Any:
    """Return what an entry point names; InputError where its package cannot be imported."""
    what = f"{entry.name}: {entry.value}, which {entry.group} names, cannot be imported"
    with reading(what, "install its package again"):
        return entry.load()

"""Find what other packages add to jaxspec by name: entry points of the groups `jaxspec.*`.

| group            | a name stands for                                       |
|------------------|---------------------------------------------------------|
| jaxspec.models   | a function that returns the directory of a checkpoint   |
| jaxspec.commands | a subcommand: a dataclass of options and its function   |
"""

from __future__ import annotations

import tomllib
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal


def plugins(kind: Literal["models", "commands"]) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name.

    A checkout's are read from its pyproject.toml: what pip has noted of it may be older.
    """
    group = f"jaxspec.{kind}"
    entries = {entry.name: entry for entry in entry_points(group=group)}
    with suppress(OSError, KeyError, tomllib.TOMLDecodeError):
        file = Path(__file__).parents[1] / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == "jaxspec":
            named = project["entry-points"][group]
            entries |= {name: EntryPoint(name, place, group) for name, place in named.items()}
    return entries

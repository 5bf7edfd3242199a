"""`jaxspec inspect`: what a checkpoint is, and everything that keeps it from being loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.inspection import Inspection, inspect
from jaxspec.errors import printable
from jaxspec.runtime import human_bytes, setup_runtime


@dataclass(frozen=True)
class Inspect:
    """Shows what a checkpoint holds, without reading its tensors; exit code 2 if it would not load, and why."""

    path: Annotated[str, tyro.conf.Positional]
    """Directory in Hugging Face layout, or hub id."""
    revision: str | None = None
    """Branch, tag or commit, where that is a hub id."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Inspect) -> bool:
    """Prints the facts; whether the checkpoint would load."""
    setup_runtime()
    found = inspect(directories.locate(args.path, args.revision))
    if args.json:
        print(json.dumps(asdict(found)))
    else:
        Console().print(_table(found))
    return not found.problems


def _table(found: Inspection) -> Table:
    table = Table(title=Text(printable(found.path)), show_header=False)
    known = found.model_type is not None
    rows = {
        "family": f"{found.family} ({found.model_type})" if known else "?",
        "parameters": _sum(found.parameters, "{:,}".format),
        "context": "?" if found.context is None else f"{found.context:,} positions",
        "vocabulary": "?" if found.vocabulary is None else f"{found.vocabulary:,} tokens",
        "dtype": ", ".join(f"{name} {human_bytes(size)}" for name, size in found.dtypes.items()),
        "image tokens": "-" if found.image_tokens is None else f"{found.image_tokens} an image",
        "chat template": {None: "-", True: "yes", False: "no"}[found.chat_template],
        "files": _sum(found.files, human_bytes),
        "loads": "no" if found.problems else "yes",
    }
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    for number, problem in enumerate(found.problems, 1):
        table.add_row(f"problem {number}", Text(printable(problem), style="red"))
    return table


def _sum(parts: dict[str, int], word: object) -> str:
    assert callable(word)
    lines = [f"{word(sum(parts.values()))}"] if len(parts) != 1 else []
    return "\n".join([*lines, *(f"  {name} {word(count)}" for name, count in parts.items())])

"""Read and write files of JSON: one value, or a row a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_lines(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def change_json(file: Path, **entries: Any) -> None:
    """Set entries of a file; None stays a value."""
    file.write_text(json.dumps(read_json(file) | entries), encoding="utf-8")

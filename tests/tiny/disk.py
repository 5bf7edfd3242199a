"""Make a disk without room for files, and .bin weights as they are distributed."""

from __future__ import annotations

import io
import resource
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def full_disk(room: int = 1 << 16) -> Iterator[None]:
    """Let no file grow over so many bytes, as if there were no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_bin(tensors: dict[str, Any], file: Path) -> None:
    """Save with torch as 1.6 to 2.0 did: without the records that later versions add."""
    import torch

    whole = io.BytesIO()
    torch.save(tensors, whole)
    with zipfile.ZipFile(whole) as found, zipfile.ZipFile(file, "w") as old:
        for name in found.namelist():
            record = name.partition("/")[2]
            if record in ("data.pkl", "version") or record.startswith("data/"):
                old.writestr(f"archive/{record}", found.read(name))

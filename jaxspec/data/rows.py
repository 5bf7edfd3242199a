"""Rows of a data set, streamed: parquet and JSONL on disk, and parquet on the Hugging Face hub.

A row is a dict by column names, in whichever of the three it lies; with it comes its place, for errors. Parquet is
read a few rows at a time and only in the columns asked for; row groups that a filter leaves empty are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError

SUFFIXES = (".parquet", ".jsonl")
BATCH = 8
"""Rows of a parquet file in memory at a time: images make them large."""


@dataclass(frozen=True)
class Row:
    """One row and where it was found."""

    place: str
    """File and number, from 1, as errors name it."""
    values: dict[str, Any]
    folder: Path | None
    """What image paths in the row are relative to; None on the hub."""


ANY = re.compile(".*")


def local_rows(path: Path, columns: re.Pattern[str] = ANY, only: tuple[str, str] | None = None) -> Iterator[Row]:
    """Rows of a file, or of all `.parquet` or all `.jsonl` files of a folder in the order of their names.

    Args:
      columns: what the names of the wanted columns match in full.
      only: keep rows with this value of this column.
    """
    for file in _files(path):
        if file.suffix == ".jsonl":
            yield from (row for row in _json_rows(file) if only is None or row.values.get(only[0]) == only[1])
        else:
            with file.open("rb") as handle:
                yield from _parquet_rows(handle, str(file), file.parent, columns, only)


def hub_rows(
    repository: str,
    config: str,
    split: str,
    columns: re.Pattern[str],
    only: tuple[str, str] | None,
    filesystem: Any | None = None,
) -> Iterator[Row]:
    """Rows of a public data set, from the parquet copy that the hub keeps of every one.

    Of each file only the columns and row groups that are needed come over the network.

    Args:
      filesystem: an fsspec file system in place of the hub's.
    """
    from huggingface_hub import HfFileSystem
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are the error types of whichever HTTP client the hub's library uses.
    unreachable: Any = (OSError, *HfHubHTTPError.__bases__)
    files: Any = HfFileSystem() if filesystem is None else filesystem
    root = f"datasets/{repository}@refs/convert/parquet/{config}"
    try:
        # The hub copies only the beginning of very large splits, under the second name.
        shards = files.glob(f"{root}/{split}/*.parquet") or files.glob(f"{root}/partial-{split}/*.parquet")
        if not shards:
            raise FileNotFoundError("it has no such split")
        for shard in sorted(shards):
            with files.open(shard, "rb") as handle:
                yield from _parquet_rows(handle, shard, None, columns, only)
    except unreachable as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        raise InputError(
            f"hub data set {repository}, config {config}, split {split}: cannot be read ({reason}); "
            "give a local copy with --data NAME=PATH (of worked examples, with --shots)"
        ) from error


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise InputError(f"data {path}: not a {' or '.join(SUFFIXES)} file; convert it to one of these")
        return [path]
    if not path.is_dir():
        raise InputError(f"data {path}: no such file or folder; check the path")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    kinds = {file.suffix for file in files}
    if len(kinds) != 1:
        found = "both .parquet and .jsonl files" if kinds else "neither .parquet nor .jsonl files"
        raise InputError(f"data {path}: the folder holds {found}; name one file, or leave one kind in it")
    return files


def _json_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield json_row(line, f"{file} line {number}", file.parent)


def json_row(line: bytes, place: str, folder: Path) -> Row:
    """The row that a line of JSONL holds; InputError naming its place where it holds none."""
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 text (byte {error.start}); convert it to UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON ({error.msg} at column {error.colno}); mend the line") from error
    if not isinstance(values, dict):
        raise InputError(f"{place}: a JSON {type(values).__name__}, not an object; write one object a line")
    return Row(place, values, folder)


def _parquet_rows(
    handle: Any, name: str, folder: Path | None, columns: re.Pattern[str], only: tuple[str, str] | None
) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError("parquet: pyarrow is not installed; pip install 'jaxspec[benchmarks]'") from error
    try:
        file = ParquetFile(handle)
        wanted = [column for column in file.schema_arrow.names if columns.fullmatch(column)]
        before = 0
        for group in range(file.num_row_groups):
            if _holds(file, group, only):
                number = before
                for batch in file.iter_batches(BATCH, row_groups=[group], columns=wanted):
                    for values in batch.to_pylist():
                        number += 1
                        if only is None or values.get(only[0]) == only[1]:
                            yield Row(f"{name} row {number}", values, folder)
            before += file.metadata.row_group(group).num_rows
    except (ArrowException, OSError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
        raise InputError(f"data {name}: cannot be read as parquet ({reason}); fetch it again") from error


def _holds(file: Any, group: int, only: tuple[str, str] | None) -> bool:
    """Whether any row of the group has the value asked for; a look at that one column."""
    if only is None or only[0] not in file.schema_arrow.names:
        return only is None
    return only[1] in file.read_row_group(group, columns=[only[0]])[only[0]].to_pylist()

"""Read rows of data files: parquet, JSONL, JSON lists and prepared TFDS data.

A row is a dict by column names, with its file and number for errors. Parquet is read a few rows at
a time, in the wanted columns only; row groups without a wanted row are skipped. Strangers write
these files: a row that cannot be read is an InputError in its place, and the next rows are read.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.data.tfds_records import TFDS, tfds_records
from jaxspec.errors import InputError, first_line, needing, reading
from jaxspec.files import lacking_files

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
BATCH = 8
"""Rows of a parquet file in memory at a time: images make them large."""
LONGEST = 1 << 26
"""Bytes of a line of JSONL."""
ANY = re.compile(".*")


@dataclass(frozen=True)
class DataRow:
    """Hold one row and its origin."""

    origin: str
    """File and number, from 1, for errors."""
    values: dict[str, Any]
    """Columns by name. A null is left out: parquet has all columns in each row."""
    folder: Path | None
    """The folder of relative image paths; None on the hub."""
    confined: bool = True
    """Image paths must not lead out of the folder, except through the owner's links in it."""


def local_rows(
    path: Path, columns: re.Pattern[str] = ANY, only: tuple[str, str] | None = None
) -> Iterator[DataRow]:
    """Yield the rows of `rows_and_errors`. Raises InputError at the first unreadable row."""
    yield from raised(rows_and_errors(path, columns, only))


def rows_and_errors(
    path: Path, columns: re.Pattern[str] = ANY, only: tuple[str, str] | None = None
) -> Iterator[DataRow | InputError]:
    """Yield rows of a file, or of a folder's `.parquet` or `.jsonl` files by their names' order.

    `tfds:NAME` and `tfds:FOLDER` are prepared TFDS data, with `@SPLIT` where there are several. An
    unreadable row is an InputError, not raised. Raises InputError where the file itself fails.

    Args:
      columns: Pattern that the names of the wanted columns match in full.
      only: Column and value of the wanted rows; row groups of parquet without any are skipped.
    """
    if str(path).startswith(TFDS):
        for record in tfds_records(str(path)):
            yield record if isinstance(record, InputError) else DataRow(*record, None)
    else:
        for file in _files(path):
            yield from _file_rows(file, columns, only)


def raised(rows: Iterable[DataRow | InputError]) -> Iterator[DataRow]:
    """Yield rows, and raise the first InputError among them."""
    for row in rows:
        if isinstance(row, InputError):
            raise row
        yield row


def json_list(file: Path) -> Iterator[DataRow | InputError]:
    """Yield the rows of a `.json` file, which is a list of objects, or an object in each line.

    Yields an InputError for each element that is no row. Raises InputError for a file that is
    neither.
    """
    with reading(f"data {file}: not JSON", "mend the file"):
        content = file.read_bytes()
        try:
            values = json.loads(content)
        except json.JSONDecodeError:
            first = content.lstrip().partition(b"\n")[0]
            if not first.startswith(b"{") or not json.loads(first):
                raise
            yield from _lines(io.BytesIO(content), file)
            return
    if not isinstance(values, list):
        kind = type(values).__name__
        raise InputError(f"data {file}: a JSON {kind}, not a list of rows; name JSONL .jsonl")
    for number, value in enumerate(values, 1):
        yield _row(value, f"{file} row {number}", file.parent)


def parquet_rows(
    handle: Any,
    name: str,
    folder: Path | None,
    columns: re.Pattern[str],
    only: tuple[str, str] | None,
) -> Iterator[DataRow | InputError]:
    """Yield the rows of an open parquet file, without row groups that hold no wanted row."""
    with needing("parquet", "benchmarks"):
        from pyarrow.parquet import ParquetFile
    with reading(f"data {name}: cannot be read as parquet", "fetch it again"):
        file = ParquetFile(handle)
        names = [column for column in file.schema_arrow.names if columns.fullmatch(column)]
        before = 0
        for group in range(file.num_row_groups):
            number = before
            batches = file.iter_batches(BATCH, row_groups=[group], columns=names)
            for batch in batches if _holds(file, group, only) else ():
                for i in range(batch.num_rows):
                    number += 1
                    yield _parquet_row(batch.slice(i, 1), f"{name} row {number}", folder)
            before += file.metadata.row_group(group).num_rows


def _parquet_row(row: Any, origin: str, folder: Path | None) -> DataRow | InputError:
    try:
        with reading(f"{origin}: a value cannot be read", "mend the row"):
            return DataRow(origin, _without_nulls(row.to_pylist()[0]), folder)
    except InputError as error:
        return error


def _files(path: Path) -> list[Path]:
    """Return the files of a file's or folder's path, in order."""
    if os.path.isfile(path):  # not `Path.is_file`, which raises for names that are too long
        if not path.name.endswith(SUFFIXES):
            raise InputError(f"data {path}: not a {' or '.join(SUFFIXES)} file; convert it")
        return [path]
    if not os.path.isdir(path):
        raise InputError(f"data {path}: no such file or folder; check the path")
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
    kinds = {file.suffix == ".parquet" for file in files}
    if len(kinds) != 1:
        suffixes = "both .parquet and .jsonl" if kinds else "neither .parquet nor .jsonl"
        raise InputError(f"data {path}: the folder holds {suffixes} files; name one file of it")
    if lacking := lacking_files(files):
        raise InputError(f"data {path}: the folder holds {lacking}; fetch the others")
    return files


def _file_rows(
    file: Path, columns: re.Pattern[str], only: tuple[str, str] | None
) -> Iterator[DataRow | InputError]:
    with (
        reading(f"data {file}: not readable", "fetch it again"),
        gzip.open(file) if file.suffix == ".gz" else file.open("rb") as handle,
    ):
        if file.suffix == ".parquet":
            yield from parquet_rows(handle, str(file), file.parent, columns, only)
        else:
            yield from _lines(handle, file)


def _lines(handle: Any, file: Path) -> Iterator[DataRow | InputError]:
    """Yield the rows of a JSONL file. Only "\\n" ends a line: texts may hold U+2028."""
    for number, line in enumerate(iter(lambda: handle.readline(LONGEST), b""), 1):
        origin = f"{file} line {number}"
        if len(line) == LONGEST:
            raise InputError(f"{origin}: {LONGEST} bytes or more; split the row")
        if line.strip():
            try:
                yield _row(json.loads(line), origin, file.parent)
            except (ValueError, RecursionError) as error:
                yield InputError(f"{origin}: not JSON ({first_line(error)}); mend the line")


def _row(values: Any, origin: str, folder: Path) -> DataRow | InputError:
    """Return the row of a JSON object, or an InputError."""
    if not isinstance(values, dict):
        kind = type(values).__name__
        return InputError(f"{origin}: a JSON {kind}, not an object; write one object a row")
    try:  # JSON may spell half a character, which no file can hold
        json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return InputError(f"{origin}: cannot be written ({first_line(error)}); mend the row")
    return DataRow(origin, _without_nulls(values), folder)


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _holds(file: Any, group: int, only: tuple[str, str] | None) -> bool:
    """Return whether any row of the group has the wanted value; it reads that one column."""
    if only is None or only[0] not in file.schema_arrow.names:
        return only is None
    return only[1] in file.read_row_group(group, columns=[only[0]])[only[0]].to_pylist()

"""Rows of a data set, streamed: parquet, JSONL, JSON lists and TFDS on disk, and sets and files of the hub.

A row is a dict by column names, wherever it lies; with it comes its place, for errors. Parquet is read a few rows at
a time and only in the columns asked for; row groups that a filter leaves empty are not read. Strangers write such
files: a row that is none is an InputError in its place, and the rows behind it are read all the same.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.data.images import as_png
from jaxspec.errors import InputError, first_line, nearest

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
TFDS = "tfds:"
HUB = "hub:"
_NAME_AND_SPLIT = re.compile(r"(.*?)(?:@([^@/]+))?")
BATCH = 8
"""Rows of a parquet file in memory at a time: images make them large."""
DEEPEST = 100
"""Levels of lists and objects in a row; far below those at which Python gives up."""
_NUMBERED = re.compile(r"(.*)-\d+-of-(\d+)(\..*)")
"""The name of one of several files: its beginning, how many there are, its end."""
_PARQUET = "refs/convert/parquet"
"""The branch of the parquet copies that the hub makes."""

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{},]', re.DOTALL)
"""A string, or what opens, closes and parts values."""
_HALF = re.compile("[\ud800-\udfff]")
"""A surrogate, half of a character: JSON may spell one, and no file can hold it."""


@dataclass(frozen=True)
class DataRow:
    """One row and where it was found."""

    place: str
    """File and number, from 1, as errors name it."""
    values: dict[str, Any]
    folder: Path | None
    """What image paths in the row are relative to; None on the hub."""
    confined: bool = True
    """Image paths may not lead out of the folder; links in it, which its owner laid, may."""


ANY = re.compile(".*")


def local_rows(
    path: Path, columns: re.Pattern[str] = ANY, only: tuple[str, str] | None = None
) -> Iterator[DataRow]:
    """Yield the rows that `rows_and_errors` finds. Raises InputError at the first that is none."""
    yield from _raised(rows_and_errors(path, columns, only))


def rows_and_errors(
    path: Path, columns: re.Pattern[str] = ANY, only: tuple[str, str] | None = None
) -> Iterator[DataRow | InputError]:
    """Yield rows of a file, or of all `.parquet` or all `.jsonl` files of a folder in the order of their names.

    `tfds:NAME` and `tfds:FOLDER` are TFDS data sets that are prepared, with `@SPLIT` behind it where there are several.

    What cannot be read as a row is an InputError, not raised. Raises InputError where a file cannot be read on.

    Args:
      columns: what the names of the wanted columns match in full.
      only: keep rows with this value of this column.
    """
    if str(path).startswith(TFDS):
        found = _tfds_rows(str(path))
        yield from (
            row for row in found if only is None or isinstance(row, InputError) or _kept(row, only)
        )
        return
    for file in _files(path):
        packed = file.suffix == ".gz"
        try:
            with gzip.open(file) if packed else file.open("rb") as handle:
                if packed or file.suffix == ".jsonl":
                    rows = _lines(handle, file)
                    yield from (
                        r
                        for r in rows
                        if only is None or isinstance(r, InputError) or _kept(r, only)
                    )
                else:
                    yield from _parquet_rows(handle, str(file), file.parent, columns, only)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"data {file}: cannot be read as gzip ({first_line(error)}); fetch it again"
            ) from error
        except OSError as error:
            raise InputError(
                f"data {file}: cannot be read ({error.strerror}); check its permissions"
            ) from error


def _raised(rows: Iterator[DataRow | InputError]) -> Iterator[DataRow]:
    for row in rows:
        if isinstance(row, InputError):
            raise row
        yield row


def _kept(row: DataRow, only: tuple[str, str]) -> bool:
    return row.values.get(only[0]) == only[1]


def on_disk(path: Path) -> Path:
    """Return where data lie: `path` itself, or that of `hub:OWNER/NAME/FILE`, a file of a data set on the hub.

    `hub:OWNER/NAME` is the folder of all its files that have rows, and FILE may be a folder too. They are fetched as
    their repository holds them, and kept in the hub's cache, from which they are read where there is no network.
    """
    place = str(path)
    if not place.startswith(HUB):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    owner, name, file = (*place.removeprefix(HUB).split("/", 2), "", "")[:3]
    fetch = f"hf download {owner}/{name}{file and f' {file}'} --repo-type dataset"
    wanted = [file, f"{file}/*"] if file else [f"*{suffix}" for suffix in SUFFIXES]
    unreachable: Any = (OSError, ValueError, *HfHubHTTPError.__bases__)
    try:
        folder = Path(
            snapshot_download(f"{owner}/{name}", repo_type="dataset", allow_patterns=wanted)
        )
    except unreachable as error:
        told = f"not to be had from the hub ({first_line(error)}); check the id, or fetch it elsewhere ({fetch})"
        raise InputError(f"data {place}: {told}") from error
    if not (folder / file).exists():
        raise InputError(
            f"data {place}: there is no such file; check its name, or fetch it elsewhere ({fetch})"
        )
    return folder / file


def hub_rows(
    repository: str,
    config: str,
    split: str,
    columns: re.Pattern[str],
    only: tuple[str, str] | None,
) -> Iterator[DataRow]:
    """Yield rows of a public data set, from the parquet copy that the hub keeps of every one.

    Of each file only the columns and row groups that are needed come over the network. Where the hub is not to be had,
    or HF_HUB_OFFLINE says so, they come from its local cache (`hf download OWNER/NAME --repo-type dataset`).
    """
    from fsspec.implementations.local import LocalFileSystem
    from huggingface_hub import HfFileSystem
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are the error types of whichever HTTP client the hub's library uses.
    unreachable: Any = (OSError, *HfHubHTTPError.__bases__)
    files: Any = HfFileSystem()
    root = f"datasets/{repository}@{_PARQUET}/{config}"
    try:
        try:
            # The hub copies only the beginning of very large splits, under the second name.
            shards = files.glob(f"{root}/{split}/*.parquet") or files.glob(
                f"{root}/partial-{split}/*.parquet"
            )
            if not shards:
                raise FileNotFoundError("it has no such split")
        except unreachable:
            shards, files = _cached_shards(repository, config, split), LocalFileSystem()
            if not shards:
                raise
        for shard in sorted(shards):
            with files.open(shard, "rb") as handle:
                yield from _raised(_parquet_rows(handle, shard, None, columns, only))
    except unreachable as error:
        raise InputError(
            f"hub data set {repository}, config {config}, split {split}: cannot be read ({first_line(error)}); "
            f"fetch it where there is a network (hf download {repository} --repo-type dataset), or give a local copy "
            "with --data NAME=PATH (of worked examples, with --shots)"
        ) from error


def _cached_shards(repository: str, config: str, split: str) -> list[str]:
    """Return the files of a split in the hub's local cache, if there are any: of the parquet copy, or those that the
    data set's card names. Raises FileNotFoundError where only some of them are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def cached(revision: str | None, *patterns: str) -> list[Path]:
        where: Any = {"repo_type": "dataset", "revision": revision, "local_files_only": True}
        try:
            folder = Path(snapshot_download(repository, allow_patterns=list(patterns), **where))
        except LocalEntryNotFoundError as error:
            if (
                type(error) is not LocalEntryNotFoundError
            ):  # a download that was stopped, where it is known
                raise
            return []
        return sorted(file for pattern in patterns for file in folder.glob(pattern))

    files = cached(_PARQUET, f"{config}/{split}/*.parquet", f"{config}/partial-{split}/*.parquet")
    if not files and (card := cached(None, "README.md")):
        files = cached(None, *_named_by(card[0], config, split))
    if lacking := _lacking(files):
        raise FileNotFoundError(f"the hub's cache holds {lacking}")
    return [str(file) for file in files]


def _lacking(files: Iterable[Path]) -> str:
    """Return what tells that files of a numbered set are not there, `train-00000-of-00002.parquet` alone; or ""."""
    sets = Counter(
        (file.parent, *found.groups())
        for file in files
        if (found := _NUMBERED.fullmatch(file.name))
    )
    told = (
        f"{n} of the {int(of)} files {name}-*-of-{of}{end}"
        for (_, name, of, end), n in sets.items()
        if n != int(of)
    )
    return next(told, "")


def _named_by(card: Path, config: str, split: str) -> list[str]:
    """Return the patterns of the parquet files of a split, as the card of a data set names them."""
    from huggingface_hub import metadata_load

    try:
        configs = (metadata_load(card) or {})["configs"]
        parts = [
            part
            for entry in configs
            if entry["config_name"] == config
            for part in entry["data_files"]
        ]
        told = [part["path"] for part in parts if part["split"] == split]
    except Exception as error:  # whatever a stranger's YAML holds
        raise FileNotFoundError(f"{card} names no files of it") from error
    patterns = [pattern for path in told for pattern in ([path] if isinstance(path, str) else path)]
    return [pattern for pattern in patterns if re.fullmatch(r"\w(?!.*\.\.)[\w./*-]*", str(pattern))]


def _tfds_rows(place: str) -> Iterator[DataRow | InputError]:
    """Yield the records of a TFDS data set by their features; those of `train.prepare` as your own sets have them."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise InputError(
            f"data {place}: TFDS is not installed; pip install -e '.[train]'"
        ) from error
    name, split = _NAME_AND_SPLIT.fullmatch(place.removeprefix(TFDS)).groups("")  # type: ignore[union-attr]
    folders = [
        file.parent
        for version in ("", "*.*.*/")
        for file in sorted(Path(name).glob(f"{version}features.json"))
    ]
    try:
        read: Any = tfds.builder_from_directory if folders else tfds.builder
        builder = read(str(folders[-1]) if folders else name)
        splits = list(builder.info.splits)
        if not splits:
            raise InputError(
                f"data {place}: is not prepared; tfds build {name} --file_format array_record"
            )
        if split not in splits and (split or len(splits) > 1):
            mend = nearest(split, splits)
            raise InputError(
                f"data {place}: name its split, such as {TFDS}{name}@{splits[0]}; {mend}"
            )
        records: Any = builder.as_data_source(split or splits[0])
    except InputError:
        raise
    except Exception as error:  # of many kinds
        raise InputError(
            f"data {place}: TFDS cannot read it ({first_line(error)}); check name or folder"
        ) from error
    for number in range(len(records)):
        values = {key: _plain(value) for key, value in records[number].items()}
        if isinstance(turns := values.get("turns"), dict):
            values |= {"turns": turns["question"], "reference": turns["answer"]}
        yield _row(values, f"{place} record {number + 1}", None)


def _plain(value: Any) -> Any:
    """Return a value of TFDS as JSON and the hub have it: bytes are text, or an image's; pixels are a PNG."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes": value}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if getattr(value, "ndim", 0) == 3 and value.dtype == "uint8":
        return {"bytes": as_png(value)}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _files(path: Path) -> list[Path]:
    if os.path.isfile(path):  # not `Path.is_file`, which raises for names that are too long
        if not path.name.endswith(SUFFIXES):
            raise InputError(
                f"data {path}: not a {' or '.join(SUFFIXES)} file; convert it to one of these"
            )
        return [path]
    if not os.path.isdir(path):
        raise InputError(f"data {path}: no such file or folder; check the path")
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
    kinds = {file.suffix == ".parquet" for file in files}
    if len(kinds) != 1:
        found = "both .parquet and .jsonl files" if kinds else "neither .parquet nor .jsonl files"
        raise InputError(
            f"data {path}: the folder holds {found}; name one file, or leave one kind in it"
        )
    if lacking := _lacking(files):
        raise InputError(
            f"data {path}: the folder holds {lacking}; fetch the others, or name one file"
        )
    return files


def _lines(lines: Any, file: Path) -> Iterator[DataRow | InputError]:
    """Yield the rows of a JSONL file, which "\\n" alone parts: other characters that end lines may stand in a text."""
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(BOM_UTF8)
        if line.strip():
            place = f"{file} line {number}"
            try:
                values = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                yield InputError(f"{place}: {_reason(error)}; mend the line")
            else:
                yield _row(values, place, file.parent)


def json_list(file: Path) -> Iterator[DataRow | InputError]:
    """Yield the rows of a `.json` file that is a list of objects; InputError, not raised, in place of what is none.

    Raises InputError where the file is no list, or the list has no end.
    """
    try:
        text = file.read_bytes().removeprefix(BOM_UTF8).decode()
    except OSError as error:
        raise InputError(
            f"data {file}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"data {file}: {_reason(error)}; convert it to UTF-8") from error
    at = _after_space(text, 0)
    if text[at : at + 1] != "[":
        raise InputError(
            f"data {file}: not a list of rows; write a JSON list, or name JSONL .jsonl"
        )
    at, number = _after_space(text, at + 1), 0
    while text[at : at + 1] != "]":
        number += 1
        place = f"{file} row {number}"
        try:
            values, end = _DECODER.raw_decode(text, at)
            end = _after_space(text, end)
            if text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
            found = _row(values, place, file.parent)
        except (ValueError, RecursionError) as error:
            end = _end_of_value(text, at)
            found = InputError(f"{place}: {_reason(error)}; mend the row")
        if end == len(text):
            raise InputError(f"{place}: the list ends in the middle of it; fetch the file again")
        yield found
        at = _after_space(text, end + 1) if text[end] == "," else end
    if text[at + 1 :].strip():
        raise InputError(f"data {file}: more stands behind the end of the list; name JSONL .jsonl")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _end_of_value(text: str, at: int) -> int:
    """Return where the comma or bracket stands that ends a list's element, whatever that holds; else the text's end."""
    depth = 0
    for mark in _MARK.finditer(text, at):
        if depth == 0 and mark[0] in (",", "]"):
            return mark.start()
        depth += (mark[0] in ("[", "{")) - (mark[0] in ("]", "}"))
    return len(text)


def _reason(error: Exception) -> str:
    """Return why text is no JSON."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start})"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    return (
        f"nested over {DEEPEST} deep"
        if isinstance(error, RecursionError)
        else "a number of thousands of digits"
    )


def _row(values: Any, place: str, folder: Path | None) -> DataRow | InputError:
    """Return the row of these values, if they are those of one, and can be written down again."""
    if not isinstance(values, dict):
        return InputError(
            f"{place}: a JSON {type(values).__name__}, not an object; write one object a row"
        )
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str) and not value.isascii() and (half := _HALF.search(value)):
                return InputError(
                    f"{place}: half of a character ({half[0]!r}) in a text; mend the row"
                )
        if not below:
            return DataRow(place, values, folder)
        level = below
    return InputError(f"{place}: nested over {DEEPEST} deep; mend the row")


def _parquet_rows(
    handle: Any,
    name: str,
    folder: Path | None,
    columns: re.Pattern[str],
    only: tuple[str, str] | None,
) -> Iterator[DataRow | InputError]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            "parquet: pyarrow is not installed; pip install -e '.[benchmarks]'"
        ) from error
    try:
        file = ParquetFile(handle)
        wanted = [column for column in file.schema_arrow.names if columns.fullmatch(column)]
        before = 0
        for group in range(file.num_row_groups):
            if _holds(file, group, only):
                number = before
                for batch in file.iter_batches(BATCH, row_groups=[group], columns=wanted):
                    for i in range(batch.num_rows):
                        number += 1
                        place = f"{name} row {number}"
                        try:
                            (values,) = batch.slice(i, 1).to_pylist()
                        except (ArrowException, ValueError, OverflowError, RecursionError) as error:
                            yield InputError(
                                f"{place}: a value of it cannot be read ({first_line(error)}); mend the row"
                            )
                        else:
                            if only is None or values.get(only[0]) == only[1]:
                                yield _row(values, place, folder)
            before += file.metadata.row_group(group).num_rows
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"data {name}: cannot be read as parquet ({first_line(error)}); fetch it again"
        ) from error


def _holds(file: Any, group: int, only: tuple[str, str] | None) -> bool:
    """Return whether any row of the group has the value asked for; a look at that one column."""
    if only is None or only[0] not in file.schema_arrow.names:
        return only is None
    return only[1] in file.read_row_group(group, columns=[only[0]])[only[0]].to_pylist()

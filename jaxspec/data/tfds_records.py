"""Read records of prepared TFDS data, with the values that rows of JSON and of the hub have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.data.images import as_png
from jaxspec.errors import InputError, nearest, needing, reading

TFDS = "tfds:"
_PREPARED = {"images", "sizes", "turns"}
"""Columns that only prepared training data have together."""
_NAME_AND_SPLIT = re.compile(r"(.*?)(?:@([^@/]+))?")


def tfds_records(address: str) -> Iterator[tuple[str, dict[str, Any]] | InputError]:
    """Yield origin and values of a TFDS data set's records.

    A record that cannot be read is an InputError in its place. Records of `train.prepare` get the
    columns of your own sets (`jaxspec/data/samples.py`).
    """
    with needing(f"data {address}", "train"):
        import tensorflow_datasets as tfds
    name, split = _NAME_AND_SPLIT.fullmatch(address.removeprefix(TFDS)).groups("")  # type: ignore
    versions = [file.parent for file in Path(name).glob("*.*.*/features.json")]
    versions.sort(key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)])
    folders = [*(file.parent for file in Path(name).glob("features.json")), *versions]
    with reading(f"data {address}: TFDS cannot read it", "check name or folder"):
        read: Any = tfds.builder_from_directory if folders else tfds.builder
        builder = read(str(folders[-1]) if folders else name)
        splits = list(builder.info.splits)
        if not splits:
            build = f"tfds build {name} --file_format array_record"
            raise InputError(f"data {address}: is not prepared; {build}")
        if split not in splits and (split or len(splits) > 1):
            mend = f"such as {TFDS}{name}@{splits[0]}; {nearest(split, splits)}"
            raise InputError(f"data {address}: name its split, {mend}")
        records: Any = builder.as_data_source(split or splits[0])
    for number in range(len(records)):
        origin = f"{address} record {number + 1}"
        try:
            with reading(f"data {origin}: cannot be read", "mend the record"):
                values = _values_of(records, number)
        except InputError as error:
            yield error
        else:
            yield origin, values


def _values_of(records: Any, number: int) -> dict[str, Any]:
    """Return the values of a record by column."""
    record = records[number]
    values = {key: _plain(value) for key, value in record.items()}
    if values.keys() >= _PREPARED:
        turns = values["turns"]
        images = [{"bytes": image} for image in images_of(records, number, record)]
        answers = {"reference": turns["answer"], "images": images}
        values |= {"turns": turns["question"], **answers}
    return values


def images_of(records: Any, index: int, record: Mapping[str, Any]) -> list[bytes]:
    """Return the images of a prepared record, each held by the first record that shows it.

    `shown` [[3, 0], [7, 0]] of record 7: the first image of record 3, then the first of its own.
    """
    images = {index: record["images"]}
    for row in {int(row) for row, _ in record["shown"]} - {index}:
        images[row] = records[row]["images"]
    return [bytes(images[int(row)][int(number)]) for row, number in record["shown"]]


def _plain(value: Any) -> Any:
    """Return a TFDS value in JSON's and the hub's form: text, image bytes, or pixels as PNG."""
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

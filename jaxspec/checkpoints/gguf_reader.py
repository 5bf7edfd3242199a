"""Reading a GGUF file: its metadata and where its tensors are, without the lists that nobody uses.

A file is a header (magic, version, number of tensors, number of entries), then the entries (name,
type, value), then the table of tensors, then their data.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md is the format.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Container
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

_NUMBERS = "BbHhIif?__Qqd"
"""The `struct` letter of each numeric type, by its number in the format."""
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """A tensor that is mapped and not read yet.

    Fields:
      kind: The `gguf` package's GGMLQuantizationType.
      shape: Shape of the numbers, rows first.
      data: What `gguf.dequantize` takes: floats, or bytes of blocks.
    """

    name: str
    kind: Any
    shape: tuple[int, ...]
    data: np.ndarray


def read_gguf(file: Path, texts: Container[str]) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata and the tensors of a file, by name.

    Args:
      texts: Names of the lists of texts to read; the others are skipped. A list of numbers is a
        numpy array.

    Raises ValueError where the file contradicts itself.
    """
    with open(file, "rb") as stream:
        at = _Cursor(memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)))
    if at.take(4) != b"GGUF":
        raise ValueError("its magic number is not that of GGUF")
    if (version := at.number("I")) not in (2, 3):
        raise ValueError(f"version {version}, supported: 2, 3")
    tensors, entries = at.number("Q"), {}
    for _ in range(at.number("Q")):
        name = at.text()
        entries[name] = at.value(at.number("I"), name in texts)
    table = [(at.text(), at.shape(), at.number("I"), at.number("Q")) for _ in range(tensors)]
    alignment = int(entries.get("general.alignment", 32))
    start = -(-at.place // alignment) * alignment
    return entries, {
        name: _tensor(name, shape, kind, at.data[start + offset :])
        for name, shape, kind, offset in table
    }


def _tensor(name: str, shape: tuple[int, ...], number: int, data: memoryview) -> GGUFTensor:
    package: Any = import_module("gguf")
    kind = package.GGMLQuantizationType(number)
    item = {"F32": np.float32, "F16": np.float16}.get(kind.name)
    stored = shape if item else package.quants.quant_shape_to_byte_shape(shape, kind)
    dtype, count = np.dtype(item or np.uint8), prod(stored)
    if count * dtype.itemsize > len(data):
        raise ValueError(f"it ends early, within {name}")
    return GGUFTensor(name, kind, shape, np.frombuffer(data, dtype, count).reshape(stored))


@dataclass
class _Cursor:
    """A place in the bytes of a file, which moves on with what is read."""

    data: memoryview
    place: int = 0

    def take(self, count: int) -> memoryview:
        end = self.place + count
        if end > len(self.data):
            raise ValueError("it ends early")
        part = self.data[self.place : end]
        self.place = end
        return part

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def shape(self) -> tuple[int, ...]:
        """Return a tensor's shape: the file counts from the fastest axis."""
        return tuple(self.number("Q") for _ in range(self.number("I")))[::-1]

    def value(self, kind: int, texts: bool) -> Any:
        """Return an entry's value; None for a list of texts that is not wanted."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind == _TEXT and texts:
            return [self.text() for _ in range(count)]
        if kind == _TEXT:
            for _ in range(count):
                self.take(self.number("Q"))
            return None
        dtype = np.dtype("<" + _NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

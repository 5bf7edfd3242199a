"""Reading files of weights: which tensors a directory's files hold, and any box of one without the rest.

The bytes of a box are read by position into an array of that box's size. Nothing is mapped into memory: a mapped
file counts against the host for as long as it is open, and a slice of columns maps all of it. What a process does
not ask for, it does not read.

Safetensors and PyTorch's .bin are both read so; they differ in how a file's tensors are listed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jaxspec.checkpoints.directories import (
    BIN,
    BIN_INDEX,
    INDEX,
    SINGLE,
    what_lies_in,
    without_torch,
)
from jaxspec.checkpoints.torch_files import list_torch_file
from jaxspec.errors import InputError, first_line

FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""What parameters may be stored as. Other dtypes are those of quantised models."""
_CHUNK = 1 << 19
"""Numbers looked at together, so that they stay in the processor's cache."""

Box = Sequence[slice]
"""A slice of step 1 along every axis."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, not read yet."""

    name: str
    file: Path
    dtype: str
    """The format's name of it, such as BF16."""
    shape: tuple[int, ...]
    offset: int
    """Place of its first byte in the file."""
    nbytes: int

    def read(self, box: Box | None = None) -> np.ndarray:
        """Return the tensor, or a box of it, reading no other bytes. Raises InputError if the file ends early."""
        spans = [
            part.indices(size)[:2]
            for part, size in zip(box or [slice(None)] * len(self.shape), self.shape)
        ]
        out = np.empty([stop - start for start, stop in spans], FLOATS[self.dtype])
        # Up to the last axis that is not whole, the box lies in runs; they are what is read.
        cut = max([i for i, size in enumerate(self.shape) if out.shape[i] != size], default=0)
        strides = [math.prod(self.shape[i + 1 :]) * out.itemsize for i in range(len(self.shape))]
        first = self.offset + sum(start * stride for (start, _), stride in zip(spans, strides))
        runs = (
            out.reshape(-1).view(np.uint8).reshape(math.prod(out.shape[:cut]), -1)
            if out.size
            else []
        )
        with open(self.file, "rb", buffering=0) as file:
            for outer, run in zip(np.ndindex(*out.shape[:cut]), runs):
                at = first + sum(i * stride for i, stride in zip(outer, strides))
                _read_fully(file, run.data, at)
        return out


def check_finite(tensor: StoredTensor, numbers: np.ndarray) -> None:
    """Raise InputError where a tensor holds infinity or NaN.

    Infinity is the least number, unsigned or signed, whose exponent's bits are all set, and NaN is above it. numpy
    compares integers at the speed of memory, and bfloat16 ten times slower.
    """
    bits = numbers.reshape(-1).view(f"u{numbers.itemsize}")
    above, below = (np.array(end, numbers.dtype).view(bits.dtype) for end in (np.inf, -np.inf))
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        if part.max() >= below or part.view(f"i{part.itemsize}").max() >= above:
            raise InputError(
                f"{tensor.file}: {tensor.name} holds NaN or infinity; fetch it again, or another model"
            )


def _read_fully(file: Any, buffer: memoryview, at: int) -> None:
    file.seek(at)
    while buffer.nbytes:
        count = file.readinto(buffer)
        if not count:
            raise InputError(f"{file.name}: ends before its tensors do; fetch it again")
        buffer = buffer[count:]


def list_file(file: Path) -> list[StoredTensor]:
    """Return the tensors of one file of weights, in name order. Raises InputError where it is cut short or corrupt."""
    try:
        if file.suffix == ".bin":
            tensors = [
                StoredTensor(name, file, *place) for name, place in list_torch_file(file).items()
            ]
        else:
            tensors = _in_safetensors(file)
        if strange := [tensor.name for tensor in tensors if not tensor.name.isprintable()]:
            raise ValueError(f"a tensor is called {strange[0][:60]!r}")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{file}: named by the index and not there; fetch it") from None
    except Exception as error:
        raise InputError(f"{file}: unreadable ({first_line(error)}); fetch it again") from error
    return sorted(tensors, key=lambda tensor: tensor.name)


def _in_safetensors(file: Path) -> list[StoredTensor]:
    with safe_open(file, "np"):  # which holds the header against itself and the file's length
        pass
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return [
        StoredTensor(
            name, file, entry["dtype"], tuple(entry["shape"]), start + 8 + length, stop - start
        )
        for name, entry in header.items()
        for start, stop in [entry["data_offsets"]]
    ]


def list_directory(path: Path, problems: list[str]) -> list[StoredTensor]:
    """Return the tensors of one file, or of the shards of an index; tell `problems` what is wrong.

    Where there are safetensors and .bin, the first are read.
    """
    index: dict[str, str] | None = None
    found = next(
        (path / name for name in (SINGLE, INDEX, BIN, BIN_INDEX) if (path / name).is_file()), None
    )
    if found is None:
        mend = what_lies_in(path) or without_torch() or "save the model as safetensors"
        problems.append(f"{path}: no {SINGLE} and no {INDEX}; {mend}")
        return []
    if found.name in (BIN, BIN_INDEX) and (lack := without_torch()):
        problems.append(f"{found}: {lack}")
        return []
    files = [found]
    if found.suffix == ".json":
        try:
            index = read_index(found)
        except InputError as error:
            problems.append(str(error))
            return []
        files = [path / name for name in sorted(set(index.values()))]
    tensors: list[StoredTensor] = []
    readable = set()
    for file in files:
        try:
            tensors += list_file(file)
            readable.add(file.name)
        except InputError as error:
            problems.append(str(error))
    if index is not None:
        held = {(tensor.name, tensor.file.name) for tensor in tensors}
        problems += [
            f"{path / shard}: lacks {name}, which the index says it holds; fetch both again"
            for name, shard in sorted(index.items())
            if shard in readable and (name, shard) not in held
        ]
    return tensors


def read_index(file: Path) -> dict[str, str]:
    """Return the file of each tensor, by an index, which may name files of its own directory only."""
    try:
        return _checked(
            json.loads(file.read_text(encoding="utf-8"))["weight_map"], file.suffixes[-3]
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{file}: not readable as an index ({first_line(error)}); fetch it again"
        ) from error


def _checked(index: Any, ending: str) -> dict[str, str]:
    """Return an index, of which every entry names a file of this ending that lies beside it."""
    if not isinstance(index, dict):
        raise ValueError(f"its weight_map is {str(index)[:60]!r}")
    for shard in index.values():
        if not isinstance(shard, str) or not re.fullmatch(r"\w[\w. -]*" + re.escape(ending), shard):
            raise ValueError(
                f"it names {str(shard)[:60]!r}, and no file of its directory is called so"
            )
    return index

"""List the tensors of a directory's weight files, and read any box of one without the rest.

A tensor is mapped into memory only while a box of it is copied, so that the host never holds a
second copy of the model.

Safetensors and PyTorch's .bin differ only in how a file's tensors are listed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxspec.checkpoints.directories import (
    BIN,
    BIN_INDEX,
    INDEX,
    SINGLE,
    other_weights,
    read_json,
    without_torch,
)
from jaxspec.checkpoints.formats.torch_files import list_torch_file
from jaxspec.errors import InputError, collected, reading
from jaxspec.files import lacking_files

FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Supported dtypes of stored parameters; quantised models have others."""
INTEGERS = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
_BYTES = {"U8": np.dtype(np.uint8), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
_DTYPES = FLOATS | INTEGERS | _BYTES
"""Dtypes that can be read, by safetensors' names."""
_CHUNK = 1 << 19
"""Numbers that are checked at a time, so that they stay in the processor's cache."""

Box = Sequence[slice]
"""A slice of step 1 along every axis."""


@dataclass(frozen=True)
class StoredTensor:
    """Locate a tensor in a file.

    Fields:
      dtype: Safetensors' name, such as BF16.
      offset: Position of its first byte in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def whole_numbers(self) -> bool:
        """Return whether it holds integers that can be read."""
        return self.dtype in INTEGERS

    def read(self, box: Box | None = None) -> np.ndarray:
        """Return the tensor, or a box of it, and read no other bytes.

        Raises InputError where the file ends early, and for NaN and infinity.
        """
        with reading(f"{self.file}: ends before its tensors do", "fetch it again"):
            mapped = np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)
            out = np.array(mapped if box is None else mapped[tuple(box)])
        if self.dtype in FLOATS and not is_finite(out):
            raise InputError(f"{self.file}: {self.name} holds NaN or infinity; fetch it")
        return out


def is_finite(numbers: np.ndarray) -> bool:
    """Return whether floating-point numbers hold neither infinity nor NaN.

    As integers, unsigned or signed, infinity is the least number whose exponent bits are all set,
    and NaN is above it. numpy compares integers at the speed of memory, and bfloat16 ten times
    slower.
    """
    bits = numbers.reshape(-1).view(f"u{numbers.itemsize}")
    above, below = (np.array(end, numbers.dtype).view(bits.dtype) for end in (np.inf, -np.inf))
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        if part.max() >= below or part.view(f"i{part.itemsize}").max() >= above:
            return False
    return True


def list_file(file: Path) -> list[StoredTensor]:
    """Return the tensors of a weight file, in name order; InputError where it is corrupt."""
    if not file.exists():
        raise InputError(f"{file}: named by the index and not there; fetch it")
    with reading(f"{file}: unreadable", "fetch it again"):
        if file.suffix == ".bin":
            listed = list_torch_file(file)
            tensors = [StoredTensor(name, file, *entry) for name, entry in listed.items()]
        else:
            tensors = _in_safetensors(file)
        if strange := [tensor.name for tensor in tensors if not tensor.name.isprintable()]:
            raise ValueError(f"a tensor is called {strange[0][:60]!r}")
    return sorted(tensors, key=lambda tensor: tensor.name)


def _in_safetensors(file: Path) -> list[StoredTensor]:
    """List the tensors of a file by its header."""
    with safe_open(file, "np"):  # checks the header against itself and the file's length
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
    """Return the tensors of one file or of all shards; problems go to `problems`.

    Safetensors are read before .bin, and one file before shards. Shards need no index.
    """
    files: list[Path] = []
    with collected(problems):
        files = model_files(path)
    tensors: list[StoredTensor] = []
    for file in files:
        with collected(problems):
            tensors += list_file(file)
    return tensors


def shards_of(path: Path, single: str) -> list[Path]:
    """Return the shards that a directory holds in place of a single file, in name order."""
    stem, suffix = os.path.splitext(single)
    name = re.compile(rf"{stem}-\d+-of-\d+{re.escape(suffix)}")
    return sorted(file for file in path.iterdir() if name.fullmatch(file.name))


def model_files(path: Path) -> list[Path]:
    """Return the files of a directory's model; InputError where a file or a shard lacks."""
    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        shards = shards_of(path, single)
        files = [file for file in (path / single, path / index, *shards) if file.is_file()]
        if not files:
            continue
        if single == BIN and (lack := without_torch()):
            raise InputError(f"{files[0]}: {lack}")
        if files[0].name == single:
            return files[:1]
        if files[0].name == index:
            return [path / name for name in sorted(set(read_index(files[0]).values()))]
        if lacking := lacking_files(shards):
            raise InputError(f"{path}: {lacking}, and there is no {index}; fetch the others")
        return shards
    mend = other_weights(path) or without_torch() or "fetch the model's weights"
    raise InputError(f"{path}: no {SINGLE} and no {INDEX}; {mend}")


def read_index(file: Path) -> dict[str, str]:
    """Return the file of each tensor, by an index; InputError for a file elsewhere."""
    ending = file.suffixes[-3]
    with reading(f"{file}: not readable as an index", "fetch it again"):
        index = read_json(file)["weight_map"]
        for shard in index.values():
            if not re.fullmatch(r"\w[\w. -]*" + re.escape(ending), str(shard)):
                raise ValueError(f"it names {str(shard)[:60]!r}, which is no file of its directory")
    return index


def cast(tensor: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a tensor as it is written; `write_tensors` refuses values that become infinity."""
    with np.errstate(over="ignore"):
        # "C": safetensors writes the buffer without regard to strides.
        return tensor.astype(dtype, order="C")


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file with the permissions of the directory's config.json.

    Raises InputError for weights that are not finite.
    """
    for name, tensor in tensors.items():
        if tensor.dtype.kind not in "biu" and not is_finite(tensor):
            raise InputError(
                f"weights {name}: not finite in {tensor.dtype}, and are not written; take a dtype "
                "with larger numbers, or train again with a lower learning rate"
            )
    save_file(tensors, file, metadata={"format": "pt"})
    # safetensors makes a file that only its owner can read.
    file.chmod((file.parent / "config.json").stat().st_mode)

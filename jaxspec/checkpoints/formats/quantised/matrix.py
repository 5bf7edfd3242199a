"""Treat a quantised matrix as one unread tensor, and read and dequantise only a box of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from re import Pattern
from typing import ClassVar, Self

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import FLOATS, Box, StoredTensor, is_finite
from jaxspec.config.quantisation import Quantisation
from jaxspec.errors import InputError

_ROWS = 128
"""Rows that are dequantised at a time, so that the work needs little memory."""

Parts = Mapping[str, StoredTensor]
"""The file's tensors of a matrix, by the ends of their names."""
Sizes = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]
"""The dtypes, any of them, and the shape that a part must have."""


@dataclass(frozen=True, eq=False)
class QuantisedMatrix(StoredTensor):
    """Hold a matrix [out, in] whose numbers are computed at each reading.

    The numbers are what the format defines, rounded once to `dtype`, in which the format's own
    kernels multiply.
    """

    quantisation: Quantisation
    parts: Parts

    pattern: ClassVar[Pattern[str]]
    """Regex of the names of its parts: the module, and the part."""
    needed: ClassVar[tuple[str, ...]]
    """Parts without which `sizes` cannot be asked."""

    @classmethod
    @abstractmethod
    def sizes(cls, quantisation: Quantisation, parts: Parts) -> tuple[tuple[int, int], str, Sizes]:
        """Return the matrix's shape and dtype, and the sizes of its parts."""

    @abstractmethod
    def dequantise(self, outs: slice, ins: slice) -> np.ndarray:
        """Return the numbers of a few outputs and of these inputs, in float32."""

    @classmethod
    def of(cls, name: str, quantisation: Quantisation, parts: Parts) -> Self:
        """Return the matrix of these parts; InputError where they do not fit each other."""
        _check_parts(name, parts, cls.needed)
        shape, dtype, sizes = cls.sizes(quantisation, parts)
        _check_parts(name, parts, sizes)
        for part, (dtypes, size) in sizes.items():
            tensor = parts[part]
            if tensor.dtype not in dtypes or tensor.shape != size:
                raise InputError(
                    f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, and config.json and "
                    f"the matrix ask for {dtypes[0]} {list(size)}"
                )
        file, nbytes = next(iter(parts.values())).file, sum(part.nbytes for part in parts.values())
        return cls(name, file, dtype, shape, 0, nbytes, quantisation, parts)

    def read(self, box: Box | None = None) -> np.ndarray:
        box = [slice(None)] * 2 if box is None else box
        outs, ins = (slice(*part.indices(size)[:2]) for part, size in zip(box, self.shape))
        numbers = np.empty((outs.stop - outs.start, ins.stop - ins.start), FLOATS[self.dtype])
        for start in range(0, len(numbers), _ROWS):
            rows = numbers[start : start + _ROWS]
            first = outs.start + start
            rows[:] = self.dequantise(slice(first, first + len(rows)), ins)
        if numbers.size and not is_finite(numbers):
            raise InputError(f"{self.file}: {self.name} holds NaN or infinity; fetch it")
        return numbers


def _check_parts(name: str, parts: Parts, needed: tuple[str, ...] | Sizes) -> None:
    if lacking := [part for part in needed if part not in parts]:
        raise InputError(f"{name} is quantised, but its {', '.join(lacking)} is missing")


def pair(tensor: StoredTensor) -> tuple[int, int]:
    """Return a matrix's shape; InputError for other tensors."""
    if len(tensor.shape) != 2:
        raise InputError(f"{tensor.name} is {list(tensor.shape)}, which is no matrix")
    return tensor.shape[0], tensor.shape[1]

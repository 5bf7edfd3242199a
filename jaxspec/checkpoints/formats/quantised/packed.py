"""Read AWQ and GPTQ: integers in words of 32 bits, with a scale and a zero point for a group.

A number is (q - z) s, with the scale and the zero point of its output and of its group of inputs.

| tensor | AWQ ("gemm") | GPTQ |
|---|---|---|
| `qweight` | int32 [in, out / 8] | int32 [in / 8, out] |
| `qzeros` | int32 [groups, out / 8] | int32 [groups, out / 8], less one unless "gptq_v2" |
| `scales` | [groups, out] | [groups, out] |
| `g_idx` | | int32 [in], the group of each input; with `desc_act` in no order |

A word of AWQ holds eight successive columns in the order 0 2 4 6 1 3 5 7, lowest bits first; a word
of GPTQ holds them in order. Publications: AWQ (Lin et al. 2023, arXiv 2306.00978), GPTQ (Frantar et
al. 2022, arXiv 2210.17323).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxspec.checkpoints.formats.quantised.matrix import Parts, QuantisedMatrix, Sizes, pair
from jaxspec.checkpoints.formats.tensor_files import FLOATS, Box, StoredTensor
from jaxspec.config.quantisation import Quantisation
from jaxspec.errors import InputError


@dataclass(frozen=True, eq=False)
class Gptq(QuantisedMatrix):
    """Read a matrix of GPTQ's, whose words hold successive inputs."""

    pattern = re.compile(r"(.+)\.(qweight|qzeros|scales|g_idx)")
    needed = ("qweight", "qzeros", "scales")
    axis: ClassVar[int] = 0
    """The axis of `qweight` [in, out] along which its numbers are packed."""

    @staticmethod
    def positions(bits: int) -> tuple[int, ...]:
        """Return the positions in a word, in units of `bits`, of successive numbers."""
        return tuple(range(32 // bits))

    @classmethod
    def sizes(cls, quantisation: Quantisation, parts: Parts) -> tuple[tuple[int, int], str, Sizes]:
        """Return the matrix's shape [out, in], its dtype, and the sizes of its parts.

        Files store [in, out], with 32 / bits numbers in each word.
        """
        shape, each = [*pair(parts["qweight"])], 32 // quantisation.bits
        shape[cls.axis] *= each
        rows, columns = shape
        groups = 1 if quantisation.group == -1 else -(-rows // quantisation.group)
        sizes = {
            "qweight": (("I32",), parts["qweight"].shape),
            "qzeros": (("I32",), (groups, columns // each)),
            "scales": (tuple(FLOATS), (groups, columns)),
        }
        if "g_idx" in parts:
            sizes["g_idx"] = (("I32",), (rows,))
        return (columns, rows), parts["scales"].dtype, sizes

    def dequantise(self, outs: slice, ins: slice) -> np.ndarray:
        bits, positions = self.quantisation.bits, self.positions(self.quantisation.bits)
        numbers = _unpacked(self.parts["qweight"], [ins, outs], self.axis, bits, positions)
        scales = self.parts["scales"].read([slice(None), outs]).astype(np.float32)
        # One is added to a word as a whole: its writers subtract so, with a borrow from 0.
        ones = self.quantisation.zero_offset * sum(1 << bits * position for position in positions)
        box = [slice(0, len(scales)), outs]
        zeros = _unpacked(self.parts["qzeros"], box, 1, bits, positions, ones).astype(np.float32)
        groups = self._groups(ins, len(scales))
        return ((numbers - zeros[groups]) * scales[groups]).T

    def _groups(self, ins: slice, count: int) -> np.ndarray:
        """Return the group of each input."""
        if (stored := self.parts.get("g_idx")) is None:
            size = self.shape[1] if self.quantisation.group == -1 else self.quantisation.group
            return np.arange(ins.start, ins.stop) // size
        groups = stored.read([ins])
        if groups.size and not 0 <= groups.min() <= groups.max() < count:
            raise InputError(
                f"{self.file}: {stored.name} names no group of {count}; fetch it again"
            )
        return groups


@dataclass(frozen=True, eq=False)
class Awq(Gptq):
    """Read a matrix of AWQ's, whose words hold successive outputs, interleaved."""

    axis = 1

    @staticmethod
    def positions(bits: int) -> tuple[int, ...]:
        return (0, 4, 1, 5, 2, 6, 3, 7)


def _unpacked(
    tensor: StoredTensor, box: Box, axis: int, bits: int, positions: tuple[int, ...], added: int = 0
) -> np.ndarray:
    """Return a box, with both ends, of the numbers that words hold along an axis.

    Args:
      added: Added to every word.
    """
    each, span, word_box = len(positions), box[axis], [*box]
    word_box[axis] = slice(span.start // each, -(-span.stop // each))
    packed = tensor.read(word_box).view(np.uint32) + np.uint32(added)
    mask = np.uint32((1 << bits) - 1)
    numbers = [
        (packed >> np.uint32(bits * position) & mask).astype(np.uint8) for position in positions
    ]
    shape, cut = [*packed.shape], [slice(None)] * 2
    shape[axis] *= each
    cut[axis] = slice(*(end - word_box[axis].start * each for end in (span.start, span.stop)))
    return np.stack(numbers, axis + 1).reshape(shape)[tuple(cut)]

"""Read fp8 in blocks, float8_e4m3 with a scale for a block, as DeepSeek and Qwen publish it.

`weight` float8 [out, in] times `weight_scale_inv` [out / 128, in / 128], in spite of its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from jaxspec.checkpoints.formats.quantised.matrix import Parts, QuantisedMatrix, Sizes, pair
from jaxspec.checkpoints.formats.tensor_files import FLOATS
from jaxspec.config.quantisation import Quantisation


@dataclass(frozen=True, eq=False)
class Fp8(QuantisedMatrix):
    """Read a matrix of float8 numbers."""

    pattern = re.compile(r"(.+)\.(weight|weight_scale_inv)")
    needed = ("weight", "weight_scale_inv")

    @classmethod
    def sizes(cls, quantisation: Quantisation, parts: Parts) -> tuple[tuple[int, int], str, Sizes]:
        shape = pair(parts["weight"])
        grid = tuple(-(-size // block) for size, block in zip(shape, quantisation.block))
        sizes = {"weight": (("F8_E4M3",), shape), "weight_scale_inv": (tuple(FLOATS), grid)}
        return shape, "BF16", sizes

    def dequantise(self, outs: slice, ins: slice) -> np.ndarray:
        tall, wide = self.quantisation.block
        numbers = self.parts["weight"].read([outs, ins]).astype(np.float32)
        scales = self.parts["weight_scale_inv"].read().astype(np.float32)
        rows, columns = np.arange(outs.start, outs.stop), np.arange(ins.start, ins.stop)
        return numbers * scales[:, columns // wide][rows // tall]

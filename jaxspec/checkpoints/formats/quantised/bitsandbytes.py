"""Read bitsandbytes' 4 bits (nf4, fp4): indices in a map of 16 numbers, a scale for a block.

| tensor | | |
|---|---|---|
| `weight` | uint8 [out in / 2, 1] | two numbers a byte, the high half first |
| `weight.absmax` | float32 [blocks], or uint8 if nested | a scale for 64 successive numbers |
| `weight.quant_map` | float32 [16] | the numbers |
| `weight.nested_absmax`, `weight.nested_quant_map` | float32 | scales of scales, and their map |
| `weight.quant_state.bitsandbytes__nf4` | uint8 | a JSON object: shape, dtype, block sizes |

Publication: QLoRA (Dettmers et al. 2023, arXiv 2305.14314).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.quantised.matrix import Parts, QuantisedMatrix, Sizes
from jaxspec.config.quantisation import Quantisation
from jaxspec.errors import is_number, reading

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, eq=False)
class BitsAndBytes(QuantisedMatrix):
    """Read a matrix of numbers of a map."""

    pattern = re.compile(
        r"(.+)\.(weight)(?:\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state)"
        r"(?:\.bitsandbytes__\w+)?)?"
    )
    needed = ("weight", "quant_state")

    @classmethod
    def sizes(cls, quantisation: Quantisation, parts: Parts) -> tuple[tuple[int, int], str, Sizes]:
        """Return shape and dtype, which `quant_state` records, and the sizes of the parts."""
        state = _state(parts)
        rows, columns = state["shape"]
        blocks, nested = -(-rows * columns // state["blocksize"]), state.get("nested_blocksize")
        sizes = {
            "weight": (("U8",), (-(-rows * columns // 2), 1)),
            "absmax": (("U8" if nested else "F32",), (blocks,)),
            "quant_map": (("F32",), (16,)),
        }
        if nested:
            sizes["nested_absmax"] = ("F32",), (-(-blocks // nested),)
            sizes["nested_quant_map"] = ("F32",), (256,)
        return (rows, columns), _DTYPES[state["dtype"]], sizes

    def dequantise(self, outs: slice, ins: slice) -> np.ndarray:
        state, columns = _state(self.parts), self.shape[1]
        first, last = outs.start * columns, outs.stop * columns
        packed = self.parts["weight"].read([slice(first // 2, -(-last // 2)), slice(0, 1)])
        halves = np.concatenate([packed >> 4, packed & 15], 1).reshape(-1)
        indices = halves[first % 2 :][: last - first]
        size = state["blocksize"]
        scales = self._scales(state, slice(first // size, -(-last // size)))
        scale = np.repeat(scales, size)[first % size :][: last - first]
        numbers = self.parts["quant_map"].read()[indices] * scale
        return numbers.reshape(-1, columns)[:, ins]

    def _scales(self, state: dict[str, Any], blocks: slice) -> np.ndarray:
        """Return the scales of blocks; a nested one is itself a number of a map."""
        stored = self.parts["absmax"].read([blocks])
        if "nested_blocksize" not in state:
            return stored
        outer = self.parts["nested_absmax"].read()
        outer = outer[np.arange(blocks.start, blocks.stop) // state["nested_blocksize"]]
        scales = self.parts["nested_quant_map"].read()[stored] * outer
        return scales + np.float32(state["nested_offset"])


def _state(parts: Parts) -> dict[str, Any]:
    """Return the description of a matrix, checked."""
    tensor = parts["quant_state"]
    with reading(f"{tensor.file}: {tensor.name} is no state of a matrix", "fetch it again"):
        state = json.loads(bytes(tensor.read()))
        rows, columns = state["shape"]
        nested = state.get("nested_blocksize")
        counts = [rows, columns, state["blocksize"], 1 if nested is None else nested]
        if not all(isinstance(count, int) and count > 0 for count in counts):
            raise ValueError(f"sizes {counts}")
        if state["dtype"] not in _DTYPES or (nested and not is_number(state["nested_offset"])):
            raise ValueError(f"dtype {state['dtype']}")
    return state

"""This form of answers needs no tokeniser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decoding import grammars


class Odd:
    """Allow tokens that differ from the one before by an odd number; the first is even."""

    def __init__(self) -> None:
        self.number = next(grammars._NUMBERS)
        own: Any = self
        grammars._GRAMMARS[self.number] = own

    def mask(self, row: int, tokens: Sequence[int], words: int) -> np.ndarray:
        before = [1, *tokens][-1]
        return np.full(words, 0x55555555 if before % 2 else 0xAAAAAAAA, np.uint32)

"""Define the letters of dimensions, for jaxtyping strings, einsums and docs.

| letter | dimension                 | letter | dimension                      |
|--------|---------------------------|--------|--------------------------------|
| B      | batch rows                | U      | image tiles per row            |
| T      | new tokens in this call   | P      | patches of one image tile      |
| S      | cache slots               | E      | width of the vision tower      |
| L      | prompt length             | Q      | queries of one block           |
| N      | query heads               | I      | images per row                 |
| K      | kv heads                  | Y      | pixel rows                     |
| G      | N / K                     | X      | pixel columns                  |
| H      | head dim                  | R      | draft views                    |
| D      | width                     | J      | draft length, gamma            |
| V      | vocabulary                | A      | anchors                        |
| C      | slots for new tokens      | M      | collaborating models           |

A dimension of one file is a word, such as `nodes` or `points`. Small letters in an einsum are
local to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int, Shaped, UInt

Params = Mapping[str, Any]
"""Nested dict of arrays; the keys are Hugging Face's parameter names."""
Tokens = Int[Array, "B T"]
"""New tokens of each row, which are read together."""
Vectors = Float[Array, "... D"]
"""Embeddings or hidden states."""
Queries = Float[Array, "B T N H"]
"""Queries of T tokens, or what attention returns for them."""
Keys = Float[Array, "B T K H"]
"""Keys of T tokens, or their values."""
Features = Float[Array, "B U P E"]
"""What a tower makes of image tiles."""

__all__ = ["Array", "Bool", "Float", "Int", "Shaped", "UInt"]
__all__ += ["Features", "Keys", "Params", "Queries", "Tokens", "Vectors"]

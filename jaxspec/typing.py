"""The legend of dimension letters, obeyed in einsums, jaxtyping strings, suffixes and docs.

| letter | dimension                 | letter | dimension                      |
|--------|---------------------------|--------|--------------------------------|
| B      | batch rows                | F      | mlp width                      |
| T      | new tokens in this call   | V      | vocabulary                     |
| S      | cache slots               | P      | image tokens of one image      |
| L      | prompt length             | I      | images per row                 |
| N      | query heads               | R      | draft views                    |
| K      | kv heads                  | J      | draft length (γ in the papers) |
| G      | N / K                     | A      | anchors                        |
| H      | head dim                  | M      | collaborating models           |
| D      | width                     | C      | slots for new tokens           |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int, UInt

Params = Mapping[str, Any]
"""Nested dict of arrays whose keys are Hugging Face's parameter names."""

__all__ = ["Array", "Bool", "Float", "Int", "Params", "UInt"]

"""eval/attributes.py: what it refuses. The accuracy itself is that of `test_mini.py`."""

from __future__ import annotations

import pytest

from eval.attributes import main
from jaxspec.errors import InputError


def test_no_questions_are_refused() -> None:
    with pytest.raises(InputError, match="per_kind: 0; give a whole number, 1 or more"):
        main("none", per_kind=0)

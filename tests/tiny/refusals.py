"""Check what a user reads of a wrong input."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxspec.errors import InputError


def one_line(call: Callable[..., object], *args: object) -> str:
    """Return the error, of one line, that a call must end in."""
    with pytest.raises(InputError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)

"""Ragged writes land at their positions, and never past the end; the device rounds slots."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.cache import whole_slots, write

B, S, K, H = 3, 7, 2, 4
jit_write = jax.jit(write)


@given(st.lists(st.integers(0, S + 2), min_size=B, max_size=B), st.sampled_from([1, 3]))
def test_a_write_touches_its_slots_and_no_other(first: list[int], count: int) -> None:
    draw = np.random.default_rng(0)
    old, new = draw.normal(size=(B, K, S, H)), draw.normal(size=(B, count, K, H))
    positions = np.asarray(first, np.int32)[:, None] + np.arange(count, dtype=np.int32)
    expected = old.copy()
    for (b, t), position in np.ndenumerate(positions):
        if position < S:
            expected[b, :, position] = new[b, t]
    written = jit_write(old.astype(np.float32), new.astype(np.float32), positions)
    np.testing.assert_array_equal(written, expected.astype(np.float32))


@pytest.mark.parametrize(("platform", "slots"), [("gpu", [1152, 1160]), ("tpu", [1153, 1153])])
def test_slots_are_rounded_as_the_default_device_needs_them(
    platform: str, slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are rounded as JAX's default device needs them, and rounded slots stay."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert [whole_slots(1152), whole_slots(1153)] == slots
    assert [whole_slots(rounded) for rounded in slots] == slots
    with jax.default_device(jax.devices("cpu")[0]):
        assert whole_slots(1153) == 1160

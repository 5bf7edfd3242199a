"""Plans: what a step would hold on slices that are not there, and how it is counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.errors import InputError
from jaxspec.sharding import abstract_mesh
from jaxspec.training.config import TrainConfig
from jaxspec.training.measured import matmul_flops, peak_flops
from train import plan


@pytest.mark.parametrize(("model", "fsdp"), [(1, 16), (4, 16)])
def test_a_7b_target_teaches_a_68m_draft(model, fsdp):
    """The step lowers for 16 and for 64 TPUs, and each holds its share: two bytes a frozen parameter, four a trained
    one, eight of its moments, four of its gradient."""
    config = TrainConfig(steps=1, batch=256, frozen=plan.FROZEN, dtype="bfloat16", remat=True)
    found = plan.step_memory(config, abstract_mesh(model, fsdp), 1024)
    devices = model * fsdp
    assert f"mhlo.num_partitions = {devices}" in found.lowered.as_text()[:2000]
    assert found.frozen == pytest.approx(2 * 7_063_427_072 / devices, rel=0.03)  # with one tower
    trained = 4 * 68e6 / devices
    assert (found.trained, found.gradient) == pytest.approx((trained, trained), rel=0.1)
    assert found.optimizer == pytest.approx(2 * found.trained, rel=1e-4)
    # Of a row's slot, for each model: its token and its source; the mask, and where the teacher reads it.
    assert found.batch == 256 // fsdp * (1024 * (2 * 8 + 1 + 4) + 2 * 4 + 4 + 336 * 336 * 3 * 4)
    # Two operations a parameter and token of the teacher's decoder, and what attention and towers take.
    assert 1 < found.flops / (2 * 6.7e9 * 256 * 1024) < 1.3


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(InputError, match="a batch of 7 does not divide over 1 data x 16 fsdp devices"):
        plan.main(devices=(16,), batch=7)


def test_operations_are_counted():
    x, w = jnp.zeros((8, 3)), jnp.zeros((3, 5))
    product = 2 * 8 * 3 * 5

    def layers(x, w):
        unread = x @ w
        turned, _ = jax.lax.scan(lambda carry, _: (carry @ w @ w.T, None), x, None, length=4)
        del unread
        return jax.lax.cond(x[0, 0] > 0, lambda: turned @ w, lambda: jnp.zeros((8, 5)))

    assert matmul_flops(layers, x, w) == (8 + 1) * product
    assert matmul_flops(jax.grad(lambda w, x: (x @ w).sum()), w, x) == product  # of the weights; the sum is not read
    assert matmul_flops(jax.jit(lambda x, w: x @ w), x, w) == product
    kernel, pages = jnp.zeros((4, 4, 3, 6)), jnp.zeros((2, 8, 8, 3))

    def convolve(pages, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(pages, kernel, (4, 4), "VALID", dimension_numbers=numbers)

    assert matmul_flops(convolve, pages, kernel) == 2 * (2 * 2 * 2 * 6) * (4 * 4 * 3)


def test_peaks():
    kinds = {"NVIDIA H100 80GB HBM3": 989e12, "TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12}
    for kind, peak in kinds.items():
        assert peak_flops(type("Device", (), {"device_kind": kind})) == peak
    assert peak_flops(jax.devices("cpu")[0]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": (16, 0)}, "devices: 0; give a whole number"),
        ({"devices": (6,), "model": 4}, "devices: 6 do not divide by --model 4"),
        ({"model": 0}, "model: 0; give"),
        ({"dtype": "float23"}, "dtype: 'float23'"),
    ],
)
def test_slices_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan.main(**options)

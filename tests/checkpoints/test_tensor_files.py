"""Tensors of safetensors are read by byte range, and many of them straight onto a mesh."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoints.formats.tensor_files import list_file
from jaxspec.checkpoints.huggingface import load
from jaxspec.config import LlamaConfig, LlavaConfig, VisionConfig
from jaxspec.engine.memory import bytes_held
from jaxspec.errors import InputError
from jaxspec.sharding import make_mesh
from tests.checkpoints.shapes import write_zeros


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    shapes = {"a": (), "b": (7,), "c": (5, 6), "d": (3, 4, 2, 5)}
    tensors = {
        name: draw.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    path = tmp_path_factory.mktemp("stored") / "x.safetensors"
    save_file(tensors, path)
    return path, tensors


@hypothesis.given(data=st.data())
def test_any_box_of_any_tensor(stored, data):
    path, tensors = stored
    tensor = data.draw(st.sampled_from(list_file(path)))
    expected = tensors[tensor.name]
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == (expected.shape, "BF16", expected.nbytes)
    bounds = [
        sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))
        for n in expected.shape
    ]
    box = tuple(slice(*pair) for pair in bounds)
    found = tensor.read(box)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected[box])


def test_a_file_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.arange(24, dtype=np.float32)}, path)
    (tensor,) = list_file(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(InputError, match="ends before its tensors do"):
        tensor.read()


def test_shards_are_read_straight_onto_a_mesh(tmp_path):
    """Reading half a gigabyte onto a mesh keeps host memory below 1.3 times what stays.

    On CPU devices what stays lies in host memory too, so that a second copy of the model would show
    as 2.
    """
    text = LlamaConfig(
        vocab_size=32064,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=1,
        num_attention_heads=40,
    )
    config = LlavaConfig(text, VisionConfig(num_hidden_layers=2))
    size = write_zeros(tmp_path / "model", config, shards=3)
    assert size > 4.5e8
    found = load(tmp_path / "model", mesh=make_mesh(model=8))
    report = found.report
    assert report.devices == 8
    assert size <= report.nbytes < 1.05 * size  # norms and biases are on every device
    assert report.host_growth < 1.3 * report.nbytes
    leaves = jax.tree.leaves(found.params)
    held = sum(
        shard.data.nbytes
        for leaf in leaves
        for shard in leaf.addressable_shards
        if shard.device.id == 0
    )
    assert held == bytes_held(found.params)

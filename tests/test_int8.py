"""A matrix in int8 loses little, only the matrices of layers change, and models are loaded with
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec import Engine, LoadedModel, Request
from jaxspec.checkpoints.huggingface import save
from jaxspec.errors import InputError
from jaxspec.models.families import FAMILIES, abstract_params
from jaxspec.models.int8 import int8_params, quantise
from jaxspec.models.layers import Dense
from jaxspec.sharding import logical_axes, make_mesh
from tests import tiny
from tests.tiny.families import FAMILIES as CHECKPOINTS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


def flat(params: Any) -> dict[str, Any]:
    return flatten_dict(params, sep="/")  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_is_off_by_half_a_step_of_each_weight(dtype: jnp.dtype) -> None:
    """An int8 layer is off by half a step of each weight: |x W - x Q s| <= |x| (1 s / 2), and in 16
    bits what rounding of x W itself may add.
    """
    rng = np.random.default_rng(0)
    rows = 10.0 ** rng.integers(-4, 2, (48, 1))  # channels differ by orders of magnitude
    matrix = (rng.normal(size=(48, 64)) * rows).astype(np.float32)
    matrix[3] = 0
    x = jnp.asarray(rng.normal(size=(5, 64)), dtype)
    held, scale = quantise(jnp.asarray(matrix))
    assert held.dtype == jnp.int8
    assert abs(np.asarray(held)).max(1).tolist() == [0 if i == 3 else 127 for i in range(48)]
    assert (abs(matrix.T - held.T * scale) <= 0.5001 * scale).all()
    found = Dense(48, bias=False).apply({"params": {"weight": held, "scale": scale}}, x)
    assert found.dtype == dtype
    exact, inputs = np.asarray(x, np.float64) @ matrix.T, abs(np.asarray(x, np.float64))
    bound = 0.5001 * inputs.sum(1, keepdims=True) * scale
    rounding = 2.0 * jnp.finfo(dtype).eps * (inputs @ abs(matrix.T))
    assert (abs(np.asarray(found, np.float64) - exact) <= bound + rounding).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_matrices_of_the_decoders_layers_are_quantised(family: str) -> None:
    """The matrices of the decoder's layers are quantised, and nothing else; each scale has a row in
    the table of shardings.
    """
    config = CHECKPOINTS[family]()[0] if family in CHECKPOINTS else tiny.CONFIG.text_config
    before, after = flat(abstract_params(config)), flat(abstract_params(config, weights="int8"))
    changed = {path for path in before if after[path].dtype == jnp.int8}
    assert changed == {
        path
        for path in before
        if "layers_" in path
        and path.endswith("/weight")
        and before[path].ndim == 2
        and not path.startswith(("vision_tower", "visual"))
    }
    scales = after.keys() - before.keys()
    assert scales == {path.removesuffix("weight") + "scale" for path in changed}
    for path in scales:
        assert after[path].shape == after[path.removesuffix("scale") + "weight"].shape[:1]
        assert len(logical_axes(path)) == 1


@pytest.mark.parametrize("mesh", [None, 4])
def test_loading_quantises_what_the_files_hold(pair: tuple[Path, Path], mesh: int | None) -> None:
    """Loading quantises what the files hold, whatever the dtype of the computation; on a mesh each
    device holds its part.
    """
    split = mesh and make_mesh(model=mesh)
    expected = flat(int8_params(LoadedModel.load(pair[0]).params))
    loaded = LoadedModel.load(pair[0], jnp.dtype("bfloat16"), mesh=split, weights="int8")
    found = flat(loaded.params)
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        wanted = (
            expected[path] if leaf.dtype != jnp.bfloat16 else expected[path].astype(jnp.bfloat16)
        )
        np.testing.assert_array_equal(leaf, wanted)
    assert {str(leaf.dtype) for leaf in found.values()} == {"int8", "float32", "bfloat16"}
    part = {path: leaf.addressable_shards[0].data.shape for path, leaf in found.items()}
    layer = "language_model/model/layers_0/mlp"
    assert part[f"{layer}/gate_proj/weight"] == (48 // (mesh or 1), 32)
    assert part[f"{layer}/gate_proj/scale"] == (48 // (mesh or 1),)
    assert part[f"{layer}/down_proj/weight"] == (32, 48 // (mesh or 1))
    assert part[f"{layer}/down_proj/scale"] == (32,)
    assert loaded.report is not None
    assert loaded.report.nbytes == sum(
        shard.data.nbytes for leaf in found.values() for shard in leaf.addressable_shards
    )


def test_an_engine_runs_int8_targets_with_int8_drafts(pair: tuple[Path, Path]) -> None:
    head, request = pair[0].parent / "head", Request("What is this?", 12)
    expected = Engine(LoadedModel.load(pair[0], weights="int8")).generate(request).tokens
    options: dict[str, Any] = {"target_weights": "int8", "draft_weights": "int8", "gamma": 3}
    engine = Engine.from_pretrained(pair[0], [pair[1], head], **options)
    assert len(engine.assembly.params) == 3
    for params in engine.assembly.params.values():
        assert jnp.dtype("int8") in {leaf.dtype for leaf in jax.tree.leaves(params)}
    assert engine.generate(request).tokens == expected


def test_int8_weights_are_made_and_not_saved(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = LoadedModel.load(pair[0], weights="int8")
    with pytest.raises(InputError, match=r"do not fit the config: .*\.scale"):
        save(tmp_path / "out", model.config, model.params)
    assert not list(tmp_path.iterdir())

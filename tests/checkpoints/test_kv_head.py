"""A KV head's files are written and read again, and refused where they do not fit.

PyTorch runs them in tests/test_kv_head.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.heads.loading import is_head, load_head, save_head
from jaxspec.typing import Params
from tests import tiny

TARGET, PARAMS = tiny.lvlm(16, 2, seed=0)
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "attention": {"pooling": "attention", "slot_bias": False},
    "hidden states": {"feature": "last_hidden"},
    "two layers": {"layers": 2},
    "one pass": {"parallel": True, "markov": 2, "gamma": 3},
    "keys of two layers": {"key_layers": (1, 0)},
}


def saved(path: Path, name: str = "linear") -> tuple[HeadConfig, Params]:
    config, params = tiny.kv_head(TARGET, PARAMS, **VARIANTS[name])
    save_head(path, config, params, np.float32)
    return config, params


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    config, params = saved(tmp_path / "head", name)
    found, read = load_head(tmp_path / "head")
    assert found == config
    if name not in ("one pass", "keys of two layers"):
        raw = json.loads((tmp_path / "head" / "config.json").read_text())
        assert not {"key_layers", "parallel", "markov"} & raw.keys(), (
            "older heads have no such entries"
        )
    assert jax.tree.structure(read) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not is_head(tmp_path)
    _, half = load_head(tmp_path / "head", jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "norm.weight is missing"),
        (lambda tensors: tensors.update(fc=tensors["norm.weight"]), "fc is unexpected"),
        (
            lambda tensors: tensors.update({"kv_projector.k": tensors["kv_projector.k"].T.copy()}),
            "asks for [2, 4]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(spoil: Any, told: str, tmp_path: Path) -> None:
    saved(tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    with pytest.raises(InputError) as error:
        load_head(tmp_path / "head")
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"image_tokens": 10**9}, "image_tokens 1000000000 is not supported; give int"),
        ({"image_tokens": 65_536, "image_slots": 65_536}, "65536 tokens take too large matrices"),
        ({"key_layers": [0, 1]}, "key_layers [0, 1] for 1 layers; give one for each layer of the"),
        ({"text_config": {"num_hidden_layers": 1000}}, "num_hidden_layers 1000, and the files hol"),
    ],
)
def test_configurations_that_cannot_be_are_named(entries: Any, told: str, tmp_path: Path) -> None:
    """Impossible configurations are named before anything is allocated for them."""
    saved(tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    raw = json.loads(file.read_text())
    raw["text_config"] |= entries.pop("text_config", {})
    file.write_text(json.dumps(raw | entries))
    with pytest.raises(InputError) as error:
        load_head(tmp_path / "head")
    assert told in str(error.value)


def test_other_directories_are_no_heads(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere': no such directory; give one, or a hub id"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(InputError, match="the directory of another model; give a head's directory"):
        load_head(tmp_path)
    with pytest.raises(InputError, match="pooling 'linaer' is not supported; give one of"):
        KVHeadConfig.of_target(TARGET.config, pooling="linaer")
    with pytest.raises(InputError, match="0 slots for the 4 tokens"):
        KVHeadConfig.of_target(TARGET.config)

"""OPT equals transformers' to 1e-4 in float32: module by module, cached, generated, and written."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_cache
from jaxspec.config import OptConfig
from jaxspec.models.families import abstract_params
from jaxspec.models.language_model import LanguageModel

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface
from tests.parity import decoders
from tests.tiny import hf

pytestmark = pytest.mark.full

MODULES = {
    "model/decoder/embed_tokens": "model.decoder.embed_tokens",
    "model/decoder/embed_positions": "model.decoder.embed_positions",
    "model/decoder/layers_0/self_attn": "model.decoder.layers.0.self_attn",
    "model/decoder/layers_0/fc1": "model.decoder.layers.0.fc1",
    "model/decoder/layers_0/fc2": "model.decoder.layers.0.fc2",
    "model/decoder/layers_1": "model.decoder.layers.1",
}
FINAL = {"model/decoder/final_layer_norm": "model.decoder.final_layer_norm"}
PROJECTIONS = {
    "model/decoder/project_in": "model.decoder.project_in",
    "model/decoder/project_out": "model.decoder.project_out",
}
LIKE_350M: dict[str, Any] = {"do_layer_norm_before": False, "word_embed_proj_dim": 20}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "pre-norm": ({}, FINAL),
    "post-norm, projections": (LIKE_350M, PROJECTIONS),
    "no final norm": ({"_remove_final_layer_norm": True}, {}),
    "as Galactica": (
        {
            "activation_function": "gelu",
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
        FINAL,
    ),
    "untied, projections": (
        {"tie_word_embeddings": False, "word_embed_proj_dim": 20},
        FINAL | PROJECTIONS,
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_modules(tmp_path, name):
    changes, more = VARIANTS[name]
    decoders.check_modules(tmp_path, hf.opt(**changes), MODULES | more)


@pytest.mark.parametrize("name", ["pre-norm", "post-norm, projections"])
def test_decoding(tmp_path, name):
    model = hf.talkative(hf.opt(**VARIANTS[name][0]))
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    decoders.check_decode(checkpoint, model)
    if name == "pre-norm":
        decoders.check_greedy(checkpoint, model)


LAYOUTS = {
    "without model.": (r"^model\.", ""),
    "without model.decoder.": (r"^model\.decoder\.", ""),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path, name):
    """Published files differ in how much of the prefix they write; some hold the tied head too."""
    model = hf.opt(**LIKE_350M)
    tensors = hf.hub_tensors(model)
    head = {"lm_head.weight": tensors["model.decoder.embed_tokens.weight"]}
    renamed = {re.sub(*LAYOUTS[name], key): tensor for key, tensor in tensors.items()}
    bare = huggingface.load(hf.write(tmp_path / "bare", model, renamed | head))
    whole = huggingface.load(hf.write(tmp_path / "whole", model))
    jax.tree.map(np.testing.assert_array_equal, bare.params, whole.params)


def test_drafts_past_the_last_position_do_not_spoil_the_row():
    """A block may pass the context's end; its entries there are rolled back, and are finite until
    then.
    """
    config = OptConfig.from_hf(hf.OPT | {"num_hidden_layers": 1, "max_position_embeddings": 4})
    lm, params = LanguageModel(config), hf.random_params(abstract_params(config))
    extend = jax.jit(lm.extend)
    _, cache = extend(
        params, jnp.asarray([[5, 6, 7]]), init_cache(config, 1, 12, jnp.dtype(jnp.float32))
    )
    past, dirty = extend(params, jnp.asarray([[8, 9, 10]]), cache)
    assert np.isfinite(past).all()
    again, _ = extend(params, jnp.asarray([[8, 11, 12]]), dirty.replace(length=cache.length))
    np.testing.assert_array_equal(again[:, 0], past[:, 0])

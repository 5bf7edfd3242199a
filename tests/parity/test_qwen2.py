"""Qwen2, Qwen2.5 and Qwen3 equal transformers' to 1e-4 in float32: module by module, cached,
generated, and written.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface
from tests.parity import decoders
from tests.tiny import hf, rarer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, head_dim": {"head_dim": 12},
    "tied, theta, eps": {"tie_word_embeddings": True, "rope_theta": 5000.0, "rms_norm_eps": 0.01},
    "yarn as on Qwen2.5's cards": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 100.0}
    },
    "yarn in full": {
        "rope_parameters": YARN
        | {"beta_fast": 4, "beta_slow": 0.5, "truncate": False, "rope_theta": 90}
    },
    "yarn, magnitudes": {
        "rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "rope_theta": 100.0}
    },
}
QWEN3: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen3, biases, tied, wide heads": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 20,
    },
}


FEW = "tied, theta, eps", "Qwen3"


def made(name: str) -> Any:
    return hf.qwen3(**QWEN3[name]) if name in QWEN3 else hf.qwen2(**VARIANTS[name])


@pytest.mark.parametrize(
    "name", [*FEW, *rarer(*(name for name in [*VARIANTS, *QWEN3] if name not in FEW))]
)
def test_modules(tmp_path, name):
    decoders.check_modules(tmp_path, made(name), decoders.ROTARY)


@pytest.mark.parametrize("name", FEW)
def test_decoding(tmp_path, name):
    model = hf.talkative(made(name))
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    decoders.check_decode(checkpoint, model)
    decoders.check_greedy(checkpoint, model)


def test_a_file_without_the_models_prefix(tmp_path):
    """As the bare `Qwen2Model` is saved; the tied head needs no tensor."""
    model = hf.qwen2(tie_word_embeddings=True)
    tensors = {
        re.sub("^model.", "", name): tensor for name, tensor in hf.hub_tensors(model).items()
    }
    assert "embed_tokens.weight" in tensors
    bare = huggingface.load(hf.write(tmp_path / "bare", model, tensors))
    whole = huggingface.load(hf.write(tmp_path / "whole", model))
    jax.tree.map(np.testing.assert_array_equal, bare.params, whole.params)

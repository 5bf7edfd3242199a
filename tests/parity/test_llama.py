"""The Llama decoder equals transformers' to 1e-4 in float32: whole prompts, and token by token."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from jaxspec.config import LlamaConfig
from jaxspec.models import layers

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface
from tests.parity import decoders
from tests.tiny import hf

pytestmark = pytest.mark.full

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-query, head_dim": {"num_key_value_heads": 1, "head_dim": 12},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3, tied": {"rope_scaling": hf.LLAMA3, "tie_word_embeddings": True},
    "biases, theta, eps": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 5000.0,
        "rms_norm_eps": 0.01,
    },
}

HUB_SCALINGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {"factor": 8.0, "hidden_size": 4096},
    "meta-llama/Llama-3.2-1B": {"factor": 32.0, "hidden_size": 2048},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_modules(tmp_path, name):
    decoders.check_modules(tmp_path, hf.llama(**VARIANTS[name]), decoders.ROTARY)


def test_mistral(tmp_path):
    model = hf.mistral(head_dim=12, num_key_value_heads=4, sliding_window=128)
    decoders.check_modules(tmp_path, model, decoders.ROTARY)


def test_decoding(tmp_path):
    model = hf.talkative(hf.llama(**VARIANTS["llama3, tied"]))
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    decoders.check_decode(checkpoint, model)
    decoders.check_greedy(checkpoint, model)


@pytest.mark.parametrize("name", HUB_SCALINGS)
def test_published_frequencies(name):
    """Llama 3's own numbers, as transformers computes them."""
    from transformers import LlamaConfig as Theirs
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = HUB_SCALINGS[name]
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = {
        "hidden_size": ours["hidden_size"],
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": llama3
        | {"factor": ours["factor"], "original_max_position_embeddings": 8192},
    }
    theirs, scale = ROPE_INIT_FUNCTIONS["llama3"](Theirs(**deepcopy(raw)))
    config = LlamaConfig.from_hf(raw)
    assert config.rope_scaling.attention_factor == scale == 1.0
    np.testing.assert_allclose(layers.rotary_frequencies(config), theirs.numpy(), rtol=1e-5)


def test_rope_keys_of_both_versions():
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters."""
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}
    assert LlamaConfig.from_hf(old) == LlamaConfig.from_hf(new) == LlamaConfig.from_hf(old | new)
    assert LlamaConfig.from_hf({"rope_theta": None, "rope_scaling": None}) == LlamaConfig()
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig.from_hf({"rope_scaling": llama3, "max_position_embeddings": 4096})
    assert config.rope_scaling.original_max_position_embeddings == 4096


def test_token_id_null_is_kept():
    assert LlamaConfig.from_hf({"eos_token_id": None}).eos_token_id is None
    assert LlamaConfig.from_hf({}).eos_token_id == 2
    assert LlamaConfig.from_hf({"eos_token_id": [2, 7]}).eos_token_id == (2, 7)

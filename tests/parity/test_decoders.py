"""Decoders equal transformers' to 1e-4 in float32: module by module, cached, generated, and
written. Rows are longer than windows.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_cache
from jaxspec.config import LlamaConfig, OptConfig
from jaxspec.models import layers
from jaxspec.models.families import abstract_params
from jaxspec.models.language_model import LanguageModel

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface
from tests.parity import decoders
from tests.tiny import hf, rarer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BIASED = {"attention_bias": True, "mlp_bias": True, "rope_theta": 5000.0, "rms_norm_eps": 0.01}
GEMMA3 = {"final_logit_softcapping": 2.0, "attention_bias": True, "tie_word_embeddings": False}
GALACTICA = {"enable_bias": False, "layer_norm_elementwise_affine": False}
LIKE_350M: dict[str, Any] = {"do_layer_norm_before": False, "word_embed_proj_dim": 20}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama, grouped": (hf.llama, {}),
    "Llama, multi-query, head_dim": (hf.llama, {"num_key_value_heads": 1, "head_dim": 12}),
    "Llama, linear": (hf.llama, {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "Llama 3, tied": (hf.llama, {"rope_scaling": hf.LLAMA3, "tie_word_embeddings": True}),
    "Llama, biases, theta, eps": (hf.llama, BIASED),
    "Mistral": (hf.mistral, {"head_dim": 12, "num_key_value_heads": 4, "sliding_window": 128}),
    "Mistral v0.1": (hf.mistral, {"sliding_window": 6}),
    "Qwen2, head_dim": (hf.qwen2, {"head_dim": 12}),
    "Qwen2, tied": (
        *(hf.qwen2, {"tie_word_embeddings": True, "rope_theta": 5000.0, "rms_norm_eps": 0.01}),
    ),
    "Qwen2, yarn as on Qwen2.5's cards": (
        *(hf.qwen2, {"rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 100.0}}),
    ),
    "Qwen2, yarn in full": (
        hf.qwen2,
        {
            "rope_parameters": YARN
            | {"beta_fast": 4, "beta_slow": 0.5, "truncate": False, "rope_theta": 90}
        },
    ),
    "Qwen2, yarn, magnitudes": (
        hf.qwen2,
        {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "rope_theta": 100.0}},
    ),
    "Qwen2, the last layer slides": (
        *(hf.qwen2, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ),
    "Qwen3": (hf.qwen3, {}),
    "Qwen3, biases, tied, wide heads": (
        *(hf.qwen3, {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 20}),
    ),
    "Qwen3, the first layer slides": (
        hf.qwen3,
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Gemma 3": (hf.gemma3, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "Gemma 3, biases": (hf.gemma3, GEMMA3 | {"query_pre_attn_scalar": 7}),
    "Gemma 4": (hf.gemma4, UNTIED),
    "Gemma 4, tied": (
        *(hf.gemma4, {"attention_k_eq_v": False, "global_head_dim": 32, "attention_bias": True}),
    ),
    "Gemma 4 E2B": (hf.gemma4, hf.E2B | UNTIED),
    "Gemma 4 E4B": (hf.gemma4, hf.E4B | UNTIED),
    "OPT, pre-norm": (hf.opt, {}),
    "OPT, post-norm, projections": (hf.opt, LIKE_350M),
    "OPT, no final norm": (hf.opt, {"_remove_final_layer_norm": True}),
    "OPT, as Galactica": (hf.opt, GALACTICA | {"activation_function": "gelu"}),
    "OPT, untied, projections": (hf.opt, UNTIED | {"word_embed_proj_dim": 20}),
}
FEW = "Qwen2, tied", "Qwen3"
"""What `make check` tries."""
DECODED = (
    *("Llama 3, tied", "Mistral v0.1", "Qwen2, the last layer slides", "Gemma 3, biases"),
    *("Gemma 4", "Gemma 4 E2B", "OPT, pre-norm", "OPT, post-norm, projections"),
)


def names_of(name: str) -> dict[str, str]:
    """Return the modules to compare: our paths, and transformers'."""
    make, changes = MODELS[name]
    if make is not hf.opt:
        names = dict(decoders.ROTARY)
        if "Gemma" in name:  # its decoder scales the embedding here, and the embedding itself there
            del names["model/embed_tokens"]
        return names
    parts = ["embed_tokens", "embed_positions", "layers_0/self_attn", "layers_0/fc1"]
    parts += ["layers_0/fc2", "layers_1"]
    parts += ["project_in", "project_out"] if "word_embed_proj_dim" in changes else []
    if changes.get("do_layer_norm_before", True) and "_remove_final_layer_norm" not in changes:
        parts.append("final_layer_norm")
    ours = [f"model/decoder/{part}" for part in parts]
    return {path: re.sub("layers_", "layers.", path).replace("/", ".") for path in ours}


@pytest.mark.parametrize("name", [*FEW, *rarer(*(name for name in MODELS if name not in FEW))])
def test_modules(tmp_path, name):
    make, changes = MODELS[name]
    decoders.check_modules(tmp_path, make(**changes), names_of(name))


@pytest.mark.parametrize("name", [*FEW, *rarer(*DECODED)])
def test_decoding(tmp_path, name):
    make, changes = MODELS[name]
    model = hf.talkative(make(**changes))
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    decoders.check_decode(checkpoint, model)
    if name != "OPT, post-norm, projections":
        decoders.check_greedy(checkpoint, model)


HUB_SCALINGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {"factor": 8.0, "hidden_size": 4096},
    "meta-llama/Llama-3.2-1B": {"factor": 32.0, "hidden_size": 2048},
}


@pytest.mark.parametrize("name", HUB_SCALINGS)
def test_published_frequencies(name):
    """The rotary frequencies of published Llama 3 scalings are transformers'."""
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
    """Rotary settings are read from both forms: rope_theta and rope_scaling of transformers 4,
    rope_parameters of transformers 5.
    """
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


BARE = "the bare `Qwen2Model`"
LAYOUTS: dict[str, tuple[Any, str]] = {
    BARE: (lambda: hf.qwen2(tie_word_embeddings=True), r"^model\."),
    "OPT without model.": (lambda: hf.opt(**LIKE_350M), r"^model\."),
    "OPT without model.decoder.": (lambda: hf.opt(**LIKE_350M), r"^model\.decoder\."),
}


@pytest.mark.parametrize("name", [BARE, *rarer(*(name for name in LAYOUTS if name != BARE))])
def test_layouts(tmp_path, name):
    """Files that leave out a part of the names' prefix, or also hold the tied head, give the same
    parameters.
    """
    make, prefix = LAYOUTS[name]
    model = make()
    tensors = hf.hub_tensors(model)
    embedding = next(leaf for key, leaf in tensors.items() if key.endswith("embed_tokens.weight"))
    head = {"lm_head.weight": embedding} if "OPT" in name else {}
    renamed = {re.sub(prefix, "", key): tensor for key, tensor in tensors.items()}
    assert not any(re.match(prefix, key) for key in renamed)
    assert renamed.keys() != tensors.keys()
    bare = huggingface.load(hf.write(tmp_path / "bare", model, renamed | head))
    whole = huggingface.load(hf.write(tmp_path / "whole", model))
    jax.tree.map(np.testing.assert_array_equal, bare.params, whole.params)


def test_drafts_past_the_last_position_do_not_spoil_the_row():
    """Drafts past the last position do not spoil the row: their entries are rolled back, and are
    finite until then.
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

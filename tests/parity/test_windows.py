"""Decoders with windows equal transformers' to 1e-4 in float32, on rows longer than the window."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface
from tests.parity import decoders
from tests.tiny import hf

pytestmark = pytest.mark.full

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Mistral v0.1": (hf.mistral, {"sliding_window": 6}),
    "Qwen2, the last layer slides": (
        hf.qwen2,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "Gemma 3": (hf.gemma3, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "Gemma 3, other factors and biases": (
        hf.gemma3,
        {
            "query_pre_attn_scalar": 7,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "Gemma 4": (hf.gemma4, {"tie_word_embeddings": False}),
    "Gemma 4, tied": (
        hf.gemma4,
        {"attention_k_eq_v": False, "global_head_dim": 32, "attention_bias": True},
    ),
    "Gemma 4 E2B": (hf.gemma4, hf.E2B | {"tie_word_embeddings": False}),
    "Gemma 4 E4B": (hf.gemma4, hf.E4B | {"tie_word_embeddings": False}),
    "Qwen3": (
        hf.qwen3,
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
NOT_DECODED = ("Gemma 3", "Gemma 4, tied", "Gemma 4 E4B", "Qwen3")
"""Tied models, which write one token over and over, and others whose decoding shows nothing new."""


@pytest.mark.parametrize("name", MODELS)
def test_modules(tmp_path, name):
    make, changes = MODELS[name]
    names = dict(decoders.ROTARY)
    if make in (
        hf.gemma3,
        hf.gemma4,
    ):  # whose embedding is scaled by the decoder here, and there by itself
        del names["model/embed_tokens"]
    decoders.check_modules(tmp_path, make(**changes), names)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_DECODED])
def test_decoding(tmp_path, name):
    make, changes = MODELS[name]
    model = hf.talkative(make(**changes))
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    decoders.check_decode(checkpoint, model)
    decoders.check_greedy(checkpoint, model, new=40)

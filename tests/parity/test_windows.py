"""Decoders with windows equal transformers' to 1e-4 in float32, on rows longer than the window."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface
from tests.parity import decoders
from tests.tiny import hf

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Mistral v0.1": (hf.mistral, {"sliding_window": 6}),
    "Qwen2, the last layer slides": (
        hf.qwen2,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "Qwen3, the first layer slides": (
        hf.qwen3,
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules(tmp_path, name):
    make, changes = MODELS[name]
    decoders.check_modules(tmp_path, make(**changes), decoders.ROTARY)


@pytest.mark.parametrize("name", list(MODELS)[:2])
def test_decoding(tmp_path, name):
    make, changes = MODELS[name]
    model = hf.talkative(make(**changes))
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    decoders.check_decode(checkpoint, model)
    decoders.check_greedy(checkpoint, model, new=40)

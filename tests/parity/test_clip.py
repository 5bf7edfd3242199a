"""The CLIP tower equals transformers' to 1e-4 in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec.config import VisionConfig
from jaxspec.errors import InputError
from jaxspec.models.vision import VisionTower

torch = pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface  # noqa: E402

from tests.tiny import hf  # noqa: E402


def tower(config: VisionConfig, params: Any, pixels: np.ndarray) -> tuple[tuple[jax.Array, ...], jax.Array]:
    channels_last = jnp.asarray(pixels.transpose(0, 2, 3, 1))
    return jax.jit(VisionTower(config).apply)({"params": params}, channels_last)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("size", [{"image_size": 12, "patch_size": 4}, {"image_size": 15, "patch_size": 4}])
def test_hidden_states(tmp_path, act, size):
    model = hf.llava(vision={"hidden_act": act, "layer_norm_eps": 1e-3} | size)
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    pixels = np.random.default_rng(0).normal(size=(2, 3, size["image_size"], size["image_size"]))
    pixels = pixels.astype(np.float32)
    with torch.no_grad():
        theirs = model.model.vision_tower(torch.tensor(pixels), output_hidden_states=True)

    ours, pooled = tower(checkpoint.config.vision_config, checkpoint.params["vision_tower"], pixels)
    assert len(ours) == len(theirs.hidden_states) == 4
    for layer in (-1, -2, 0):
        hf.assert_close(ours[layer], theirs.hidden_states[layer])
    hf.assert_close(pooled, theirs.pooler_output)


def test_unsupported_activation():
    with pytest.raises(InputError, match="hidden_act 'relu' is not supported"):
        VisionConfig(hidden_act="relu")

"""The CLIP tower equals transformers' to 1e-4 in float32."""

from __future__ import annotations

from dataclasses import fields, replace
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

# What each field is changed to; the tower's shapes or its output must follow.
CHANGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 1,
    "image_size": 16,
    "patch_size": 6,
    "hidden_act": "gelu",
    "layer_norm_eps": 0.1,
}
# Kept for the file's sake, or SigLIP's: this tower's output does not depend on them.
UNREAD = {"model_type", "projection_dim", "vision_use_head"}


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


def test_every_field_is_accounted_for():
    assert CHANGES.keys() | UNREAD == {field.name for field in fields(VisionConfig)}


@pytest.mark.parametrize("name", CHANGES)
def test_field_changes_output(name):
    config = VisionConfig(**hf.VISION | {"num_hidden_layers": 1})
    check_field(config, **{name: CHANGES[name]})


def check_field(config: VisionConfig, **change: Any) -> None:
    """Another value is another set of parameters, or gives other features with the same."""
    other = replace(config, **change)

    def shapes(c: VisionConfig) -> Any:
        pixels = jnp.zeros((1, c.image_size, c.image_size, c.num_channels))
        return jax.eval_shape(VisionTower(c).init, jax.random.key(0), pixels)["params"]

    if shapes(config) == shapes(other):
        params = hf.random_params(shapes(config))
        before, after = (tower(c, params, hf.images(1))[0][-1] for c in (config, other))
        assert np.abs(before - after).max() > 10 * hf.TOLERANCE


def test_unsupported_activation():
    with pytest.raises(InputError, match="hidden_act 'relu' is not supported"):
        VisionConfig(hidden_act="relu")

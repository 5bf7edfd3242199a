"""The SigLIP tower equals transformers' to 1e-4 in float32."""

from __future__ import annotations

import numpy as np
import pytest
from jaxspec.config import LlavaConfig, VisionConfig
from jaxspec.errors import InputError
from jaxspec.models.vision import TILE_BLOCK

torch = pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface  # noqa: E402

from tests.parity.test_clip import tower  # noqa: E402
from tests.tiny import hf, tiles  # noqa: E402


@pytest.mark.parametrize(
    ("patch", "count"), [(4, TILE_BLOCK + 3), (5, 2)], ids=["blocks of tiles", "patches and a rest"]
)
def test_hidden_states(tmp_path, patch, count):
    pixels = hf.VISION["image_size"]
    model = tiles.onevision(vision={"patch_size": patch, "layer_norm_eps": 1e-3})
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    assert isinstance(checkpoint.config, LlavaConfig)
    images = np.random.default_rng(0).normal(size=(count, 3, pixels, pixels)).astype(np.float32)
    with torch.no_grad():
        theirs = model.model.vision_tower(torch.tensor(images), output_hidden_states=True)
    ours, pooled = tower(checkpoint.config.vision_config, checkpoint.params["vision_tower"], images)
    assert len(ours) == len(theirs.hidden_states) == 4
    for layer in (-1, -2, 0):
        hf.assert_close(ours[layer], theirs.hidden_states[layer])
    hf.assert_close(pooled, theirs.last_hidden_state)


@pytest.mark.parametrize("name", ["image_size", "patch_size"])
def test_oblong_pages(name):
    with pytest.raises(InputError, match=rf"{name} \[12, 24\] is not supported"):
        VisionConfig.from_hf({"model_type": "siglip_vision_model", name: [12, 24]})

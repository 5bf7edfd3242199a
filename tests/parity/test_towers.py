"""The CLIP and SigLIP towers equal transformers' to 1e-4 in float32."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxspec.checkpoints import huggingface
from jaxspec.config import LlavaConfig
from jaxspec.models.lvlms.vision import TILE_BLOCK, VisionTower
from tests.tiny import hf, tiles
from tests.tiny.hf import torch

pytestmark = pytest.mark.full

TOWERS = {
    **{f"CLIP, {act}": (hf.llava, {"hidden_act": act}, 2) for act in ("quick_gelu", "gelu")},
    "CLIP, patches and a rest": (hf.llava, {"image_size": 15}, 2),
    "SigLIP, blocks of tiles": (tiles.onevision, {}, TILE_BLOCK + 3),
    "SigLIP, patches and a rest": (tiles.onevision, {"patch_size": 5}, 2),
}


@pytest.mark.parametrize("name", TOWERS)
def test_hidden_states(tmp_path, name):
    make, changes, count = TOWERS[name]
    model = make(vision={"layer_norm_eps": 1e-3} | changes)
    checkpoint = huggingface.load(hf.write(tmp_path / "model", model))
    assert isinstance(checkpoint.config, LlavaConfig)
    config, params = checkpoint.config.vision_config, checkpoint.params["vision_tower"]
    images = (
        np.random.default_rng(0)
        .normal(size=(count, 3, config.image_size, config.image_size))
        .astype(np.float32)
    )
    with torch.no_grad():
        theirs = model.model.vision_tower(torch.tensor(images), output_hidden_states=True)
    ours, pooled = jax.jit(VisionTower(config).apply)(
        {"params": params}, images.transpose(0, 2, 3, 1)
    )
    assert len(ours) == len(theirs.hidden_states) == 4
    for layer in (-1, -2, 0):
        hf.assert_close(ours[layer], theirs.hidden_states[layer])
    hf.assert_close(pooled, theirs.pooler_output if make is hf.llava else theirs.last_hidden_state)

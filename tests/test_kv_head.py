"""The KV head computes its definition: a loop over anchors, each with keys and values of its own,
in float64.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.config import Qwen2Config, Qwen3Config
from jaxspec.heads.blocks import TargetPass, read_blocks
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.heads.kinds.one_pass import OnePassConfig
from jaxspec.heads.loading import save_head
from jaxspec.heads.making import init_head
from jaxspec.models.inputs import PromptRows
from jaxspec.prompts.rows import image_spans
from jaxspec.typing import Array, Params
from tests import tiny

TARGET, PARAMS = tiny.lvlm(16, 2, seed=0)
TEXT = TARGET.text
BASE = KVHeadConfig.of_target(TARGET.config, image_slots=1, gamma=3)
VARIANTS = {
    "two slots": replace(BASE, image_slots=2, slot_bias=True),
    "attention": replace(BASE, pooling="attention", image_slots=3, slot_bias=True),
    "no text": replace(BASE, reads_text=False),
    "drop, hidden states": replace(BASE, pooling="drop", feature="last_hidden"),
    "one pass, hidden states, two layers": OnePassConfig.of_target(
        TARGET.config, 2, image_slots=1, gamma=3, feature="last_hidden"
    ),
    "all, two layers": replace(
        BASE, pooling="none", text_config=replace(BASE.text_config, num_hidden_layers=2)
    ),
    "keys of two layers": KVHeadConfig.of_target(
        TARGET.config, image_slots=1, gamma=3, key_layers=(1, 0)
    ),
    "a text target with biases": KVHeadConfig.of_target(
        Qwen2Config.from_hf(TEXT.to_hf() | {"model_type": "qwen2"}), gamma=3, feature="last_hidden"
    ),
    "a text target that norms its heads": KVHeadConfig.of_target(
        Qwen3Config.from_hf(TEXT.to_hf() | {"model_type": "qwen3"}), gamma=3
    ),
}
LENGTH, J = 16, BASE.gamma
SHOWN = [
    np.asarray([-1, 0, 0, 0, 0, -1, 1, 1, 1, 1, *[-1] * 6]),
    np.asarray([-1, 0, 0, 0, 0, *[-1] * 11]),
    np.full(LENGTH, -1),
]
"""Two images, one and none, of four slots each; a text target has none of them."""
ANCHORS = np.asarray([[10, 11, 12], [5, 7, 12], [1, 2, 12]])


def random_head(config: KVHeadConfig, seed: int = 0) -> Params:
    """Return parameters that all differ from their initial values."""
    rng = np.random.default_rng(seed)
    shapes = init_head(config, None, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape) + (x.ndim == 1)), shapes)


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_anchored_blocks_are_the_loop_over_anchors(name: str, tmp_path: Path) -> None:
    """Anchored blocks are the loop over anchors, which PyTorch runs from the files alone."""
    torch = pytest.importorskip("torch", reason="torch is the oracle: install the `parity` extra")
    from tests.tiny.kv_head_reference import run_block

    config, rng = VARIANTS[name], np.random.default_rng(1)
    pages = [np.full(LENGTH, -1)] * 3 if "text target" in name else SHOWN
    spans = image_spans(pages, 0 if "text target" in name else 3)
    shape = (3, LENGTH, TEXT.num_key_value_heads * max(len(config.key_layers), 1), TEXT.head_dim)
    k, v = rng.normal(size=shape), rng.normal(size=shape)
    groups = np.asarray([np.split(x, len(config.key_layers) or 1, axis=2) for x in (k, v)])
    order = [config.key_layers.index(i) if config.key_layers else 0 for i in config.target_keys]
    keys, values = groups[:, order].swapaxes(3, 4)  # as a cache has them
    table, hidden = (rng.normal(size=(n, TEXT.hidden_size)) for n in (TEXT.vocab_size, 3 * LENGTH))
    tokens, hidden = rng.integers(0, len(table), (3, LENGTH)), hidden.reshape(3, LENGTH, -1)
    places, rows = ANCHORS[..., None] + np.arange(J), np.arange(3)[:, None]
    embeds, before = table[tokens[rows[..., None], places]], hidden[rows, ANCHORS - 1]
    weights = rng.normal(size=embeds.shape)
    with jax.enable_x64(True):
        params = random_head(config)

        @partial(jax.jit, compiler_options=tiny.QUICK)
        @partial(jax.grad, has_aux=True)
        def together(params: Params) -> tuple[Array, Array]:
            target = {"model": {"embed_tokens": {"embedding": jnp.asarray(table)}}}
            seen = TargetPass(jnp.asarray(hidden), tuple(keys), tuple(values))
            whole = PromptRows(jnp.asarray(tokens), jnp.full(3, LENGTH))
            out = read_blocks(
                config, params, target, seen, whole, jnp.asarray(places), jnp.asarray(spans)
            )
            return (out * weights).sum(), out

        gradient, ours = jax.device_get(together(params))
    save_head(tmp_path / "head", config, params, None)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    tensors = {name: torch.tensor(leaf, requires_grad=True) for name, leaf in stored.items()}
    blocks = [
        run_block(
            json.loads((tmp_path / "head" / "config.json").read_text()),
            tensors,
            *map(torch.tensor, (embeds[b, a], k[b], v[b])),
            pages[b],
            ANCHORS[b, a],
            torch.tensor(before[b, a]),
        )
        for b, a in np.ndindex(ANCHORS.shape)
    ]
    theirs = torch.stack(blocks).reshape(embeds.shape)
    np.testing.assert_allclose(ours, theirs.detach(), atol=1e-10, rtol=1e-10)
    (theirs * torch.tensor(weights)).sum().backward()
    for name, mine in named_tensors(gradient).items():
        np.testing.assert_allclose(mine, tensors[name].grad, atol=1e-10, rtol=1e-10)
        assert np.abs(mine).max() > 1e-3, name

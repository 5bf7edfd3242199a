"""LLaVA-1.5 equals transformers' to 1e-4 in float32: projector, merged prompts, and token by
token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import huggingface
from jaxspec.config import LlavaConfig
from jaxspec.models.inputs import PromptRows, in_order
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.lvlms.llava import Llava
from tests.tiny import full_pass, hf
from tests.tiny.hf import torch


def prompt(images: int, words: int, seed: int) -> list[int]:
    """Return BOS, the images with a token between them, then words."""
    return [1, *([hf.IMAGE] * hf.PATCHES + [5]) * images, *hf.text(words, seed)[1:]]


def pixel_batch(counts: list[int], pixels: np.ndarray) -> np.ndarray:
    """Return the rows' images [B, I, Y, X, 3]; rows with fewer of them are filled up with
    rubbish.
    """
    batch = np.full((len(counts), max(1, *counts), *pixels.shape[1:]), 9.0, np.float32)
    start = 0
    for row, count in zip(batch, counts):
        row[:count] = pixels[start : start + count]
        start += count
    return batch.transpose(0, 1, 3, 4, 2)


def our_logits(
    config: LlavaConfig, params: Any, tokens: np.ndarray, pixels: np.ndarray
) -> jax.Array:
    run = jax.jit(partial(full_pass, LanguageModel(config)))
    return run(params, jnp.asarray(tokens), jnp.asarray(pixels))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, huggingface.Checkpoint]:
    model = hf.llava()
    return model, huggingface.load(hf.write(tmp_path_factory.mktemp("llava") / "model", model))


def test_projector(pair):
    model, checkpoint = pair
    features = np.random.default_rng(0).normal(size=(2, hf.PATCHES, hf.VISION["hidden_size"]))
    features = features.astype(np.float32)
    with torch.no_grad():
        theirs = model.model.multi_modal_projector(torch.tensor(features))
    params = checkpoint.params["multi_modal_projector"]
    ours = Llava(checkpoint.config).projector().apply({"params": params}, jnp.asarray(features))
    hf.assert_close(ours, theirs)


def test_prompt_logits(pair):
    """Rows with 0, 1 and 3 images and prompts of different lengths have transformers' logits in one
    batch.
    """
    model, checkpoint = pair
    counts = [1, 0, 3]
    rows = [prompt(count, words, seed=words) for count, words in zip(counts, (12, 9, 6))]
    pixels = hf.images(sum(counts))
    ours = our_logits(
        checkpoint.config, checkpoint.params, hf.padded(rows)[0], pixel_batch(counts, pixels)
    )
    for row, theirs in zip(ours, hf.logits(model, rows, pixels)):
        hf.assert_close(row[: len(theirs)], theirs)
    assert LlavaConfig.from_hf(checkpoint.config.to_hf()) == checkpoint.config


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            "tie_word_embeddings": True,
        },
        {"vision_feature_layer": 1, "vision_feature_select_strategy": "full"},
        {"text": {"rope_scaling": hf.LLAMA3, "tie_word_embeddings": True, "attention_bias": True}},
    ],
    ids=["last layer, no bias, tied", "first layer, class token", "llama3, tied inside, biases"],
)
def test_variants_and_round_trip(tmp_path, changes):
    model = hf.llava(**changes)
    checkpoint = huggingface.load(hf.write(tmp_path / "theirs", model))
    patches = checkpoint.config.image_tokens
    rows, pixels = [[1, *[hf.IMAGE] * patches, *hf.text(5)]], hf.images(1)
    ours = our_logits(
        checkpoint.config, checkpoint.params, hf.padded(rows)[0], pixel_batch([1], pixels)
    )
    theirs = hf.logits(model, rows, pixels)[0]
    hf.assert_close(ours[0], theirs)
    huggingface.save(tmp_path / "ours", checkpoint.config, checkpoint.params)
    np.testing.assert_array_equal(
        hf.logits(hf.reload(tmp_path / "ours", type(model)), rows, pixels)[0], theirs
    )
    again = huggingface.load(tmp_path / "ours")
    assert again.config == checkpoint.config
    jax.tree.map(np.testing.assert_array_equal, again.params, checkpoint.params)


def test_decode_logits(pair):
    """Prefill of ragged rows with 2, 0 and 1 images, then decoding token by token, give
    transformers' logits.
    """
    model, checkpoint = pair
    lm, params = LanguageModel(checkpoint.config), checkpoint.params
    counts, steps = [2, 0, 1], 6
    rows = [prompt(count, 4 + steps, seed=count) for count in counts]
    pixels = hf.images(sum(counts))
    theirs = hf.logits(model, rows, pixels)
    starts = [len(row) - steps for row in rows]

    tokens, length = hf.padded([row[:start] for row, start in zip(rows, starts)])

    @jax.jit
    def prefill(tokens: jax.Array, length: jax.Array, pixels: jax.Array) -> Any:
        rows = PromptRows(tokens, length, in_order(tokens == hf.IMAGE))
        embeds = lm.embed(params, rows, lm.encode(params, {"pixels": pixels}))
        return lm.prefill(params, embeds, rows, 48)

    logits, cache = prefill(tokens, length, pixel_batch(counts, pixels))
    extend = jax.jit(lm.extend)
    for step in range(steps + 1):
        for row, start in enumerate(starts):
            hf.assert_close(logits[row], theirs[row][start + step - 1])
        if step < steps:
            new = jnp.asarray([[row[start + step]] for row, start in zip(rows, starts)])
            logits, cache = extend(params, new, cache)
            logits = logits[:, 0]

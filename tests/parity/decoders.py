"""Check, an aspect at a time and for all families, what every decoder must do as transformers
does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints import huggingface
from jaxspec.config import TextConfig
from jaxspec.decoding.inputs import PromptBatch
from jaxspec.models.families import build
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from tests import tiny
from tests.tiny import hf
from tests.tiny.hf import torch

ROTARY = {
    "model/embed_tokens": "model.embed_tokens",
    "model/layers_0/self_attn": "model.layers.0.self_attn",
    "model/layers_0/mlp": "model.layers.0.mlp",
    "model/layers_1": "model.layers.1",
    "model/norm": "model.norm",
}
"""Modules of Llama's shape, ours and transformers'."""
ROWS = [hf.text(40, seed=1), hf.text(7, seed=2), hf.text(23, seed=3)]


def check_modules(path: Path, model: Any, names: dict[str, str]) -> None:
    """Check each module's output, first to last, the logits of a ragged batch, and the directory
    that this library writes.

    Args:
      path: an empty folder.
      names: {our path: transformers' path} of the modules.
    """
    checkpoint = huggingface.load(hf.write(path / "theirs", model))
    outputs: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            outputs[name] = (out[0] if isinstance(out, tuple) else out).detach().numpy()

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names.values()]
    logits = hf.logits(model, ROWS)
    for hook in hooks:
        hook.remove()

    module = build(checkpoint.config)
    apply = jax.jit(
        lambda *inputs: module.apply(*inputs, capture_intermediates=True, mutable=["intermediates"])
    )
    ours, inside = apply({"params": checkpoint.params}, jnp.asarray(hf.padded(ROWS)[0]))
    for here, there in names.items():
        found = inside["intermediates"]
        for key in here.split("/"):
            found = found[key]
        out = found["__call__"][-1]
        out = out[0] if isinstance(out, tuple) else out
        for row, expected, count in zip(out, outputs[there].reshape(out.shape), map(len, ROWS)):
            hf.assert_close(row[:count], expected[:count], here)
    for row, expected in zip(ours, logits):
        hf.assert_close(row[: len(expected)], expected)
    assert type(checkpoint.config).from_hf(checkpoint.config.to_hf()) == checkpoint.config
    huggingface.save(path / "ours", checkpoint.config, checkpoint.params)
    for ours, theirs in zip(hf.logits(hf.reload(path / "ours", type(model)), ROWS), logits):
        np.testing.assert_array_equal(ours, theirs)
    assert huggingface.load(path / "ours").config == checkpoint.config


def check_decode(checkpoint: huggingface.Checkpoint, model: Any) -> None:
    """Check prefill of ragged rows, then steps of one token, and one of four, through the cache."""
    lm, params = LanguageModel(checkpoint.config), checkpoint.params
    prompts, total = [4, 11, 9], 10
    rows = [hf.text(count + total, seed=count) for count in prompts]
    theirs = hf.logits(model, rows)

    tokens, length = hf.padded([row[:count] for row, count in zip(rows, prompts)], width=16)
    prompt = PromptRows(jnp.asarray(tokens), jnp.asarray(length))
    last, cache = jax.jit(lm.prefill, static_argnums=3)(
        params, lm.embed(params, prompt, None), prompt, 32
    )
    for row, count in enumerate(prompts):
        hf.assert_close(last[row], theirs[row][count - 1])

    extend, done = jax.jit(lm.extend), 0
    for step in (1, 1, 1, 1, 1, 1, 4):
        new = jnp.asarray(
            [row[count + done : count + done + step] for row, count in zip(rows, prompts)]
        )
        ours, cache = extend(params, new, cache)
        for row, count in enumerate(prompts):
            hf.assert_close(ours[row], theirs[row][count + done : count + done + step])
        done += step
    np.testing.assert_array_equal(cache.length, length + total)


def check_greedy(checkpoint: huggingface.Checkpoint, model: Any, new: int = 40) -> None:
    """Check that `new` tokens are those that transformers' `generate` writes."""
    rows = [row[:12] for row in ROWS]
    model.generation_config.eos_token_id = None
    expected = []
    for row in rows:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([row]), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        expected.append(out[0, len(row) :].tolist())
    assert min(len(set(tokens)) for tokens in expected) > 4, "a constant answer proves little"

    lm, params = LanguageModel(checkpoint.config), checkpoint.params
    prompt = PromptRows(*(jnp.asarray(x, jnp.int32) for x in hf.padded(rows)))
    batch = PromptBatch(prompt, None, jnp.ones((len(rows), 1)))
    options = tiny.sampling(len(rows), new=new, eos=(-1,))
    assert tiny.outputs(tiny.run_plain(lm, params, batch, options, new)) == expected


def our_logits(config: TextConfig, params: Any, tokens: Any) -> jax.Array:
    return jax.jit(build(config).apply)({"params": params}, jnp.asarray(tokens))

"""The Llama decoder equals transformers' to 1e-4 in float32: whole prompts, and token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_cache
from jaxspec.config import RopeScaling, TextConfig
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel, abstract_params, build, layers
from jaxspec.models.inputs import PromptRows

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints import huggingface
from tests.parity import tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query, head_dim": {"num_key_value_heads": 1, "head_dim": 12},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3, tied": {"rope_scaling": tiny.LLAMA3, "tie_word_embeddings": True},
    "biases, theta, eps": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 5000.0,
        "rms_norm_eps": 0.01,
    },
}

# What each field is changed to; the model's shapes or its logits must follow.
CHANGES: dict[str, dict[str, Any]] = {
    "vocab_size": {"vocab_size": 64},
    "hidden_size": {"hidden_size": 48},
    "intermediate_size": {"intermediate_size": 40},
    "num_hidden_layers": {"num_hidden_layers": 2},
    "num_attention_heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    "num_key_value_heads": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 16},
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "rope_theta": {"rope_theta": 5000.0},
    "rope_scaling": {"rope_scaling": RopeScaling("linear", 2.0)},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
}
# The one value of these is all that is supported, or they steer the decoding around the model.
UNREAD = {
    "model_type",
    "hidden_act",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
ROPE_CHANGES: dict[str, Any] = {
    "rope_type": "linear",
    "factor": 8.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 16,
}


def text_config(**changes: Any) -> TextConfig:
    return TextConfig(**tiny.TEXT | changes)


def our_logits(config: TextConfig, params: Any, tokens: Any) -> jax.Array:
    return jax.jit(build(config).apply)({"params": params}, jnp.asarray(tokens))


@pytest.mark.parametrize("name", VARIANTS)
def test_prompt_logits(tmp_path, name):
    model = tiny.llama(**VARIANTS[name])
    checkpoint = huggingface.load(tiny.write(tmp_path / "model", model))
    rows = [tiny.text(40, seed=1), tiny.text(7, seed=2), tiny.text(23, seed=3)]

    ours = our_logits(checkpoint.config, checkpoint.params, tiny.padded(rows)[0])
    for row, theirs in zip(ours, tiny.logits(model, rows)):
        tiny.assert_close(row[: len(theirs)], theirs)
    assert TextConfig.from_hf(checkpoint.config.to_hf()) == checkpoint.config


def test_decode_logits(tmp_path):
    """Prefill of ragged rows, then steps of one token, and one of four, through the cache."""
    model = tiny.llama(**VARIANTS["llama3, tied"])
    checkpoint = huggingface.load(tiny.write(tmp_path / "model", model))
    lm, params = LanguageModel(checkpoint.config), checkpoint.params
    prompts, total = [4, 11, 9], 10
    rows = [tiny.text(count + total, seed=count) for count in prompts]
    theirs = tiny.logits(model, rows)

    tokens, length = tiny.padded([row[:count] for row, count in zip(rows, prompts)], width=16)
    prompt = PromptRows(jnp.asarray(tokens), jnp.asarray(length))
    last, cache = jax.jit(lm.prefill, static_argnums=3)(params, lm.embed(params, prompt, None), prompt, 32)
    for row, count in enumerate(prompts):
        tiny.assert_close(last[row], theirs[row][count - 1])

    extend, done = jax.jit(lm.extend), 0
    for step in (1, 1, 1, 1, 1, 1, 4):
        new = jnp.asarray([row[count + done : count + done + step] for row, count in zip(rows, prompts)])
        ours, cache = extend(params, new, cache)
        for row, count in enumerate(prompts):
            tiny.assert_close(ours[row], theirs[row][count + done : count + done + step])
        done += step
    np.testing.assert_array_equal(cache.length, length + total)


def test_rollback_is_a_length():
    """Slots past a row's length are rubbish that changes nothing."""
    config = text_config(num_hidden_layers=1)
    lm, params = LanguageModel(config), tiny.random_params(abstract_params(config))
    extend = jax.jit(lm.extend)
    _, clean = extend(params, jnp.asarray([tiny.text(3)]), init_cache(config, 1, 16, jnp.float32))
    new = jnp.asarray([[5, 6, 7]])
    straight, _ = extend(params, new, clean)
    _, dirty = extend(params, jnp.asarray([[9, 10, 11]]), clean)
    again, _ = extend(params, new, dirty.replace(length=clean.length))
    np.testing.assert_array_equal(straight, again)


def test_blocked_attention(tmp_path, monkeypatch):
    """A prompt longer than a query block: the same logits, by way of the blocks."""
    model = tiny.llama()
    checkpoint = huggingface.load(tiny.write(tmp_path / "model", model))
    rows = [tiny.text(48), tiny.text(33)]
    whole = layers._attend_block
    seen = []
    monkeypatch.setattr(layers, "QUERY_BLOCK", 8)
    monkeypatch.setattr(layers, "_attend_block", lambda q, *rest: seen.append(q.shape[1]) or whole(q, *rest))
    ours = our_logits(checkpoint.config, checkpoint.params, tiny.padded(rows)[0])
    assert set(seen) == {8}
    for row, theirs in zip(ours, tiny.logits(model, rows)):
        tiny.assert_close(row[: len(theirs)], theirs)


def test_every_field_is_accounted_for():
    assert CHANGES.keys() | UNREAD == {field.name for field in fields(TextConfig)}
    assert ROPE_CHANGES.keys() == {field.name for field in fields(RopeScaling)}


@pytest.fixture(scope="module")
def logits_of() -> Callable[[TextConfig], jax.Array]:
    """Logits of one prompt and one set of weights under a configuration, each computed once."""
    return functools.cache(lambda c: our_logits(c, tiny.random_params(abstract_params(c)), [tiny.text(40)]))


@pytest.mark.parametrize("name", [*CHANGES, *ROPE_CHANGES])
def test_field_changes_output(logits_of, name):
    config = text_config(num_hidden_layers=1, rope_scaling=RopeScaling(**tiny.LLAMA3))
    if name in CHANGES:
        other = replace(config, **CHANGES[name])
    else:
        scaling = replace(config.rope_scaling, **{name: ROPE_CHANGES[name]})
        other = replace(config, rope_scaling=scaling)
    if abstract_params(config) == abstract_params(other):
        assert np.abs(logits_of(config) - logits_of(other)).max() > 10 * tiny.TOLERANCE


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 32"),
    ],
)
def test_unsupported(raw, message):
    with pytest.raises(InputError, match=message) as caught:
        TextConfig.from_hf(raw)
    assert "\n" not in str(caught.value)


def test_rope_keys_of_both_versions():
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters."""
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}
    assert TextConfig.from_hf(old) == TextConfig.from_hf(new) == TextConfig.from_hf(old | new)
    assert TextConfig.from_hf({"rope_theta": None, "rope_scaling": None}) == TextConfig()
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = TextConfig.from_hf({"rope_scaling": llama3, "max_position_embeddings": 4096})
    assert config.rope_scaling.original_max_position_embeddings == 4096


def test_token_id_null_is_kept():
    assert TextConfig.from_hf({"eos_token_id": None}).eos_token_id is None
    assert TextConfig.from_hf({}).eos_token_id == 2
    assert TextConfig.from_hf({"eos_token_id": [2, 7]}).eos_token_id == (2, 7)

"""Targets whose layers slide, or differ in kind, write the same tokens with every draft.

Prompts and answers are longer than the windows, and trees deeper.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.config import Gemma3TextConfig, MistralConfig, Qwen2Config, RotaryConfig
from jaxspec.engine.batches import batcher
from jaxspec.errors import InputError
from jaxspec.heads.making import init_head, new_head
from jaxspec.models.inputs import PromptRows
from jaxspec.models.layers import remat_layers, text_norm
from tests import tiny

pytestmark = pytest.mark.full

NEW = 24
SHAPE: dict[str, Any] = {
    "vocab_size": tiny.CONFIG.text_config.vocab_size,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
KINDS = ("sliding_attention", "full_attention", "sliding_attention")
TARGETS: dict[str, RotaryConfig] = {
    "mistral": MistralConfig(num_hidden_layers=2, sliding_window=3, **SHAPE),
    "qwen2": Qwen2Config(num_hidden_layers=3, sliding_window=4, layer_types=KINDS, **SHAPE),
    "gemma3": Gemma3TextConfig(
        num_hidden_layers=3,
        sliding_window=4,
        layer_types=KINDS,
        head_dim=12,
        tie_word_embeddings=False,
        **SHAPE,
    ),
    "gemma4": tiny.gemma4(
        ("sliding_attention", "full_attention", "full_attention"), sliding_window=4
    ),
    "gemma4 E": tiny.gemma4(
        ("sliding_attention", "full_attention", "full_attention", *KINDS[:2]),
        sliding_window=4,
        **tiny.E2B,
    ),
}
WORDS = ("What is this?", "Hi", "Tell me more")
SIZES = EngineConfig(batch_size=3, new_buckets=(32,), prompt_buckets=(32, 128), gamma=4)
HEADS: dict[str, dict[str, Any]] = {
    "KV head": {"feature": "last_hidden", "key_layers": (1, 2)},
    "EAGLE-3": {"feature": "fused", "target_layers": (0, 1, 2)},
}
DRAFTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "chain": ("mistral", ("T",), {}),
    "static tree": ("qwen2", ("T", "KV head"), {"tree": "2:8"}),
    "two KV layers": ("gemma4", ("T", "KV head"), {"tree": "dynamic:2:6"}),
    "EAGLE-3": ("gemma3", ("T", "EAGLE-3"), {}),
    "shared keys": ("gemma4 E", ("T", "KV head"), {"tree": "2:6"}),
}
"""Target, drafts and options."""


def model(config: RotaryConfig, scale: float = 0.3) -> LoadedModel:
    params = tiny.random_params(config, scale=scale)
    return tiny.loaded(params, config, tiny.chat_tokenizer())


def engine(target: LoadedModel, drafts: tuple[str, ...] = (), **options: Any) -> Engine:
    models: list[Any] = []
    if "T" in drafts:
        models.append(replace(target, params=tiny.noisy(target.params, 0.05)))
    for name in HEADS.keys() & {*drafts}:
        models.append(tiny.head_of(target, **HEADS[name]))
    views = tuple(name for name in drafts if name not in HEADS)
    return Engine(target, models, replace(SIZES, views=views, **options))


def asked() -> list[Request]:
    return [Request(words, NEW - 3 * i) for i, words in enumerate(WORDS)]


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[LoadedModel, list[tuple[int, ...]]]]:
    """Return each target with its plain answers."""
    targets = {name: model(config) for name, config in TARGETS.items()}
    return {
        name: (target, tiny.tokens(engine(target).generate(asked())))
        for name, target in targets.items()
    }


@pytest.mark.parametrize("name", DRAFTS)
def test_every_draft_writes_the_plain_answers(
    plain: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of draft writes the plain answers of a target with windows, while caches grow."""
    monkeypatch.setattr(batcher, "FIRST", 8)
    kind, drafts, options = DRAFTS[name]
    target, expected = plain[kind]
    results = engine(target, drafts, **options).generate(asked())
    assert tiny.tokens(results) == expected
    assert sum(int(result.stats.accepted_at.sum()) for result in results) > 3
    assert len({token for answer in expected for token in answer}) > 8


def test_a_session_reads_what_the_whole_prompt_does(plain: Any) -> None:
    target, _ = plain["gemma4 E"]
    one = engine(target, ("T",), gamma=3)
    tiny.check_session(one, [(question, []) for question in ("What?", "And?", "So?")])


def test_windows_change_answers(plain: Any) -> None:
    """A target writes other tokens without its window, or with another."""
    target, expected = plain["mistral"]
    wider = replace(target, config=replace(target.config, sliding_window=4))
    assert tiny.tokens(engine(wider).generate(asked())) != expected


@pytest.mark.parametrize("kind", ["gemma4", "gemma4 E"])
def test_layers_of_two_kinds_are_trained_as_they_are_run(plain: Any, kind: str) -> None:
    """Layers of two kinds are trained as they are run: rematerialised layers of one kind are one
    scan, and these are called one by one.
    """
    target, _ = plain[kind]
    rows = PromptRows(jnp.arange(24).reshape(2, 12), jnp.full(2, 12))

    def total(params: Any, on: bool) -> jax.Array:
        with remat_layers(on):
            return jnp.square(target.model.score(params, rows, None)).mean()

    ours, theirs = (jax.jit(jax.grad(total), static_argnums=1)(target.params, x) for x in (1, 0))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, theirs)


def test_a_kv_head_has_the_layers_of_its_keys_without_windows() -> None:
    config = new_head(TARGETS["gemma3"], key_layers=(1, 2))
    assert config.text_config.layer_types == ("full_attention", "sliding_attention")
    assert config.text_config.sliding_window is None
    assert type(config).from_dict(config.to_dict()) == config
    with pytest.raises(InputError, match=r"key_layers \[0, 1\] have heads of 2 sizes; give layers"):
        new_head(TARGETS["gemma4"], key_layers=(0, 1))
    with pytest.raises(InputError, match=r"key_layers \[3\]; give layers 0 to 2"):
        new_head(TARGETS["gemma4 E"], key_layers=(3,))


@pytest.mark.parametrize("feature", ["none", "fused", "block"])
def test_a_new_head_norms_as_its_target_does(plain: Any, feature: Any) -> None:
    """A new head norms as its target does, though Gemma multiplies by 1 + weight, and EAGLE-3 and
    DFlash heads by their weight.
    """
    target, _ = plain["gemma3"]
    layers = {"target_layers": (1,), "layers": 1} if feature == "block" else {}
    layers |= {"target_layers": (0, 1, 2)} if feature == "fused" else {}
    config = new_head(target.config, feature=feature, **layers)
    norm = {"weight": jnp.arange(32.0)}
    params = {**target.params, "model": {**target.params["model"], "norm": norm}}
    head = init_head(config, params, jax.random.key(0), target.config.norm_offset)
    x = jax.random.normal(jax.random.key(1), (3, 32))
    ours, theirs = (
        text_norm(text).apply({"params": weights}, x)
        for text, weights in ((config.text_config, head["norm"]), (target.config, norm))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_one_width_in_16_bits() -> None:
    """Answers at one width do not depend on the draft where layers have a window."""
    target = model(replace(TARGETS["mistral"], hidden_size=256, head_dim=64), scale=0.06)
    halves = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), target.params)
    target = replace(target, params=halves)
    plain, drafted = (
        engine(target, drafts, width=8, gamma=7).generate(asked()) for drafts in ((), ("T",))
    )
    assert tiny.tokens(drafted) == tiny.tokens(plain)
    assert sum(result.stats.accepted_at.sum() for result in drafted)

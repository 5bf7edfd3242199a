"""A KV head's decoding scores what its training does, and drafts what its target writes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.cache import KVCache, newest_hidden
from jaxspec.decoding.inputs import PromptBatch
from jaxspec.decoding.sources.head import HeadSource
from jaxspec.decoding.sources.source import Committed, Prefilled, Verified
from jaxspec.errors import InputError
from jaxspec.heads.blocks import corrected, embedder, read_blocks, read_whole
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.heads.making import init_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.families import text_params
from jaxspec.models.inputs import PromptRows, in_order
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.rows import image_spans
from jaxspec.typing import Array, Params
from tests import tiny
from tests.decoding.test_eagle import ENGINE, target_of
from tests.tiny.families import write
from tests.tiny.one_pass import check_training_pass

TARGET, PARAMS = tiny.lvlm(32, 2, seed=0)
TEXT, IMAGE = TARGET.text, tiny.VOCABULARY - 1
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear, hidden states, two layers": (
        *("llava", {"feature": "last_hidden", "slot_bias": True, "layers": 2}),
    ),
    "attention over tiles, keys of two layers": (
        *("llava_next", {"pooling": "attention", "image_slots": 3, "key_layers": (0, 1)}),
    ),
    "no keys but of images": ("llava", {"own_keys": False, "reads_text": False}),
    "all": ("llava", {"pooling": "none"}),
    "one pass, hidden states": (
        *("llava", {"feature": "last_hidden", "parallel": True, "markov": 2, "layers": 2}),
    ),
    "MTP": ("llava", {"feature": "mtp"}),
}
"""Target's family, and options of `new_head`."""
FEW = "linear, hidden states, two layers", "one pass, hidden states"
NEW, J = 24, 3


def headed(name: str, words: tuple[int, ...]) -> tuple[LoadedModel, LoadedHead]:
    family, options = HEADS[name]
    target = target_of(family)
    config, params = tiny.kv_head(target.model, target.params, noise=0.2, gamma=J, **options)
    config = replace(config, text_config=replace(config.text_config, draft_vocabulary=words))
    if words and "markov_out" in params:
        params = params | {"markov_out": params["markov_out"][:, : len(words)]}
    return target, LoadedHead(config, params)


@pytest.mark.parametrize("name", [*FEW, *tiny.rarer(*(name for name in HEADS if name not in FEW))])
def test_one_pass_predicts_the_blocks(name: str) -> None:
    check_training_pass(partial(headed, name), ENGINE, NEW)


SCORED: dict[str, dict[str, Any]] = {
    "linear": HEADS[FEW[0]][1],
    "attention over tiles": HEADS["attention over tiles, keys of two layers"][1]
    | {"image_tokens": 2 * tiny.PATCHES},
}
PAGES, BEFORE, FORCED = (2, 0, 1), 6, 12


def dialogues() -> tuple[Array, list[np.ndarray]]:
    """Rows of one length: images, then text; and which image each slot shows."""
    rng = np.random.default_rng(0)
    length = 1 + 2 * tiny.PATCHES + BEFORE + FORCED
    rows = [
        np.asarray([1, *[IMAGE] * tiny.PATCHES * n, *rng.integers(3, IMAGE, length)])[:length]
        for n in PAGES
    ]
    shown = [
        np.where(row == IMAGE, (np.cumsum(row == IMAGE) - 1) // tiny.PATCHES, -1) for row in rows
    ]
    return jnp.asarray(rows), shown


@pytest.mark.parametrize("name", ["attention over tiles", *tiny.rarer("linear")])
def test_decoding_scores_what_training_scored(name: str) -> None:
    """Blocks of forced tokens, of which 1, 0, 2, 3 are accepted in turn: the logits of each are
    training's.
    """
    config, params = tiny.kv_head(TARGET, PARAMS, noise=0.2, gamma=J, **SCORED[name])
    tokens, pages = dialogues()
    # both pages may be one image's tiles
    shown = [row // max(config.image_tokens // tiny.PATCHES, 1) for row in pages]
    length = tokens.shape[1]
    start, blocks = length - FORCED, [2, 1, 3, 4]
    starts = np.cumsum([start, *blocks])[: len(blocks)]
    pixels = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 8, 8, 3)), jnp.float32)
    spans = jnp.asarray(image_spans(shown, 2))
    rows = PromptRows(tokens, jnp.full(3, length), in_order(tokens == IMAGE))

    def both(params: Params) -> tuple[Array, Array]:
        features = TARGET.encode(PARAMS, {"pixels": pixels})
        (seen,) = read_whole(TARGET, PARAMS, rows, features, config)
        at = jnp.broadcast_to(jnp.asarray(starts[:, None] + np.arange(J)), (3, len(starts), J))
        hidden = read_blocks(config, params, PARAMS, seen, rows, at, spans)
        block = tokens[:, at[0]].reshape(3, -1)
        logits = TARGET.logits(PARAMS, hidden).reshape(*block.shape, -1)
        embed = embedder(config, params, PARAMS)
        trained = corrected(config, params, logits, block, embed).reshape(*hidden.shape[:3], -1)

        embeds = TARGET.embed(PARAMS, rows, features)
        _, target = TARGET.read(PARAMS, embeds, rows, length + J, config.target_states)
        source = HeadSource(config, J, TARGET)
        shared = {"target": PARAMS, source.name: params}
        read_so_far = target.replace(length=jnp.full(3, start))
        prompt = jax.tree.map(lambda x: x[:, :start] if x.ndim > 1 else x, rows)
        batch = PromptBatch(prompt, None, jnp.ones((3, 1)), ())
        state = source.prefill(Prefilled(shared, batch, None, read_so_far, FORCED + J), spans)
        decoded = []
        for begin, emitted in zip(starts, blocks, strict=True):
            committed = Committed(shared, tokens, jnp.full(3, begin + 1), read_so_far, J)
            logits, scratch = source.begin(committed, state)
            steps = [logits[0, :, 0]]
            for s in range(1, J):
                logits, scratch = source.score(committed, scratch, tokens[:, begin + s, None])
                steps.append(logits[0, :, 0])
            decoded.append(jnp.stack(steps, axis=1))
            read_so_far = target.replace(length=jnp.full(3, begin + emitted))
            state = source.commit(state, scratch, Verified(jnp.full(3, emitted)))
        return trained, jnp.stack(decoded, axis=1)

    trained, decoded = jax.jit(both, compiler_options=tiny.QUICK)(params)
    assert np.abs(trained).max() > 1
    np.testing.assert_allclose(decoded, trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("temperature", "tree"), [(0.0, None), (1.0, "2:5")])
def test_a_target_of_one_layer_is_its_own_head(temperature: float, tree: str | None) -> None:
    """A target of one layer is its own head: reading all images, it computes what the target will,
    so every block is accepted as far as it goes.
    """
    target, params = tiny.lvlm(32, 1, seed=0)
    config, head = tiny.kv_head(target, params, noise=0.0, pooling="none")
    batch = tiny.prompts([5, 3, 7, 5], [1, 0, 2, 1], ("head",), head=config)
    spec = tiny.speculator(
        target, LanguageModel(config.text_config), ("head",), J, tree=tree, head=config
    )
    new = 1 + 5 * (J + 1)
    options = tiny.sampling(4, temperature, new=new, eos=(-1,))
    state = tiny.run_speculative(spec, tiny.params_of(spec, params, head=head), batch, options, new)
    assert state.stats.steps.tolist() == [5] * 4
    assert state.stats.histogram[:, 0].sum() == 0
    assert temperature > 0 or tiny.outputs(state) == tiny.outputs(
        tiny.run_plain(target, params, batch, options, new)
    )


@pytest.mark.full
def test_a_target_of_one_layer_is_its_own_head_with_m_rope(tmp_path: Path) -> None:
    """A target of one layer is its own head with M-RoPE too, where images take other rotary
    positions than slots.
    """
    target = LoadedModel.load(write(tmp_path, "qwen3_vl") / "target")
    config = KVHeadConfig.of_target(target.config, pooling="none", gamma=J)
    head = init_head(config, text_params(target.config, target.params), jax.random.key(0))
    settings = {"prompt_buckets": (64, 128), "image_buckets": (0, 4, 16), "new_buckets": (32,)}
    plain = Engine(target, config=EngineConfig(**settings))
    engine = Engine(target, LoadedHead(config, head), EngineConfig(gamma=J, **settings))
    request = Request(plain.encoder.prompt("What?", [tiny.page(0)]), 1 + 5 * (J + 1))
    result = engine.generate(request)
    assert result.tokens == plain.generate(request).tokens
    assert result.stats.histogram[:J].sum() <= 1  # the last block may end early
    assert result.stats.histogram[J] > 2
    # of a LLaVA, as presets and their options are
    recipe = {"pooling": "linear", "image_slots": 64, "slot_bias": True}
    assert KVHeadConfig.of_target(target.config, **recipe) == replace(
        config, pooling="drop", gamma=5
    )


def test_an_empty_row_reads_the_state_before_its_first_token() -> None:
    """An empty row reads, in the last slot, the state before its first token."""
    hidden = jnp.tile(jnp.arange(9.0)[:, None], (3, 1, 1, 1))
    cache = KVCache((), (), jnp.asarray([6, 7, 0]), jnp.zeros(3, jnp.int32), hidden=hidden)
    assert newest_hidden(cache)[..., 0].tolist() == [[5], [6], [8]]


def test_a_head_takes_its_own_target_only() -> None:
    config = KVHeadConfig.of_target(TARGET.config, image_slots=2)
    assert config.for_target(TARGET.config) == config
    other = replace(TARGET.config, text_config=replace(TEXT, rope_theta=5e5))
    with pytest.raises(InputError, match=r"made for a target of configuration \w{16}, but this ll"):
        config.for_target(other)
    with pytest.raises(InputError, match=r"key_layers \[2\]; give layers 0 to 1"):
        KVHeadConfig.of_target(TARGET.config, image_slots=2, key_layers=(2,))


def test_one_pass_drafts_at_most_what_it_was_trained_for() -> None:
    config, _ = tiny.kv_head(TARGET, PARAMS, parallel=True, gamma=3)
    for gamma in (2, 3):
        tiny.speculator(TARGET, TARGET, ("head",), gamma, head=config)
    with pytest.raises(
        InputError, match="gamma: 5 is more than the 3 tokens that the draft writes in one pass"
    ):
        tiny.speculator(TARGET, TARGET, ("head",), 5, head=config)

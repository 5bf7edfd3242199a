"""Views show a draft, in the place of an image, the tokens and rows of features that they say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.cli.shared import view_names
from jaxspec.decoding.inputs import Member
from jaxspec.decoding.sources.draft_model import DraftModel, ViewRows
from jaxspec.decoding.sources.source import Committed, Prefilled, Verified
from jaxspec.errors import InputError
from jaxspec.models.families import build
from jaxspec.models.inputs import NEWLINE, TEXT, PromptRows, Slots
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.prompts.rows import rewrite, stack_rows
from jaxspec.prompts.views import VIEWS, View, parse_views
from tests import tiny
from tests.hub.words import files
from tests.tiny.families import SEEING

MODEL, PARAMS = tiny.lvlm(32, 2, seed=0)
B, J = 3, 3


def test_a_row_of_the_ragged_batch_is_the_row_alone() -> None:
    """Each row of a batch of 3 views x 3 prompts with 0 to 2 images drafts what the row alone does.

    It does so over two blocks, of which the first is accepted in different parts. Alone means: the
    row through the whole model, without a cache; for view P the mean of an image's features,
    projected, is put at its slot by hand. Logits are compared at every drafted place whose prefix
    was committed, up to the constant that a softmax does not see.
    """
    views = ("M", "T", "P")
    batch = tiny.prompts([5, 3, 7], [1, 0, 2], views)
    options = tiny.sampling(B, temperature=1.0)
    drafter = tiny.speculator(MODEL, MODEL, views, J).drafter
    written = np.asarray([[7, 9, 11, 13, 15], [8, 10, 12, 14, 16], [6, 6, 7, 7, 8]], np.int32)
    kept = np.asarray([0, 2, J])
    """Accepted drafts of the first block; one more token follows them."""

    @jax.jit
    def two_blocks() -> tuple:
        nothing: Any = None  # no draft model reads the target's cache
        params = {"draft": PARAMS}
        state = drafter.prefill(Prefilled(params, batch, None, nothing, 40))
        told = jnp.asarray(written[:, :1])
        committed = Committed(params, told, jnp.ones(B, jnp.int32), nothing, 1)
        first, scratch = drafter.draft(committed, state, batch.weights, options)
        state = drafter.commit(state, scratch, Verified(kept + 1))
        # Row by row, the newest two of: first token, accepted drafts, correction or bonus.
        told = jnp.concatenate([told, first.tokens, jnp.zeros((B, 1), jnp.int32)], axis=1)
        told = told.at[jnp.arange(B), kept + 1].set(written[:, 1])
        committed = Committed(params, told, kept + 2, nothing, 1)
        second, _ = drafter.draft(committed, state, batch.weights, options)
        return first, second, told

    def alone(view: str, tokens: jax.Array, pixels: jax.Array) -> jax.Array:
        if view != "P":
            return jax.nn.log_softmax(tiny.full_pass(MODEL, PARAMS, tokens, pixels))
        means = MODEL.encode(PARAMS, {"pixels": pixels}).mean(2, keepdims=True)
        pages: Any = build(MODEL.config).apply({"params": PARAMS}, means, method="project")
        embeds = PARAMS["language_model"]["model"]["embed_tokens"]["embedding"][tokens]
        # the images stand first, two at most
        here = tokens[:, 1:3, None] == MODEL.config.image_token_index
        embeds = embeds.at[:, 1:3].set(jnp.where(here, pages, embeds[:, 1:3]))
        rows = PromptRows(tokens, jnp.full(B, tokens.shape[1]))
        hidden, _ = MODEL.read(PARAMS, embeds, rows, tokens.shape[1])
        return jax.nn.log_softmax(MODEL.logits(PARAMS, hidden))

    first, second, told = two_blocks()
    for r, view in enumerate(views):
        prompt = tiny.view_rows(batch)[r]
        begin = np.asarray(prompt.length)
        rows = np.zeros((B, begin.max() + 2 * J + 1), np.int32)  # padding follows what is compared
        for b in range(B):
            parts = prompt.tokens[b, : begin[b]], told[b, : kept[b] + 2], second.tokens[b, : J - 1]
            row = np.concatenate([np.asarray(part) for part in parts])
            rows[b, : len(row)] = row
        whole = jax.jit(partial(alone, view), compiler_options=tiny.QUICK)
        expected = whole(jnp.asarray(rows), batch.images["pixels"])
        for b in range(B):
            accepted, again = min(kept[b] + 1, J), begin[b] + kept[b] + 1
            both = jnp.concatenate([first.view_probs[r, b, :accepted], second.view_probs[r, b]])
            at = [*range(begin[b], begin[b] + accepted), *range(again, again + J)]
            np.testing.assert_allclose(jnp.log(both), expected[b, np.asarray(at)], atol=1e-5)


def test_a_draft_reads_an_image_as_its_model_does() -> None:
    """In Gemma 3 the slots of an image, here two, read one another, in each view that shows it."""
    config, _ = SEEING["gemma3"]()
    model, params, vision = LanguageModel(config), tiny.random_params(config), config.vision_config
    tokens, length = np.asarray([[1, 3, 3, 5]], np.int32), np.asarray([4], np.int32)
    shown = PromptRows(tokens, length, np.asarray([[[TEXT], [0], [1], [TEXT]]], np.int32))
    patches = (vision.image_size // vision.patch_size) ** 2
    features = np.random.default_rng(0).normal(size=(1, 2, patches, vision.hidden_size))
    source = DraftModel((Member(model), Member(model, reads_images=False)), shares_tower=True)
    inputs = ViewRows((shown, PromptRows(tokens, length)), None)
    nothing: Any = None  # the prompts are in `inputs`, and no draft model reads the target's cache

    @partial(jax.jit, compiler_options=tiny.QUICK)
    def keys(features: jax.Array) -> tuple[jax.Array, jax.Array]:
        prefilled = Prefilled({"draft": params}, nothing, features, nothing, 4)
        embeds = model.embed(params, shown, features)
        _, cache = model.prefill(params, embeds, shown, 8)
        return source.prefill(prefilled, inputs).cache.k[-1][0], cache.k[-1][0]

    np.testing.assert_allclose(*keys(jnp.asarray(features, jnp.float32)), atol=1e-6)


def test_what_stands_for_an_image(tmp_path: Path) -> None:
    words = files("llava", tmp_path)
    encoder = PromptEncoder(load_tokenizer(tmp_path), image_token=words["<image>"])
    blind = {view.name: view for view in VIEWS.values() if not view.reads_images}

    def read(*arguments: Any) -> dict[str, str]:
        ids = {name: view.substitute(encoder, *arguments) for name, view in blind.items()}
        return {name: " ".join(encoder.tokenizer.convert_ids_to_tokens(ids[name])) for name in ids}

    literal = "▁ < i m a g e >"
    shown = {"T-literal": literal, "C": "▁ i m a g e : ▁ ▁ a ▁ < i m a g e >"}
    # A SentencePiece tokeniser puts a space piece in front of a newline.
    assert read("a <image>") == {"T": "<0x0A>", "T-slots": "<image>"} | shown
    assert read("", 3) == {
        **{"T": "<0x0A>", "T-slots": "<image> <image> <image>"},
        **{"T-literal": literal, "C": "▁ i m a g e : ▁"},
    }


def test_rewrite_shows_feature_rows() -> None:
    """`rewrite` gives an image's slots the feature rows, blends and positions that they show."""
    line = Slots(
        np.asarray([[2, 0], [NEWLINE, NEWLINE]]),
        rows=3,
        blend=np.asarray([[0.5, 0.5], [1, 0]], np.float32),
    )
    turned = Slots(np.asarray([[1, 1]]), rows=2, positions=np.asarray([[0], [4], [2]], np.int32))
    row = rewrite(np.asarray([1, 99, 5, 99, 6]), 99, [line, turned])
    assert row.tokens.tolist() == [1, 99, 99, 5, 99, 6]
    assert row.sources is not None
    assert row.sources[:, 0].tolist() == [TEXT, 2, NEWLINE, TEXT, 4, TEXT]
    assert row.blend is not None
    assert row.blend[[1, 2, 4]].tolist() == [[0.5, 0.5], [1, 0], [1, 0]]
    assert row.rotary is not None
    assert row.rotary.tolist() == [[0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 8, 9], [0, 1, 2, 3, 6, 9]]
    batch = stack_rows([row], 8)
    assert int(batch.shift[0]) == 10 - 6
    longer = row.followed_by([7, 99])
    assert longer.rotary is not None
    assert longer.rotary[:, -2:].tolist() == [[10, 11]] * 3
    assert longer.sources is not None
    assert longer.sources[-1].tolist() == [TEXT, TEXT]


@pytest.mark.parametrize("pixels", [ImageOps.mirror])
def test_a_view_may_show_other_pixels(
    pixels: Any, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a view that shows other pixels, the draft's tower reads both images, then both changed
    ones, although the target's is equal.

    The view's slots show the features of the changed ones.
    """
    monkeypatch.setitem(VIEWS, "changed", View("changed", reads_images=True, pixels=pixels))
    pages = [np.arange(28 * 28 * 3, dtype=np.uint8).reshape(28, 28, 3), tiny.page()]

    def shown(images: Sequence[np.ndarray], *views: str) -> Any:
        engine = Engine(target, target, EngineConfig(views=views, gamma=3))
        request = Request(engine.encoder.prompt(2 * PLACEHOLDER + "What?", images))
        (read,) = engine.batcher.read([request])
        return engine.batcher.inputs([read], read.sizes, 1)

    both = shown(pages, "M", "changed").sources[0]
    whole, changed = (rows.sources[0, :, 0] for rows in both.rows)
    slots = whole != TEXT
    assert slots.any()
    np.testing.assert_array_equal(changed, np.where(slots, whole + slots.sum(), TEXT))
    others = [np.asarray(pixels(Image.fromarray(page))) for page in pages]
    for first, images in ((0, pages), (2, others)):
        alone = shown(images, "M").images["pixels"][0]
        np.testing.assert_array_equal(both.images["pixels"][0, first : first + 2], alone)


def test_commands_read_views_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VIEWS, "grey", View("grey", reads_images=True))
    named = ("M", "T-slots", "grey", "P36", "head", "lookup")
    assert view_names(" m,t-SLOTS, Grey,p36,HEAD,lookup") == named


def test_parse_views() -> None:
    assert parse_views(["T", "M"]) == (VIEWS["T"], VIEWS["M"])
    assert hash(parse_views(["M"])) == hash((VIEWS["M"],))
    for names, message in [
        (["M", "Q"], "'Q' is unknown; choose from M, T"),
        ([], "at least one view"),
        (["M", "T", "M"], "each once"),
    ]:
        with pytest.raises(InputError, match=message):
            parse_views(names)

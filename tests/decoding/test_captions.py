"""View C shows a draft the ids of a caption in place of each image; captions are kept on disk or
read from files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.drafts.loading import load_models
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.config import LlavaConfig
from jaxspec.data.images import image_hash
from jaxspec.engine.captioners import CachedCaptions, load_captioner, parse_captioner
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.loading.models import prompt_encoder
from jaxspec.prompts.captions import Caption
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.prompts.views import VIEWS
from jaxspec.serve.examples import examples

MINI = Path(__file__).resolve().parents[2] / "jaxspec_demo" / "mini"
NEW = 12


def page(seed: int, side: int = 28) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


class Counting:
    """Caption an image by its hash, and count the requests."""

    identity = "counting"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def caption(self, images: Sequence[Image.Image]) -> list[Caption]:
        self.asked += [image_hash(image) for image in images]
        return [Caption(f"says {image_hash(image)[:6]}", 2.0) for image in images]


# Ids


def test_ids_of_the_prefix_are_those_of_tabed() -> None:
    """The prefix of a caption is three pieces of a Llama-like tokeniser, whose ids in Llama are
    TABED's 1967, 29901, 29871.
    """
    tokenizer = load_tokenizer(MINI / "target")
    ids = VIEWS["C"].substitute(PromptEncoder(tokenizer), "a red ball")
    assert tokenizer.convert_ids_to_tokens(ids[:3]) == ["▁image", ":", "▁"]
    assert ids[3:] == tokenizer.encode("a red ball", add_special_tokens=False)
    assert tokenizer.bos_token_id not in ids


# On disk


def test_an_unknown_task_is_refused_with_its_name() -> None:
    with pytest.raises(InputError, match="task 'WRONG' is unknown; use "):
        parse_captioner("florence2:none/here:WRONG")


def test_an_image_is_captioned_once(tmp_path: Path) -> None:
    """An image is captioned once for a call, later calls and later processes; another captioner has
    its own captions.
    """
    a, b, c = page(0), page(1), page(2)
    captioner = Counting()
    cached = CachedCaptions(captioner, tmp_path)
    first = cached.caption([a, b, a])
    assert [caption.text for caption in first] == [f"says {image_hash(x)[:6]}" for x in (a, b, a)]
    assert captioner.asked == [image_hash(a), image_hash(b)]
    again = CachedCaptions(captioner, tmp_path).caption([c, b, a])
    assert captioner.asked[2:] == [image_hash(c)]
    assert again[1:] == [first[1], first[0]]
    assert cached.caption([]) == []

    other = Counting()
    other.identity = "another"
    CachedCaptions(other, tmp_path).caption([a])
    assert other.asked == [image_hash(a)]
    assert not list(tmp_path.rglob("*.tmp"))


# From a file


def test_captions_of_a_file(tmp_path: Path) -> None:
    page(0).save(tmp_path / "a.png")
    lines = [
        {"image": "a.png", "caption": "first"},
        {"sha256": image_hash(page(1)), "caption": "second"},
    ]
    (tmp_path / "captions.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    captions = load_captioner(f"file:{tmp_path / 'captions.jsonl'}")
    assert captions.caption([page(1), page(0)]) == [Caption("second"), Caption("first")]
    with pytest.raises(
        InputError, match=f"none for the 28x28 image with sha256 {image_hash(page(2))}"
    ):
        captions.caption([page(0), page(2)])
    with pytest.raises(InputError, match="absent"):
        load_captioner(f"file:{tmp_path / 'absent.jsonl'}")


# In the engine


@pytest.fixture(scope="module")
def models(pair: tuple[Path, Path]) -> EvalConfig:
    target, draft = pair
    return EvalConfig(
        target=str(target),
        draft=(str(draft),),
        rows=(Variant("C", ("C",)),),
        sets=("describe",),
        captioner=f"jax:{draft}",
    )


@pytest.fixture(scope="module")
def loaded(models: EvalConfig) -> tuple[LoadedModel, LoadedModel]:
    target, (draft,), _ = load_models(models)
    return target, draft


def test_every_image_of_both_turns_is_captioned_in_order(
    loaded: tuple[LoadedModel, LoadedModel],
) -> None:
    captioner = Counting()
    engine = Engine(*loaded, EngineConfig(views=("C", "M"), gamma=5, batch_size=4), captioner)
    encoder, pages = engine.encoder, [page(i) for i in range(3)]
    first = encoder.prompt(f"{PLACEHOLDER} or {PLACEHOLDER}?", pages[:2])
    second = encoder.follow_up(first, [7, 8], f"{PLACEHOLDER}\nNow?", pages[2:])
    requests = [Request(encoder.prompt("Hi"), NEW), Request(second, NEW)]
    rows = [request.rows for request in engine.batcher.read(requests)]
    said = [f"image: says {image_hash(x)[:6]}" for x in pages]
    spelt = encoder.tokenizer.decode(rows[1][1].tokens, skip_special_tokens=False)
    shown = encoder.tokenizer.decode(second.tokens, skip_special_tokens=False)
    for words in said:
        shown = shown.replace(PLACEHOLDER, words, 1)
    assert spelt == shown
    assert rows[1][1].sources is None
    assert rows[1][2].sources is not None

    captioner.asked.clear()
    results = engine.generate(engine.batcher.read(requests))  # which does not read them again
    assert captioner.asked == [image_hash(x) for x in pages]  # once a call, before prefill
    assert [result.caption_ms for result in results] == [0.0, 6.0]
    plain = Engine(loaded[0], config=EngineConfig(batch_size=4)).generate(requests)
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert [result.caption_ms for result in plain] == [0.0, 0.0]


def test_a_captioner_holds_few_images_at_once(loaded: tuple[LoadedModel, LoadedModel]) -> None:
    """The captioner gets at most 16 images of a call at a time, and each request its own."""
    sizes = []

    class Sizing(Counting):
        def caption(self, images: Sequence[Image.Image]) -> list[Caption]:
            sizes.append(len(images))
            return super().caption(images)

    captioner = Sizing()
    engine = Engine(*loaded, EngineConfig(views=("C",), gamma=2), captioner)
    pages = [page(i) for i in range(19)]
    requests = [Request("Two?", NEW, images=pages[i : i + 2]) for i in range(0, 19, 2)]
    read = engine.batcher.read(requests)
    assert sizes == [16, 3]
    assert captioner.asked == [image_hash(x) for x in pages]
    said = engine.encoder.text(read[8].rows[1].tokens.tolist())
    assert all(f"says {image_hash(x)[:6]}" in said for x in pages[16:18])


def test_a_captioner_that_leaves_an_image_out_is_named(
    loaded: tuple[LoadedModel, LoadedModel],
) -> None:
    class Silent:
        def caption(self, images: Sequence[Image.Image]) -> list[Caption]:
            return []

    engine = Engine(*loaded, EngineConfig(views=("C",), gamma=2), Silent())
    with pytest.raises(InputError, match="captioner: 0 captions of 1 images; let it return one"):
        engine.check(Request("What?", NEW, images=[page(0)]))


def test_a_live_batch_has_room_for_longer_captions_than_its_examples_have() -> None:
    class Shades:
        def caption(self, images: Sequence[Image.Image]) -> list[Caption]:
            return [Caption("dark" if not np.any(image) else "light and dark") for image in images]

    target, draft = (LoadedModel.load(MINI / name) for name in ("target", "draft"))
    encoder = prompt_encoder(target)
    dark, light = (
        encoder.prompt("Hi", [image]) for image in (np.zeros((64, 64, 3), np.uint8), page(0))
    )
    assert isinstance(target.config, LlavaConfig)
    slots = target.config.image_tokens
    assert slots
    target_row = len(dark.tokens) - 1 + slots
    row = len(dark.tokens) - 1 + len(VIEWS["C"].substitute(encoder, "dark"))
    assert row < target_row
    config = EngineConfig(views=("C",), gamma=2, batch_size=1, prompt_buckets=(row, target_row))
    engine = Engine(target, draft, config, Shades())
    batch = engine.live([Request(dark, NEW)])
    (read,) = engine.batcher.read([Request(light, NEW)])
    assert row < len(read.rows[1]) <= target_row
    assert batch.fit(read) == batch.capacity


def test_examples_of_a_live_batch_need_no_captions(tmp_path: Path) -> None:
    target, draft = (LoadedModel.load(MINI / name) for name in ("target", "draft"))
    (tmp_path / "captions.jsonl").touch()
    captioner = load_captioner(f"file:{tmp_path / 'captions.jsonl'}")
    config = EngineConfig(views=("C",), gamma=2, batch_size=1)
    engine = Engine(target, draft, config, captioner)
    requests = examples(engine, [256], 1, 28, NEW)
    batch = engine.live(requests)
    (read,) = engine.batcher.read([Request("Hi", NEW)])
    assert batch.fit(read).length == 256
    with pytest.raises(InputError, match=r"captions captions\.jsonl: none for the 28x28 "):
        engine.check(Request("Hi", NEW, images=[page(0)]))


@pytest.mark.full
def test_an_lvlm_answers_about_each_image_alone(
    models: EvalConfig, loaded: tuple[LoadedModel, LoadedModel], tmp_path: Path
) -> None:
    question, pages = "What? Where?", [page(i) for i in range(3)]
    captioner = load_captioner(f"{models.captioner}:{question}", directory=tmp_path)
    began = time.perf_counter()
    captions = captioner.caption(pages)
    assert 0 < sum(caption.ms for caption in captions) <= (time.perf_counter() - began) * 1000
    alone = Engine(loaded[1], None, EngineConfig(batch_size=1))
    for caption, image in zip(captions, pages, strict=True):
        (answer,) = alone.generate([Request(alone.encoder.prompt(question, [image]), 64)])
        assert caption.text == " ".join(answer.text.split())
    assert (
        load_captioner(f"{models.captioner}:{question}", directory=tmp_path).caption(pages)
        == captions
    )

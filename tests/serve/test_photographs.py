"""Photographs of any size are answered by the sizes that a server compiles; none compiles here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.serve.bodies import chat
from jaxspec.serve.examples import examples, scaled_pixels
from jaxspec.serve.messages import Limits
from jaxspec.serve.worker import Worker
from tests import tiny
from tests.serve.test_server import data_url
from tests.tiny.families import FAMILIES, SQUARES, write

LENGTH = 96
CHATS: Any = SimpleNamespace(chats=True)
"""An encoder whose model has a chat template, and which reads nothing here."""
SIZES = [(40, 30), (1024, 768), (1280, 720), (4032, 3024), (900, 2000), (2400, 500), (2000, 11)]


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_photographs_of_any_size_and_shape_fit(family: str, tmp_path: Path) -> None:
    """Photographs of any size and shape fit a server's default of the pixels that it scales images
    to.
    """
    model = LoadedModel.load(write(tmp_path, family) / "target")
    engine = Engine(model, config=EngineConfig(batch_size=1, prompt_buckets=(LENGTH, 512)))
    pixels = scaled_pixels(engine, LENGTH, 1)
    assert pixels
    worker = Worker(engine, examples(engine, [LENGTH], 1, math.isqrt(pixels), 4, pixels))
    for size in SIZES:
        request = Request("Hi", images=[Image.new("RGB", size)], max_pixels=pixels)
        encoded = worker.read(request, 4)  # raises an error where no size holds it
        assert (encoded.rows[0].images >= 0).any()


@pytest.mark.parametrize(
    ("family", "text", "changes", "words"),
    [
        ("qwen2_5_vl", "x" * 150, {}, "shorten the text"),
        ("llava_next", "x" * 150, {}, "shorten the text"),
        ("qwen2_5_vl", "Hi", {"max_pixels": None}, "give images of at most 40x40 pixels"),
        ("gemma4", "Hi", {"max_soft_tokens": 140}, "give less than 140 max_soft_tokens"),
    ],
)
def test_what_has_no_room_with_an_image_is_said_in_pixels(
    family: str, text: str, changes: dict[str, Any], words: str
) -> None:
    """The refusal of a request that has no room with its image says what to do: shorten the text,
    or give a smaller image.
    """
    config, processor = (FAMILIES | SQUARES)[family]()
    model = LoadedModel(config, tiny.random_params(config), tiny.chat_tokenizer(), processor)
    engine = Engine(model, config=EngineConfig(batch_size=1))
    small = Request("x" * 40, 4, images=[Image.new("RGB", (40, 40))])
    batch = engine.live([small])
    request = replace(small, prompt=text, images=[Image.new("RGB", (1024, 768))], max_pixels=1000)
    changes = changes if family == "qwen2_5_vl" else {"max_pixels": None} | changes
    (encoded,) = engine.batcher.read([replace(request, **changes)])
    with pytest.raises(InputError, match=rf"with \d+ for images of 1024x768 pixels; {words}$"):
        batch.fit(encoded)


def body(*parts: dict[str, Any]) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (9, 9)))}}
    return {"messages": [{"role": "user", "content": [image | part for part in parts]}]}


def test_images_bring_their_most_pixels() -> None:
    limits = Limits("tiny", images=2, max_pixels=1000)
    cases = {(): 1000, (500,): 500, (500, 500): 500, (2000,): 1000}
    for pixels, expected in cases.items():
        parts = [{"max_pixels": most} for most in pixels] or [{}]
        assert chat(body(*parts), CHATS, limits).requests[0].max_pixels == expected
    with pytest.raises(InputError, match="max_pixels: differs between images"):
        chat(body({"max_pixels": 5}, {}), CHATS, limits)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"max_pixels": "x"}, r"content\[0\]: max_pixels: give a whole number"),
        ({"min_pixels": 1}, r"content\[0\].min_pixels: not supported; leave it out"),
        ({"resized_height": 28}, r"content\[0\].resized_height: not supported"),
        ({"image_url": {"url": "", "resized_width": 28}}, r"image_url.resized_width: not supp"),
        ({"type": "text", "text": "Hi"}, r"content\[0\].image_url: not supported"),
    ],
)
def test_keys_of_parts_are_read_or_refused(part: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        chat(body(part), CHATS, Limits("tiny"))

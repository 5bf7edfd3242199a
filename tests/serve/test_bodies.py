"""Bodies become requests: what OpenAI's and vLLM's clients mean by a field, without a server."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxspec.data.images import StoredImage
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.serve.app import silence_pillow
from jaxspec.serve.bodies import Limits, chat, completion
from tests import tiny

ENCODER, LIMITS = PromptEncoder(tiny.tokenizer()), Limits("tiny")


def test_all_tokens_are_asked_for_whatever_the_models_file_says() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    numbers = [
        chat(body | options, ENCODER, LIMITS).requests[0].top_k
        for options in ({}, {"top_k": -1}, {"top_k": 5})
    ]
    assert numbers == [None, 0, 5]


def test_each_prompt_has_a_seed_of_its_own_unless_the_body_has_one() -> None:
    body = {"prompt": ["Once", "Once"]}
    first, second = completion(body, ENCODER, LIMITS).requests
    assert first.seed != second.seed
    seeds = [request.seed for request in completion(body | {"seed": 7}, ENCODER, LIMITS).requests]
    assert seeds == [7, 7]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent.png", "no such file in the server's directory"),
        ("loop", "no such file in the server's directory"),
        ("../outside.png", "no such file in the server's directory"),
        ("x" * 300, "no such file in the server's directory"),
        ("sparse", "a file of over 1000 bytes; name a smaller one"),
    ],
)
def test_a_file_of_the_servers_directory_is_bounded(tmp_path: Path, name: str, words: str) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "loop").symlink_to("loop")
    (tmp_path / "outside.png").touch()
    with (folder / "sparse").open("wb") as file:
        file.truncate(3 * 2**30)
    part = {"type": "image_url", "image_url": {"url": f"file:{name}"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(InputError, match=words):
        chat(body, ENCODER, Limits("tiny", folder=folder, file=1000))


def test_images_of_strangers_fill_no_log() -> None:
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, "TIFF", software="x" * 100)
    content = out.getvalue().replace(b"x" * 100, b"")
    for silent in (False, True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if silent:
                silence_pillow()
            with pytest.raises(InputError):
                StoredImage(content, "tiff").load()
        assert bool(seen) != silent

"""Bodies become requests that mean by each field what OpenAI's and vLLM's clients mean, without a
server.
"""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxspec.data.images import StoredImage, as_png
from jaxspec.engine.engine import Engine
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.serve.app import silence_pillow
from jaxspec.serve.bodies import chat, completion
from jaxspec.serve.examples import examples
from jaxspec.serve.messages import Limits
from tests import tiny
from tests.tiny.families import FAMILIES

ENCODER, LIMITS = PromptEncoder(tiny.tokenizer()), Limits("tiny")
PNG = base64.encodebytes(as_png(tiny.page())).decode()
DATA = f"data:image/png;base64,{PNG}"
"""An image in lines, as some encoders write base64."""


def test_all_tokens_are_asked_for_whatever_the_models_file_says() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    numbers = [
        chat(body | options, ENCODER, LIMITS).requests[0].top_k
        for options in ({}, {"top_k": -1}, {"top_k": 5})
    ]
    assert numbers == [None, 0, 5]


def test_an_answer_may_be_short_whatever_the_models_file_says() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    numbers = [
        chat(body | options, ENCODER, LIMITS).requests[0].min_new_tokens
        for options in ({}, {"min_tokens": 0}, {"min_tokens": 5})
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
        chat(body, ENCODER, Limits("tiny", folder=folder, body=1000))


@pytest.mark.parametrize("name", ["a%20page.png", "///a%20page.png", "a page.png", "50%25.png"])
def test_a_files_name_may_be_percent_encoded(tmp_path: Path, name: str) -> None:
    for file in ("a page.png", "50%25.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / file)
    part = {"type": "image_url", "image_url": {"url": f"file:{name}"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
    assert chat(body, ENCODER, Limits("tiny", folder=tmp_path)).requests


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


@pytest.mark.parametrize(
    "sent",
    [
        {"reasoning_effort": "low"},
        {"skip_special_tokens": True, "spaces_between_special_tokens": True},
        {"add_generation_prompt": True, "continue_final_message": False, "documents": []},
        {"stop_token_ids": [], "ignore_eos": False, "include_stop_str_in_output": False},
        {"length_penalty": 1.0, "use_beam_search": False, "min_tokens": 0, "bad_words": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"stream": True, "stream_options": {"continuous_usage_stats": True, "x": False}},
        {"seed": -1},
        {"seed": 2**63 + 5},
        {"messages": [{"role": "user", "type": "text", "content": "Hi"}]},
        {"messages": [{"role": "user", "type": "message", "content": "Hi"}]},
        *({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": DATA, "detail": detail}}
        ]}]} for detail in ("low", "high", "original")),
    ],
    ids=str,
)  # fmt: skip
def test_what_common_clients_send_is_taken(sent: dict[str, Any]) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], **sent}
    (request,) = chat(body, ENCODER, LIMITS).requests
    assert 0 <= request.seed < 2**32


def test_a_completion_begins_without_bos_if_asked() -> None:
    def tokens(**sent: Any) -> list[int]:
        (request,) = completion({"prompt": "Once", **sent}, ENCODER, LIMITS).requests
        return request.prompt.tokens.tolist()  # type: ignore[union-attr]

    bos = ENCODER.tokenizer.bos_token_id
    assert tokens() == tokens(add_special_tokens=True) == [bos, *ENCODER.ids("Once")]
    assert tokens(add_special_tokens=False) == ENCODER.ids("Once")


def test_a_base_model_serves_completions() -> None:
    """A base model, which has no form of a question, serves completions, and refuses chats with the
    path that it has.
    """
    config, _ = FAMILIES["opt"]()
    engine = Engine(tiny.loaded(tiny.random_params(config), config))
    assert len(completion({"prompt": "Once"}, engine.encoder, LIMITS).requests) == 1
    with pytest.raises(InputError, match=r"^messages: .* ask POST /v1/completions, or start"):
        chat({"messages": [{"role": "user", "content": "Hi"}]}, engine.encoder, LIMITS)
    lengths = [len(request.prompt.tokens) for request in examples(engine, [64, 128], 0, 28, 8)]
    assert {64, 128} == {*lengths}


SCHEMA = {"type": "object"}
WHOLE = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@pytest.mark.parametrize(
    ("sent", "form"),
    [
        ({"response_format": {"type": "text"}}, {"type": "text"}),
        ({"response_format": WHOLE, "guided_json": None}, WHOLE),
        ({"guided_json": SCHEMA}, WHOLE),
        ({"guided_json": '{"type": "object"}'}, WHOLE),
        ({"guided_choice": ["a", "b"]}, {"type": "choice", "choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"type": "regex", "regex": "a+"}),
        ({"structured_outputs": {"json_object": True, "json": None}}, {"type": "json_object"}),
        ({"structured_outputs": {"json": SCHEMA}}, WHOLE),
        ({}, None),
    ],
    ids=str,
)
def test_a_form_is_given_as_openais_clients_do_or_vllms(sent: Any, form: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **sent}
    assert chat(body, ENCODER, LIMITS).requests[0].response_format == form


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_regex and guided_choice: give one"),
        ({"guided_json": "{"}, "guided_json: not JSON"),
        ({"guided_json": "[" * 10**5}, "guided_json: JSON of too many levels"),
        ({"guided_choice": "a"}, "guided_choice: .*; give {"),
        ({"guided_grammar": "a"}, "guided_grammar: no such field"),
        ({"response_format": {"type": "structural_tag"}}, "response_format: .*; give {"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar: not supported"),
    ],
    ids=str,
)
def test_other_forms_are_refused_by_their_name(sent: Any, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **sent}
    with pytest.raises(InputError, match=f"^{words}"):
        chat(body, ENCODER, LIMITS)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, True, "1"])
def test_other_seeds_are_not_a_whole_number(seed: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "seed": seed}
    with pytest.raises(InputError, match="seed: "):
        chat(body, ENCODER, LIMITS)

"""Bodies become requests: what OpenAI's and vLLM's clients mean by a field, without a server."""

from __future__ import annotations

from jaxspec.prompts.encoder import PromptEncoder
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

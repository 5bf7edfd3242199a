"""The reasoning of families that think is split from the answer, and left out of later turns."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import AddedToken

from jaxspec.config import LlamaConfig
from jaxspec.engine.engine import Engine, EngineConfig, Request
from jaxspec.engine.session import Session
from jaxspec.models.families import abstract_params
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.messages import Message, dialogue, user_message
from jaxspec.prompts.stops import ReasonedText, text_so_far
from jaxspec.serve.answers import Answer
from jaxspec.serve.bodies import chat
from jaxspec.serve.messages import Limits
from jaxspec.serve.worker import Ticket
from tests import tiny
from tests.hub.configs import GEMMA4

QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m['role'] == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
"""Qwen3's, in short: earlier answers without reasoning, and no thoughts are empty ones."""
ALWAYS = QWEN3.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
"""That of models that always think, and write no first mark."""
SPECIAL = {
    "<|im_start|>": True,
    "<|im_end|>": True,
    **dict.fromkeys(("<|turn>", "<turn|>", "<|think|>"), True),
}
MARKS = {
    "qwen3": {"<think>": False, "</think>": False},
    "gemma4": {"<|channel>": True, "<channel|>": True},
}
"""Token -> whether it is special, which Qwen3's are not."""


def encoder_of(family: str, template: str = "", **options: Any) -> PromptEncoder:
    words, template = tiny.tokenizer(), template or {"qwen3": QWEN3, "gemma4": GEMMA4}[family]
    for token, special in (SPECIAL | MARKS[family]).items():
        words.add_tokens([AddedToken(token, special=special, normalized=False)], special)
    words.eos_token = "<|im_end|>" if family == "qwen3" else "<turn|>"
    words.chat_template = template
    return PromptEncoder(words, **options)


THOUGHT = "\nShort.\nIt is so."
WRITTEN = {
    "qwen3": f"<think>{THOUGHT}\n</think>\n\n",
    "gemma4": f"<|channel>thought{THOUGHT}<channel|>",
}
FAMILIES = pytest.mark.parametrize("family", WRITTEN)


@FAMILIES
@pytest.mark.parametrize("every", [1, 3, 99])
def test_an_answer_is_split_while_it_is_written(family: str, every: int) -> None:
    encoder = encoder_of(family)
    tokens = encoder.ids(f"{WRITTEN[family]}It is blue.\nAnd so on.")
    answer = ReasonedText(encoder, encoder.prompt("Who?"), ["\n"], pieces=True)
    reasons, texts = [""], [""]
    for begin in range(0, len(tokens), every):
        answer.extend(tokens[begin : begin + every])
        reasons.append(text_so_far(reasons[-1], answer.reasoning, ()))
        texts.append(text_so_far(texts[-1], answer.text, ["\n"]))
    assert (answer.reasoning, answer.text) == (THOUGHT.strip(), "It is blue.")
    assert answer.stop == "\n"  # not the one in the reasoning
    assert answer.tokens == encoder.ids(f"{WRITTEN[family]}It is blue.\n")
    for parts in (reasons, texts):
        assert all(after.startswith(before) for before, after in pairwise(parts))
    assert THOUGHT.strip().startswith(reasons[-1])
    assert every == 99 or len({*reasons}) > 3
    pairs = list(zip(answer.pieces, answer.reasons, strict=True))
    assert "".join(piece for piece, reason in pairs if not reason).strip() == "It is blue."
    assert THOUGHT.strip() in "".join(piece for piece, reason in pairs if reason)


@FAMILIES
def test_the_end_of_a_prompt_decides_where_an_answer_begins(family: str) -> None:
    thinks, off = encoder_of(family, thinking=True), encoder_of(family, thinking=False)
    whole, tokens = f"{WRITTEN[family]}Blue.", thinks.ids("Blue.")
    cases = [
        (thinks, thinks.prompt("Who?"), whole, THOUGHT.strip(), "Blue."),
        (off, off.prompt("Who?"), "Blue.", "", "Blue."),
        (thinks, thinks.prompt("Who?"), whole[: whole.index(".")], "Short", ""),
        (thinks, Prompt(thinks.prompt("Who?").tokens, continued=True), "Blue.", "", "Blue."),
    ]
    if family == "qwen3":
        always = encoder_of(family, ALWAYS)
        asked = always.prompt("Is <think> a tag?")
        cases += [
            (always, asked, whole.removeprefix("<think>"), THOUGHT.strip(), "Blue."),
            # a mark within an answer, or in a question, quotes itself
            (thinks, thinks.prompt("<think>"), "A <think>.", "", "A <think>."),
        ]
    else:
        twice = f"{whole} {WRITTEN[family]}It is."
        thoughts = "\n".join([THOUGHT.strip()] * 2)
        cases += [(thinks, thinks.prompt("Who?"), twice, thoughts, "Blue. It is.")]
    for encoder, prompt, written, reasoning, text in cases:
        answer = ReasonedText(encoder, prompt)
        answer.extend(encoder.ids(written))
        assert (answer.reasoning, answer.text) == (reasoning, text), written
    plain = ReasonedText(PromptEncoder(tiny.tokenizer()), thinks.prompt("Who?"))
    plain.extend(tokens)
    assert (plain.reasoning, plain.text, plain.tokens) == ("", "Blue.", tokens)


@FAMILIES
@pytest.mark.parametrize("thinking", [None, True, False])
def test_later_turns_are_what_the_template_makes_of_earlier_answers(
    family: str, thinking: bool | None
) -> None:
    """Earlier answers appear in later turns as the template writes them: without reasoning and
    without the marks that end a prompt.
    """
    encoder = encoder_of(family, thinking=thinking)
    eos = str(encoder.tokenizer.eos_token)
    said = [*dialogue([("Who?", "It is blue."), ("Why?", "So.")]), user_message("How?")]
    for end in ("", eos):
        for written in ("", WRITTEN[family]):
            first = encoder.prompt("Who?")
            answer = encoder.ids(f"{written}It is blue.{end}")
            second = encoder.follow_up(first, answer, "Why?")
            assert second.tokens.tolist() == encoder.prompt(said[:3]).tokens.tolist()
            third = encoder.follow_up(second, encoder.ids(f"{written}So.{end}"), "How?")
            assert third.tokens.tolist() == encoder.prompt(said).tokens.tolist()
    cut = encoder.follow_up(encoder.prompt("Who?"), encoder.ids(WRITTEN[family][:12]), "Why?")
    blank = [said[0], Message("assistant", ("",)), said[2]]
    assert cut.tokens.tolist() == encoder.prompt(blank).tokens.tolist()


def test_reasoning_that_the_template_shows_is_kept() -> None:
    encoder = encoder_of("qwen3")
    first, answer = encoder.prompt("Who?"), encoder.ids(f"{WRITTEN['qwen3']}Look.<|im_end|>")
    told = [*first.tokens.tolist(), *answer]
    after = encoder.follow_up(first, answer, [Message("tool", ("Blue.",))])
    assert after.tokens[: len(told)].tolist() == told
    plain = replace(encoder, tokenizer=encoder_of("qwen3", QWEN3.split("{% if m")[0] + (
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}<|im_start|>assistant\n"
    )).tokenizer)  # fmt: skip
    assert plain.follow_up(first, answer, "Why?").tokens[: len(told)].tolist() == told


EOS = "<|im_end|>"


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine of a text model whose answers are always "<think>Hm</think>It.": each token
    names the next.
    """
    words = encoder_of("qwen3").tokenizer
    ids = words.encode(f"\n<think>Hm</think>It.{EOS}", add_special_tokens=False)
    size = len(words)
    config = LlamaConfig(
        vocab_size=size, hidden_size=size + size % 2, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, eos_token_id=ids[-1],
        max_position_embeddings=512,
    )  # fmt: skip
    params: Any = jax.tree.map(
        lambda leaf: np.full(leaf.shape, float(len(leaf.shape) == 1), np.float32),
        abstract_params(config),
    )
    params["model"]["embed_tokens"]["embedding"] += np.eye(size, config.hidden_size)
    for token, after in pairwise(ids):
        params["lm_head"]["weight"][after, token] = 1
    options = EngineConfig(views=("lookup",), new_buckets=(128,), prompt_buckets=(64, 256))
    return Engine(tiny.loaded(params, config, words), config=options)


def test_results_streams_and_sessions_have_reasoning_apart(engine: Engine) -> None:
    whole = engine.generate(Request("Who?", 16, stop=("m", "Z")))
    assert (whole.reasoning, whole.text, whole.finish_reason) == ("Hm", "It.", "stop")
    *parts, last = engine.stream(Request("Who?", 16))
    assert replace(last, stats=whole.stats).tokens == whole.tokens
    assert [(part.reasoning, part.text) for part in [*parts, last]][-1:] == [("Hm", "It.")]
    session = Session(engine)
    answers = [session.ask(question, max_new_tokens=16) for question in ("Who?", "Why?")]
    assert [(result.reasoning, result.text) for result in answers] == [("Hm", "It.")] * 2
    said = [*dialogue([("Who?", "It.")]), user_message("Why?")]
    assert session._turn is not None
    assert session._turn[0].tokens.tolist() == engine.encoder.prompt(said).tokens.tolist()


def test_the_server_sends_reasoning_apart_and_takes_it_back(engine: Engine) -> None:
    limits, question = Limits("m"), {"role": "user", "content": "Who?"}
    job = chat({"messages": [question]}, engine.encoder, limits)
    (read,), (result,) = engine.batcher.read(job.requests), engine.generate(list(job.requests))
    with closing(asyncio.new_event_loop()) as loop:
        ticket = Ticket(read, 0.0, asyncio.Event(), loop)
    answer, deltas = Answer(job, "m", True, [ticket], engine.encoder, "id"), []
    for reasoning, text, end in (("H", "", None), ("Hm", "It", None), ("Hm", "It.", "stop")):
        ticket.result = replace(result, text=text, reasoning=reasoning, finish_reason=end)
        parts = answer.parts({0: ticket.result})
        deltas += [json.loads(part[6:])["choices"][0]["delta"] for part in parts]
    assert deltas == [
        {"reasoning_content": "H"},
        {"reasoning_content": "m", "content": "It"},
        {"content": "."},
    ]
    message = answer.whole()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "It.")
    again = [question, message, {"role": "user", "content": "Why?"}]
    (request,) = chat({"messages": again}, engine.encoder, limits).requests
    (read,) = engine.batcher.read([request])
    said = [*dialogue([("Who?", "It.")]), user_message("Why?")]
    assert read.prompt.tokens.tolist() == engine.encoder.prompt(said).tokens.tolist()

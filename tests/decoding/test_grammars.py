"""Answers keep the form that a request asks for, and drafts change none of them.

`test_processors.py` holds the law of masked scores.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from jaxspec.decoding.grammars import Grammar, _masks
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import PromptEncoder
from tests import tiny
from tests.data.test_reasoning import ALWAYS, encoder_of

TOKENIZER = tiny.tokenizer()
EOS = TOKENIZER.eos_token_id
ENCODER = PromptEncoder(TOKENIZER, stops=(EOS,))
PROMPT = ENCODER.prompt("Hi")
WORDS = 4
CHOICES = ("yes", "yesno", "no", 'a "b"\\c | \n')
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
BLANK = tuple(TOKENIZER.convert_tokens_to_ids([" ", "\n"]))


def ids(text: str) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(list(text))


def allowed(mask: np.ndarray) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}


def test_tokens_of_choices_may_follow_and_nothing_else() -> None:
    """Only tokens of the choices may follow, whatever was asked before: rows take turns, go back,
    and try tokens of no choice.
    """
    grammar = Grammar({"type": "choice", "choice": CHOICES}, ENCODER, PROMPT)
    rng, everything = np.random.default_rng(0), {*range(32 * WORDS)}
    for row in rng.integers(0, 3, 300).tolist():
        text = CHOICES[rng.integers(len(CHOICES))]
        begin = text[: rng.integers(len(text) + 1)]
        following = {c[len(begin)] for c in CHOICES if c.startswith(begin) and c != begin}
        expected = {*ids("".join(following)), *([EOS] if begin in CHOICES else [])}
        assert allowed(grammar.mask(row, ids(begin), WORDS)) == expected
        for wrong in ([*ids(begin), -1], [*ids(begin), *ids("z")]):
            assert allowed(grammar.mask(row, wrong, WORDS)) == {EOS}
        assert allowed(grammar.mask(row, [*ids("yes"), EOS, 7], WORDS)) == everything


def test_a_draft_on_which_the_matcher_fails_changes_no_later_mask() -> None:
    grammar = Grammar({"type": "choice", "choice": CHOICES}, ENCODER, PROMPT)
    assert allowed(grammar.mask(0, ids("y"), WORDS)) == {*ids("e")}
    matcher = grammar._walks[0].matcher
    matcher.consume_tokens(ids("z"))
    assert matcher.is_error()
    assert allowed(grammar.mask(0, ids("ye"), WORDS)) == {*ids("s")}


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"type": "regex", "regex": "[0-9]{2}(-[ab]+)?"}, {"12": True, "12-": False, "1-": None}),
        ({"type": "json_object"}, {'{"a": [1, {}]}': True, "{": False, "[": None, "{}{": None}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            {'{\n  "a": 22\n}': True, '{"a":1': False, '{"a":  ': None, '{"a": 1, "b': False,
             '{"a":3': None},
        ),
    ],
)  # fmt: skip
def test_a_text_is_whole_begun_or_of_another_form(
    form: dict[str, Any], texts: dict[str, bool | None]
) -> None:
    grammar = Grammar(form, ENCODER, PROMPT)
    for text, whole in texts.items():
        places = [allowed(grammar.mask(0, ids(text[:i]), WORDS)) for i in range(len(text) + 1)]
        fits = all(token in place for token, place in zip(ids(text), places))
        assert fits == (whole is not None), text
        if fits:
            assert (EOS in places[-1]) == grammar.is_whole(ids(text)) == whole, text


def test_a_program_asks_for_each_row_and_place_of_a_tree() -> None:
    """A program asks for a mask for each row and place of a tree; rows without a grammar, and of an
    answered request, may write anything.
    """
    grammar = Grammar({"type": "choice", "choice": ["ab", "ac", "b"]}, ENCODER, PROMPT)
    gone = Grammar({"type": "choice", "choice": ["b"]}, ENCODER, PROMPT).number
    tokens = np.asarray([ids("a?"), ids("??"), ids("??")])
    drafted = np.asarray([ids("bc"), ids("??"), ids("??")])
    before = np.asarray([[[0, 0], [1, 0], [0, 1]]], bool)  # two children of the newest token
    numbers, count = np.asarray([grammar.number, 0, gone]), np.asarray([1, 1, 1])
    masks = _masks(WORDS, numbers, tokens, count, drafted, before)
    assert [allowed(mask) for mask in masks[0]] == [{*ids("bc")}, {EOS}, {EOS}]
    assert (masks[1:] == 2**32 - 1).all()


def test_an_answer_ends_where_no_token_leads_on() -> None:
    """An answer ends where no token leads on: as the vocabulary has no é, an answer that begins
    with b is no answer.
    """
    grammar = Grammar({"type": "choice", "choice": ["a", "bé"]}, ENCODER, PROMPT)
    assert allowed(grammar.mask(0, ids("b"), WORDS)) == {EOS}
    assert allowed(grammar.mask(0, ids("bx"), WORDS)) == {EOS}
    assert grammar.is_whole([*ids("a"), EOS])
    assert not grammar.is_whole([*ids("b"), EOS])


def test_nothing_follows_an_answer_that_no_token_ends() -> None:
    """Only an EOS follows another one of a model whose answers end at their limit only."""
    grammar = Grammar({"type": "choice", "choice": ["a"]}, PromptEncoder(TOKENIZER), PROMPT)
    for answer in (ids("a"), [*ids("a"), EOS], [*ids("a"), EOS, EOS]):
        assert allowed(grammar.mask(0, answer, WORDS)) == {EOS}


@pytest.mark.parametrize(("template", "opens"), [("", False), (ALWAYS, True)])
def test_a_model_reasons_freely_before_its_answer(template: str, opens: bool) -> None:
    encoder = encoder_of("qwen3", template)
    eos, first, last = encoder.tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<think>", "</think>"]
    )
    grammar = Grammar({"type": "choice", "choice": ["no"]}, encoder, encoder.prompt("Hi"))
    start, words = ids("n"), -(-len(encoder.tokenizer) // 32)
    free = {*range(32 * words)} - {eos}
    begin = [] if opens else [first]
    if not opens:
        assert allowed(grammar.mask(0, [], words)) == {*start, first}
        assert allowed(grammar.mask(0, start, words)) == {*ids("o")}
    for thought in ([], ids("no {")):
        assert allowed(grammar.mask(0, [*begin, *thought], words)) == free
        behind = [*begin, *thought, last]
        assert allowed(grammar.mask(0, behind, words)) == {*start}
        assert allowed(grammar.mask(0, [*behind, *ids("no")], words)) == {eos}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "xml"}, "give {"),
        ({"type": []}, "give {"),
        ({"type": "choice", "choice": []}, "give {"),
        ({"type": "choice", "choice": ["", "x"]}, "give {"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "give {"),
        ({"type": "json_object", "schema": {}}, "give {"),
        ("json", "give {"),
        ({"type": "regex", "regex": "((("}, r"invalid regex .*; change it"),
        ({"type": "regex", "regex": "x" * 200_000}, "characters; give at most 100000"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}, "Invalid type: foo"),
        ({"type": "json_schema", "json_schema": {"schema": {"a": {1, 2}}}}, "give JSON"),
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "Unimplemented keys"),
    ],
)
def test_a_form_that_cannot_be_is_refused_in_one_line(form: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^response_format: .*{words}") as caught:
        Grammar(Request("Hi", response_format=form).response_format or {}, ENCODER, PROMPT)
    assert "\n" not in str(caught.value)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"^response_format: llguidance is not .*serve"):
        Grammar({"type": "json_object"}, ENCODER, PROMPT)


# Answers


def schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """Return a schema whose answers are short."""
    kinds = ["boolean", "enum", "integer", "null", "string", *["object", "array"] * (depth > 0)]
    match kind := kinds[rng.integers(len(kinds))]:
        case "enum":
            return {"enum": [["x", 7, None, 'a"é'], [[1], {"k": 0}]][rng.integers(2)]}
        case "integer":
            return {"type": kind, "minimum": -3, "maximum": int(rng.integers(40))}
        case "string":
            return {"type": kind, "maxLength": int(rng.integers(4))}
        case "array":
            return {"type": kind, "items": schema(rng, depth - 1), "maxItems": 2}
        case "object":
            names = ["a", "b", "cd"][: rng.integers(1, 4)]
            fields = {name: schema(rng, depth - 1) for name in names}
            more = {
                "additionalProperties": False,
                "required": names[: rng.integers(len(names) + 1)],
            }
            return {"type": kind, "properties": fields} | more
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value of JSON is of such a schema."""
    match schema.get("type"):
        case None:
            return json.dumps(value) in map(json.dumps, schema["enum"])
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            return (
                isinstance(value, list)
                and len(value) <= 2
                and all(is_valid(x, schema["items"]) for x in value)
            )
    known = schema["properties"]
    return (
        isinstance(value, dict)
        and {*schema["required"]} <= value.keys() <= known.keys()
        and all(is_valid(x, known[name]) for name, x in value.items())
    )


@pytest.mark.parametrize(
    ("views", "tree", "count"),
    [
        (("M", "T", "lookup"), None, 8),
        pytest.param(("M", "lookup"), "dynamic:2:6", 8, marks=pytest.mark.full),
        pytest.param(("M", "T", "lookup"), None, 200, marks=pytest.mark.full),
    ],
)
def test_answers_are_of_their_schemas_and_those_of_plain_decoding(
    target: LoadedModel, draft: LoadedModel, views: tuple[str, ...], tree: str | None, count: int
) -> None:
    """Answers to random schemas, greedy and drawn, with images and without, keep their schemas, and
    greedy ones are those of plain decoding.
    """
    rng = np.random.default_rng(0)
    schemas = [schema(rng) for _ in range(count)]
    requests = []
    for i, own in enumerate(schemas):
        form = {"type": "json_schema", "json_schema": {"schema": own}}
        images = [tiny.page(i)] * (i % 2)
        options: Any = {"temperature": 2.0 * (i % 4 > 1), "seed": i, "suppress_tokens": BLANK}
        requests.append(Request("Hi", 64, images=images, response_format=form, **options))
    free = Request("Hi", 16)
    requests.insert(2, free)
    config = EngineConfig(views=views, gamma=3, tree=tree, batch_size=4)
    results = Engine(target, draft, config).generate(requests)
    plain = Engine(target, config=EngineConfig(batch_size=4)).generate(requests)
    assert results[2].tokens == plain[2].tokens
    del results[2], plain[2]
    for i, (result, other) in enumerate(zip(results, plain)):
        ended = result.finish_reason == "stop"
        if i % 4 < 2:
            assert result.tokens == other.tokens
        if ended:  # and not where the vocabulary lacks the é of an enum
            assert is_valid(json.loads(result.text), schemas[i]), (schemas[i], result.text)
    assert sum(result.finish_reason == "stop" for result in results) > count / 2
    accepted = sum(int(np.sum(result.stats.accepted_at)) for result in results)
    assert accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_drafts_the_tokens_that_a_form_forces(
    target: LoadedModel, temperature: float
) -> None:
    """Lookup drafts the tokens that a form forces, also where the text has none of them."""
    text = "zqxjk vwyfg zpqjx"
    engine = Engine(target, config=EngineConfig(views=("lookup",), gamma=3))
    form = {"type": "choice", "choice": [text]}
    result = engine.generate(Request("Hi", 64, temperature, response_format=form))
    assert result.text == text
    assert result.stats.steps == -(-(len(result.tokens) - 1) // 4)

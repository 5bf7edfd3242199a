"""The engine keeps the order of requests, sorts them into buckets, compiles few programs, and lets
no row see another.
"""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxspec.checkpoints.generation import read_generation_settings
from jaxspec.config import text_config
from jaxspec.data import images
from jaxspec.data.images import StoredImage
from jaxspec.engine import compile_cache
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.publishing.export import export
from tests import tiny
from tests.tiny import loaded, request_of

NEW = 12
CONFIG = tiny.ENGINE
WORDS = ("Hi", "What?", "Tell me", "A long question")


@pytest.fixture(scope="module")
def engine(target: LoadedModel, draft: LoadedModel) -> Engine:
    return Engine(target, draft, CONFIG)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Empty the table of compiled programs, and return it."""
    fresh: dict[Any, Any] = {}
    monkeypatch.setattr(compile_cache, "EXECUTABLES", fresh)
    return fresh


def test_results_are_in_the_order_of_requests_and_as_if_alone(engine: Engine) -> None:
    requests = [
        request_of(
            engine, WORDS[i % 4], i % 2, seed=i, temperature=float(i > 2), max_new_tokens=NEW - i
        )
        for i in range(6)
    ]
    together = engine.generate(requests)
    assert [result.batch for result in together] == [3] * 6  # three of each bucket
    for request, result in zip(requests, together, strict=True):
        alone = engine.generate([request])[0]
        assert alone.batch == 1
        assert alone.tokens == result.tokens
        assert alone.text == result.text
        for field, value in vars(alone.stats).items():
            np.testing.assert_array_equal(value, getattr(result.stats, field), err_msg=field)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, weighting="inverse_error_power:window=3", trace=True),
        *tiny.rarer(replace(CONFIG, batch_size=2, tree="2:5", views=("lookup",))),
    ],
    ids=["chain", "tree"],
)
def test_a_row_that_is_done_takes_in_the_next_request(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel, compiled: dict[Any, Any]
) -> None:
    """A row that is done takes in the next request: eleven requests are answered as if alone, in
    fewer steps than batch after batch.
    """
    engine = Engine(target, draft if "M" in (config.views or ()) else None, config)
    lengths = [NEW, 2, 3, NEW, 1, 5, 2, NEW, 4, 3, 2]
    requests = [
        request_of(
            engine, WORDS[i % 4], 1, seed=i, temperature=float(i % 3 == 1), max_new_tokens=length
        )
        for i, length in enumerate(lengths)
    ]
    together = engine.generate(requests)
    # prefill of all rows, and of as many as are refilled at once, insertion, and decoding
    assert len(compiled) == 4
    assert {result.batch for result in together} == {11}
    read = engine.batcher.read(requests)
    assert len([*Batch(engine.batcher, read).answers(read)]) == 1  # at pauses nobody reads them
    for request, result in zip(requests, together, strict=True):
        (alone,) = engine.generate([request])
        assert (alone.tokens, alone.trace) == (result.tokens, result.trace)
        for field, value in vars(alone.stats).items():
            np.testing.assert_array_equal(value, getattr(result.stats, field), err_msg=field)


def test_one_compilation_a_bucket(engine: Engine, compiled: dict[Any, Any]) -> None:
    for i in range(6):
        options = {
            "temperature": 0.5 * i,
            "top_k": i,
            "top_p": 1 - 0.1 * i,
            "max_new_tokens": 1 + 3 * i,
        }
        engine.generate([request_of(engine, "x" * (1 + 5 * i), images=1, seed=i, **options)])
    assert len(compiled) == 3  # prefill, decoding of greedy rows, and of others
    engine.generate([request_of(engine, "Hi")])
    assert len(compiled) == 4  # a prefill without images; it leaves a state of the same shape


def test_programs_used_last_outlive_the_others(
    engine: Engine, compiled: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    jax.clear_caches()  # so that no test before this one holds the program too
    first = tiny.tokens(engine.generate([request_of(engine, "Hi", images=1)]))
    given_up = weakref.ref(next(iter(compiled.values()))._executable)
    monkeypatch.setattr(compile_cache, "CROWDED", 0.0)
    # a prefill of its own, for which that with images is given up
    engine.generate([request_of(engine, "Hi")])
    assert len(compiled) == 2
    assert given_up() is None  # and its memory with it
    assert tiny.tokens(engine.generate([request_of(engine, "Hi", images=1)])) == first


def test_only_the_same_tower_is_shared(
    engine: Engine, target: LoadedModel, draft: LoadedModel
) -> None:
    assert engine.assembly.program.sources[0].shares_tower
    assert "vision_tower" not in engine.assembly.params["draft"]
    processor = tiny.image_processor()
    processor.image_mean = [0.5] * 3
    half = replace(target, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
    other = loaded(tiny.noisy(draft.params, 0.1))
    for seeing, drafting, shared in [
        (half, draft, True),  # the draft's tower is the target's once it is rounded
        (target, other, False),
        (half, other, False),
        (target, replace(draft, image_processor=processor), False),
    ]:
        assert Engine(seeing, drafting, CONFIG).assembly.program.sources[0].shares_tower == shared


def test_memory_is_reported_before_it_is_taken(engine: Engine) -> None:
    requests = [request_of(engine, words, images=1) for words in WORDS]
    small, large = engine.memory_report(requests[:1]), engine.memory_report(requests)
    weights = sum(x.nbytes for x in jax.tree.leaves(engine.target.params))
    assert small.target_weights == large.target_weights == weights
    assert large.target_cache == 4 * small.target_cache
    assert str(large).startswith("memory ")
    inserting = Engine(engine.target, engine.draft, replace(CONFIG, batch_size=2))
    assert inserting.memory_report(requests[:2]).insert == 0  # none waits
    report = inserting.memory_report(requests)
    assert report.insert == small.target_cache + small.draft_cache + small.weighting + small.inputs
    assert report.target_cache == 2 * small.target_cache
    settings: dict[str, Any] = {"logprobs": 5, "presence_penalty": 1.0, "logit_bias": {3: 1.0}}
    full = replace(requests[0], **settings)
    batch = engine.live([full])
    arrays = batch.options.processors, batch.state.prompt, batch.state.logprobs
    added = engine.memory_report(full).inputs - small.inputs
    assert added == sum(x.nbytes for x in jax.tree.leaves(arrays)) // batch.width
    assert batch.memory().inputs > batch.rows * small.inputs


@pytest.mark.parametrize("stop", [[2, 7], 9, None])
def test_generation_config_says_where_answers_end(
    tmp_path: Path, target: LoadedModel, stop: Any
) -> None:
    """Answers end at the ids of generation_config.json, which replace those of config.json; without
    any, no token ends an answer, as in transformers.
    """
    path = tiny.save(tmp_path / "model", tiny.CONFIG, target.params)
    file = path / "generation_config.json"
    file.write_text(
        json.dumps({"bos_token_id": 1} | ({} if stop is None else {"eos_token_id": stop}))
    )
    export(path, tmp_path / "copy")
    expected = tuple(stop) if isinstance(stop, list) else stop
    for place in (path, tmp_path / "copy"):
        assert text_config(LoadedModel.load(place).config).eos_token_id == expected
    file.unlink()
    assert (
        text_config(LoadedModel.load(path).config).eos_token_id
        == text_config(tiny.CONFIG).eos_token_id
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequence_bias": [[[3], 1.0]]}, "sequence_bias [[[3], 1.0]]"),
        ({"suppress_tokens": [3, 4], "stop_strings": "x"}, 'stop_strings "x"'),
        ({"do_sample": True, "temperature": 0.6, "typical_p": 0.9}, "typical_p 0.9"),
        ({"num_beams": 4, "length_penalty": 2.0}, "num_beams 4, length_penalty 2.0"),
        (
            {
                "do_sample": False,
                "temperature": 0.9,
                "repetition_penalty": 1.0,
                "bad_words_ids": None,
            },
            None,
        ),
        ({"max_length": 40, "length_penalty": 2.0, "use_cache": False}, None),
    ],
)
def test_settings_that_are_not_applied_are_named_once(
    settings: dict[str, Any],
    words: str | None,
    target: LoadedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | settings))
    told = replace(target, settings=read_generation_settings(tmp_path))
    for _ in range(2):
        Engine(told, replace(told, settings=None), CONFIG)
    place = tmp_path / "generation_config.json"
    line = f"{place}: {words}: not applied; transformers' answers differ by that"
    assert caplog.messages == ([] if words is None else [line])


def test_the_models_file_sets_what_requests_leave_open(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model's file sets what requests leave open, and its sampling settings only where a
    request samples. The first answer says so, and another value compiles nothing.
    """
    file = tmp_path / "generation_config.json"
    sampling = {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "do_sample": True}
    file.write_text(json.dumps({"repetition_penalty": 1.3} | sampling))
    assert isinstance(engine.target, LoadedModel)
    target = replace(engine.target, settings=read_generation_settings(tmp_path))
    own = Engine(target, engine.draft, CONFIG)
    asked = Request("What?", NEW)
    given = replace(asked, repetition_penalty=1.3)
    assert own.generate(asked).tokens == engine.generate(given).tokens
    assert own.generate(replace(asked, repetition_penalty=1.0)).tokens == (
        free := engine.generate(asked).tokens
    )
    assert engine.generate(given).tokens != free
    ignoring = Engine(target, engine.draft, replace(CONFIG, generation_config="ignore"))
    assert ignoring.generate(asked).tokens == free
    for temperature, chosen in ((None, 0.9), (0.7, 0.7)):
        drawn = own.generate(replace(asked, temperature=temperature, seed=3))
        whole = replace(given, temperature=chosen, top_k=5, top_p=0.8, seed=3)
        assert drawn.tokens == engine.generate(whole).tokens
    line = "repetition_penalty 1.3; when sampling temperature 0.9, top_k 5, top_p 0.8"
    advice = "generation_config='ignore' leaves this out"
    assert caplog.messages == [f"{file} sets {line} ({advice})"]
    programs = len(compile_cache.EXECUTABLES)
    own.generate(replace(asked, repetition_penalty=1.1, presence_penalty=0.2))
    assert len(compile_cache.EXECUTABLES) == programs
    file.write_text(json.dumps({"repetition_penalty": 0}))
    wrong = replace(target, settings=read_generation_settings(tmp_path))
    with pytest.raises(InputError, match=r"generation_config.json: repetition_penalty: 0; give 1"):
        Engine(wrong, engine.draft, CONFIG)


def test_settings_of_scores_in_one_batch(engine: Engine) -> None:
    """Each row of a batch has its own settings of scores; rows are taken over, and drafted answers
    are those of plain decoding.
    """
    asked = Request("What?", NEW)
    free = engine.generate(asked).tokens
    first, *_, last = free
    text = engine.encoder.text(free).strip()[3:5]
    requests = [
        asked,
        replace(asked, suppress_tokens=[first, last]),
        replace(asked, begin_suppress_tokens=(first,), frequency_penalty=0.7),
        replace(asked, bad_words=[text, [last]], logit_bias={free[1]: -2.0}),
        replace(asked, no_repeat_ngram_size=2, temperature=1.0, min_p=0.1),
        replace(asked, presence_penalty=1.5, repetition_penalty=1.2),
    ]
    config = replace(CONFIG, batch_size=4)
    drafted = Engine(engine.target, engine.draft, config).generate(requests)
    plain = Engine(engine.target, config=replace(config, views=None)).generate(requests)
    greedy = (0, 1, 2, 3, 5)
    assert [drafted[i].tokens for i in greedy] == [plain[i].tokens for i in greedy]
    assert drafted[0].tokens == free
    assert len({result.tokens for result in drafted}) == len(requests)
    assert not {first, last} & {*drafted[1].tokens}
    assert drafted[2].tokens[0] != first
    assert text not in drafted[3].text
    assert last not in drafted[3].tokens
    pairs = [*zip(drafted[4].tokens, drafted[4].tokens[1:])]
    assert len({*pairs}) == len(pairs)


def test_a_draft_past_its_trained_positions_is_named_once(
    engine: Engine, draft: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    text = replace(text_config(draft.config), max_position_embeddings=29)
    short = replace(draft, config=replace(draft.config, text_config=text))
    drafted = Engine(engine.target, short, CONFIG)
    for words in ("Hi", "What?"):
        asked = Request(words, 30)
        assert drafted.generate(asked).tokens == engine.generate(asked).tokens
    line = "the draft: prompts and answers pass its 29 trained positions, where it may draft worse"
    assert caplog.messages == [f"{line}; answers stay the target's"]


def test_one_id_for_two_words(target: LoadedModel, draft: LoadedModel) -> None:
    """A draft with another character at an id of the target is refused; added tokens may differ."""
    renamed = replace(draft, tokenizer=tiny.tokenizer(tiny.CHARACTERS.replace("~", "£")))
    with pytest.raises(InputError, match=r"\d+ is '£' against '~'"):
        Engine(target, renamed, CONFIG)
    words = tiny.tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<here>"]})
    others = tiny.tokenizer()
    others.add_special_tokens({"additional_special_tokens": ["<there>"]})
    Engine(replace(target, tokenizer=words), replace(draft, tokenizer=others), CONFIG)


def test_a_string_a_request_many_or_none(engine: Engine) -> None:
    page = tiny.page()
    asked = Request(engine.encoder.prompt("What?", [page]), NEW)
    alone, *several = (
        engine.generate(asked),
        *engine.generate([Request("What?", NEW, images=[page]), asked]),
    )
    assert {result.tokens for result in (alone, *several)} == {alone.tokens}
    roomy = Engine(engine.target)  # for as many tokens as a request leaves open
    assert roomy.generate("Hi").tokens == roomy.generate([Request("Hi")])[0].tokens
    assert alone.stats.tokens_per_pass == alone.stats.emitted / alone.stats.steps
    assert math.isnan(engine.generate(Request("Hi", 1)).stats.tokens_per_pass)  # prefill gave it
    assert engine.generate([]) == []
    number: Any = 5
    for call in (engine.generate, engine.prefill, engine.live):
        with pytest.raises(InputError, match=r"^requests: a int; give a Request"):
            call(number)
    with pytest.raises(InputError, match=r"^prompt: a int; give a string"):
        engine.logprobs(number, [1])


@pytest.mark.parametrize("keep_going", [False, True])
def test_images_are_decoded_batch_by_batch(
    keep_going: bool, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests wait, only the images of one batch are decoded, and a few kept ones."""
    monkeypatch.setattr(images, "MOST_DECODED", 1)
    held, most, decode = [0], [0], images._as_rgb

    def decoded(source: Image.Image) -> Image.Image:
        image = decode(source)
        held[0] += 1
        most[0] = max(most[0], held[0])
        weakref.finalize(image, lambda: held.__setitem__(0, held[0] - 1))
        return image

    asked: list[Request] = []
    for i in range(6):  # different ones, as equal pictures share their pixels
        file = tmp_path / f"{i}.png"
        Image.fromarray(tiny.page() + np.uint8(i)).save(file)
        content = file.read_bytes()
        kinds = StoredImage(content, "page", (28, 28)), StoredImage(content, "page"), file
        asked.append(Request("Hi", 2, images=[kinds[i % 3]]))
    monkeypatch.setattr(images, "_as_rgb", decoded)
    config = replace(CONFIG, batch_size=2, keep_going=keep_going)
    small = Engine(engine.target, engine.draft, config)
    small.generate(asked)
    assert most[0] <= 3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Request("So \ud83d?", 2), r"prompt 'So \\ud83d\?': .* is half a character"),
        (Request("Hi" * 300, 2), "prompt: .* are over the target's context of 512"),
    ],
    ids=["text", "length"],
)
def test_a_bad_request_of_several_is_named(engine: Engine, bad: Request, words: str) -> None:
    with pytest.raises(InputError, match=f"^request 13: .*{words}"):
        engine.generate([*[Request("Hi", 2)] * 13, bad, *[Request("Hi", 2)] * 6])
    with pytest.raises(InputError, match=f"^(?!request).*{words}"):
        engine.generate(bad)

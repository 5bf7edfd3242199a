"""An answer may stop at strings, share its prefill with other samples, bring log-probabilities, and
go on in further turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from eval.lib.drafts.forward import forward_logits
from jaxspec.data.images import StoredImage
from jaxspec.decoding.speculative import copied
from jaxspec.engine import compile_cache
from jaxspec.engine.batches import batcher
from jaxspec.engine.engine import CollaborationConfig, Engine, EngineConfig, LoadedModel, Request
from jaxspec.engine.session import Session
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import Prompt
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.tiny.families import FAMILIES

NEW = 24
CONFIG = tiny.ENGINE
PAGES = [Image.fromarray(tiny.page(i)) for i in range(2)]


HEADS: dict[str, dict[str, Any]] = {
    "KV head": {},
    "MSD": {"feature": "eagle1", "images": "unfused"},
    "dflash": {"feature": "block", "target_layers": (0, 1), "layers": 2},
}


def headed(target: LoadedModel, kind: str, **options: Any) -> Engine:
    """Return an engine whose target drafts with a head of a kind."""
    config = replace(CONFIG, views=None, **options)
    return Engine(target, tiny.head_of(target, **HEADS[kind]), config)


def test_an_answer_ends_before_the_first_string_to_stop_at(
    target: LoadedModel, draft: LoadedModel
) -> None:
    engine = Engine(target, draft, CONFIG)
    asked = Request("What?", NEW, images=PAGES[:1])
    free = engine.generate(asked)
    middle = free.text[len(free.text) // 2 :][:2]
    (one, other) = engine.generate([replace(asked, stop=("nowhere", middle)), asked])
    assert other.tokens == free.tokens  # in the same batch, but not asked to stop
    assert one.text == free.text[: free.text.index(middle)]
    assert one.tokens == free.tokens[: len(one.tokens)]
    assert middle in engine.encoder.text(one.tokens)
    assert middle not in engine.encoder.text(one.tokens[:-1])
    assert (one.finish_reason, one.stop_string) == ("stop", middle)
    assert (other.finish_reason, other.stop_string) == ("length", None)
    *parts, last = engine.stream(replace(asked, stop=(middle,)))
    assert (last.text, last.finish_reason) == (one.text, "stop")
    assert all(part.finish_reason is None for part in parts if part.tokens != last.tokens)
    # The longer string begins earlier, but is complete only later.
    begin = free.text.index(middle)
    longer = free.text[begin - 1 : begin + 6]
    assert engine.generate(replace(asked, stop=(longer, middle))).text == one.text
    text = replace(target.config.text_config, eos_token_id=free.tokens[4])
    ending = replace(target, config=replace(target.config, text_config=text))
    ended = Engine(ending, config=replace(CONFIG, views=None)).generate(asked)
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]
    assert (ended.finish_reason, ended.stop_string) == ("stop", None)
    assert all(last.text.startswith(part.text) for part in parts)


def test_samples_are_those_of_their_seeds(target: LoadedModel) -> None:
    engine = headed(target, "MSD")
    penalty = {"frequency_penalty": 0.3, "no_repeat_ngram_size": 2}
    asked = Request("What?", NEW, 1.0, seed=7, images=PAGES[:1], **penalty)
    drawn = engine.samples(asked, 3)
    alone = engine.generate([replace(asked, seed=7 + i) for i in range(3)])
    assert [result.tokens for result in drawn] == [result.tokens for result in alone]
    assert len({result.tokens for result in drawn}) == 3
    with pytest.raises(InputError, match="temperature: 0 makes all samples equal"):
        engine.samples(Request("What?", NEW), 2)


def test_samples_repeat_the_rows_of_each_view() -> None:
    """Samples of one request repeat the rows of each view, also rows without numbers, as a KV
    head's of a prompt without images.
    """
    rows = {"views": jnp.arange(4), "keys": jnp.zeros((2, 3, 0, 8))}
    repeated = copied(rows, tiny.prompts([4, 5], [0, 0], ("M", "T")), tiny.sampling(4))
    assert repeated["views"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert repeated["keys"].shape == (4, 3, 0, 8)


def test_log_probabilities_are_those_of_full_passes(
    target: LoadedModel, draft: LoadedModel
) -> None:
    engine = Engine(target, draft, CONFIG)
    asked = Request(engine.encoder.prompt("What?", PAGES[:1]), 6, 1.0)
    answer = engine.generate(asked).tokens
    rows = [forward_logits(target, asked.prompt, answer[:place]) for place in range(len(answer))]
    expected = [jax.nn.log_softmax(row)[token] for row, token in zip(rows, answer, strict=True)]
    np.testing.assert_allclose(engine.logprobs(asked, answer), expected, atol=1e-4)
    drafted = headed(target, "KV head", prompt_buckets=(16, 32, 64))
    np.testing.assert_allclose(
        drafted.logprobs(asked, answer * 6)[: len(answer)], expected, atol=1e-4
    )
    together = Engine([target, draft], config=CollaborationConfig(combination="weighted:0.7,0.3"))
    others = [forward_logits(draft, asked.prompt, answer[:place]) for place in range(len(answer))]
    expected = [
        np.log(0.7 * jax.nn.softmax(row)[token] + 0.3 * jax.nn.softmax(other)[token])
        for row, other, token in zip(rows, others, answer, strict=True)
    ]
    np.testing.assert_allclose(together.logprobs(asked, answer), expected, atol=1e-4)
    with pytest.raises(InputError, match=r"prompt: .* and 2000 new ones are over the target's con"):
        engine.logprobs(asked, [5] * 2000)


def test_log_probabilities_are_one_program_for_like_lengths(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of like lengths share one program for their log probabilities, even if the bucket of
    prompt and answer has no slots for the answer's padding.
    """
    monkeypatch.setattr(compile_cache, "EXECUTABLES", {})
    engine, answer = Engine(target), [7, 30, 9, 45, 12]
    asked = Request(engine.encoder.prompt("What?", PAGES[:1]))
    rows = [forward_logits(target, asked.prompt, answer[:place]) for place in range(len(answer))]
    expected = [jax.nn.log_softmax(row)[token] for row, token in zip(rows, answer, strict=True)]
    full = len(engine.batcher.read([asked])[0].rows[0]) + len(answer)
    engine = Engine(target, config=replace(CONFIG, views=None, prompt_buckets=(full,)))
    for count in (5, 3, 4):
        scores = engine.logprobs(asked, answer[:count])
        np.testing.assert_allclose(scores, expected[:count], atol=1e-4)
    assert len(compile_cache.EXECUTABLES) == 2


@pytest.mark.parametrize("kind", ["chain", "CoS", *tiny.rarer("tree")])
def test_an_answer_brings_its_log_probabilities(
    kind: str, target: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer's own log probabilities equal those of a full pass over it, in caches that grow and
    in rows that others had, next to rows that ask for none or fewer.
    """
    monkeypatch.setattr(batcher, "FIRST", 8)
    options = {"batch_size": 2}
    config = replace(CONFIG, **options, tree="2:5" if kind == "tree" else None)
    if kind in ("chain", "tree"):
        engine = Engine(target, draft, config)
    else:
        together = CollaborationConfig(combination="weighted:0.7,0.3", **options)
        engine = Engine([target, draft], config=together)
    asked = Request("What?", NEW, 1.0, logprobs=3, images=PAGES[:1])
    others = [replace(asked, logprobs=None), replace(asked, logprobs=0, seed=1, max_new_tokens=9)]
    whole, silent, short = engine.generate([asked, *others])
    assert silent.tokens == whole.tokens
    assert silent.logprobs is None
    assert silent.top_logprobs is None
    for result in (whole, short):
        expected = engine.logprobs(asked, result.tokens)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert short.top_logprobs == ({},) * len(short.tokens)
    for place in (0, 1, 5, len(whole.tokens) - 1):
        top = whole.top_logprobs[place]
        ending = [
            engine.logprobs(asked, [*whole.tokens[:place], token])[-1] for token in (*top, 5, 7, 9)
        ]
        np.testing.assert_allclose([*top.values()], ending[:3], atol=1e-4)
        assert max(ending) - 1e-4 < ending[0]
        assert min(ending[:3]) > max(ending[3 + i] for i, t in enumerate((5, 7, 9)) if t not in top)


@pytest.mark.parametrize("kind", ["views", *tiny.rarer("KV head", "dflash")])
def test_a_session_answers_as_whole_prompts_do(
    kind: str, target: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session whose turns show an image, none, and another one answers as the whole prompts do.
    Caches of views and of a DFlash head grow; the head's third turn samples. Penalties count
    earlier turns.
    """
    monkeypatch.setattr(batcher, "FIRST", 8 if kind in ("views", "dflash") else 128)
    sizes: dict[str, Any] = {"prompt_buckets": (256,), "image_buckets": (2,)}
    engine = Engine(target, draft, replace(CONFIG, **sizes))
    if kind in HEADS:
        engine = headed(target, kind, **sizes)
    session, prompt, answer, read = Session(engine), None, (), []
    prefill = engine.batcher.prefill
    monkeypatch.setattr(
        engine.batcher,
        "prefill",
        lambda together, *rest, **options: (
            read.append(together.past) or prefill(together, *rest, **options)
        ),
    )
    last = float(kind == "KV head")  # another kind of loop, so once
    penalties = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    settings: dict[str, Any] = penalties if kind == "views" else {}
    for question, images, temperature in (
        ("What?", PAGES[:1], 0.0),
        ("And then?", [], 0.0),
        ("This?", PAGES[1:], last),
    ):
        asked = {"question": question, "images": images}
        if prompt is not None:  # the same as messages
            parts = [{"type": "image", "image": image} for image in images]
            content = [*parts, {"type": "text", "text": question}]
            asked = {"messages": [{"role": "user", "content": content}]}
        told = session.ask(**asked, max_new_tokens=NEW, temperature=temperature, **settings)
        prompt = (
            engine.encoder.prompt(question, images)
            if prompt is None
            else engine.encoder.follow_up(prompt, answer, question, images)
        )
        whole = engine.generate(Request(prompt, NEW, temperature, **settings))
        answer = whole.tokens
        assert (told.tokens, told.stats.steps) == (answer, whole.stats.steps)
    kept = [None if past is None else int(past.length[0]) for past in read[::2]]
    assert kept[0] is None
    assert 0 < kept[1] < kept[2]


@pytest.mark.full
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_a_session_reads_images_of_later_turns(family: str) -> None:
    """A session reads images of later turns, also where a second image changes the first: OneVision
    reads one image as many tiles and several as one tile each.
    """
    config, processor = FAMILIES[family]()
    params = tiny.random_params(config, scale=0.5)
    target = LoadedModel(config, jax.device_put(params), tiny.chat_tokenizer(), processor)
    draft = replace(target, params=jax.device_put(tiny.noisy(params, 0.1)))
    sizes = EngineConfig(gamma=2, prompt_buckets=(512,), image_buckets=(64,), new_buckets=(8,))
    pages = [tiny.page(0, 40, 28)], [tiny.page(1, 28, 40)], [tiny.page(2, 28, 28)], []
    engine = Engine(target, draft, sizes)
    tiny.check_session(engine, list(zip(("What?", "This?", "So?", "Why?"), pages)), 8)


def test_wrong_arguments_are_one_line(
    target: LoadedModel, draft: LoadedModel, pair: tuple[Path, Path]
) -> None:
    engine, together, page = Engine(target), CollaborationConfig(), tiny.page()
    head = tiny.head_of(target)
    closed = Image.fromarray(page)
    closed.close()
    assert Engine(target, [head, draft]).assembly.mixture.names == ("M", "head", "lookup")
    token_ids = engine.encoder.prompt("Hi")
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("views: M,T need a draft model", lambda: Engine(target, config=CONFIG)),
        ("draft: no view shows", lambda: Engine(target, draft, EngineConfig(views=()))),
        ("0 models and 2 heads; give at most one", lambda: Engine(target, [head, head])),
        ("config: CollaborationConfig; give an Eng", lambda: Engine(target, config=together)),
        ("give a CollaborationConfig", lambda: Engine([target, draft], config=CONFIG)),
        ("EngineConfig; give what load_draft", lambda: Engine(target, EngineConfig())),
        ("requests: a dict; give a Request", lambda: engine.generate([{"prompt": "Hi"}])),
        ("image photo.jpg: no such file", lambda: asked(images=["photo.jpg"])),
        ("prompt: has no tokens", lambda: engine.generate(Request(Prompt(np.zeros(0, np.int32))))),
        ("images: the prompt is token ids", lambda: Request(token_ids, images=[page])),
        ("image given in memory: not readable", lambda: asked(images=[closed])),
        ("image given in memory: no array of pixels", lambda: asked(images=[b"PNG"])),
        ("image https://a.org/b.png: a web", lambda: asked(images=["https://a.org/b.png"])),
        ("requests: a bytes; give a Request", lambda: engine.generate(b"Hi")),
        ("requests: a int; give a Request", lambda: engine.warmup(5)),
        ("suppress_tokens: token 999; give ids", lambda: asked(suppress_tokens=[999])),
        ("default_proposer: '0' of 2 models; give 0 to 1", lambda: pairing(default_proposer="0")),
        ("combination: 0.5; give a text, as 'wei", lambda: pairing(combination=0.5)),
        ("weights: '0.5'; give a tuple of numbers", lambda: weighted(weights="0.5")),
        (
            "weighting adaboost: errors 0.2/0.3/0.4 are 3 for 2 views; give one for each",
            lambda: weighted(weighting="adaboost:errors=0.2/0.3/0.4"),
        ),
        ("tokens: [-1]; give ids from 0 to", lambda: engine.logprobs("Hi", [-1])),
        ("tokens: [[1], [2, 3]] (setting", lambda: engine.logprobs("Hi", [[1], [2, 3]])),
        ("tokens: [1.5]; give the token ids", lambda: engine.logprobs("Hi", [1.5])),
        ("model: 'four'; give a whole number, 1 or more", lambda: make_mesh("four")),
        ("checkpoint: 4; give a directory's name", lambda: Engine.from_pretrained(4)),
        (
            "checkpoint: LoadedModel(",
            lambda: Engine.from_pretrained(pair[0], draft=draft),  # pyright: ignore
        ),
    ]

    def asked(**options: Any) -> Any:
        return engine.generate(Request("Hi", **options))

    def pairing(**options: Any) -> Any:
        return Engine([target, draft], config=CollaborationConfig(**options))

    def weighted(**options: Any) -> Any:
        return Engine(target, draft, EngineConfig(**options))

    for message, call in wrong:
        with pytest.raises(InputError, match=re.escape(message)):
            call()


asked = partial(Request, prompt="Hi")
SAID = {"role": "user", "content": "Hi"}
loading = partial(LoadedModel.load, "a")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (EngineConfig, {"views": ("lookup", "M")}, "views: 'lookup,M'; name lookup once, behind"),
        (EngineConfig, {"views": ("M", "head")}, "views: 'M,head'; a head reads no view"),
        (EngineConfig, {"views": ("M", 5)}, "views: ('M', 5); give a tuple of names"),
        (EngineConfig, {"views": 5}, "views: 5; give a tuple of names"),
        (CollaborationConfig, {"views": "MT"}, "views: 'MT'; give a tuple of names"),
        (EngineConfig, {"generation_config": "none"}, "generation_config: 'none'; give auto or"),
        (EngineConfig, {"batch_size": 4.0}, "batch_size: 4.0; give 1 to 64"),
        (EngineConfig, {"continuous_batching": True}, "continuous_batching: waiting requests"),
        (CollaborationConfig, {"growing_cache": False}, "growing_cache: caches always begin"),
        (EngineConfig, {"width": 8.0}, "width: 8.0; give 1 to 256"),
        (EngineConfig, {"width": 100000}, "width: 100000; give 1 to 256"),
        (EngineConfig, {"tree": 2}, "tree: 2; give a string, as '2:32'"),
        (EngineConfig, {"weighting": None}, "weighting: None; give a string"),
        (EngineConfig, {"prompt_buckets": (64, 32)}, "prompt_buckets: (64, 32); give whole"),
        (CollaborationConfig, {"gammas": 2}, "gammas: 2; give each model 1 or more"),
        (CollaborationConfig, {"gammas": ("2",)}, "gammas: ('2',); give each model 1"),
        (asked, {"prompt": None}, "prompt: None; give a question, or messages=[...]"),
        (asked, {"messages": [SAID]}, "messages: there is a prompt too; give one of them"),
        (asked, {"temperature": "1"}, "temperature: '1'; give 0"),
        (asked, {"top_p": 0}, "top_p: 0; give more than 0"),
        (asked, {"bad_words": [5]}, "bad_words: [5]; give a list of texts"),
        (asked, {"logit_bias": {1: None}}, "logit_bias: {1: None}; give {token id"),
        (asked, {"repetition_penalty": 0}, "repetition_penalty: 0; give 1 (none)"),
        (asked, {"logprobs": 21}, "logprobs: 21; give 0 to 20"),
        (asked, {"logprobs": 5.0}, "logprobs: 5.0; give 0 to 20"),
        (asked, {"logprobs": True}, "logprobs: True; give 0 to 20"),
        (asked, {"min_new_tokens": 2**31}, "min_new_tokens: 2147483648; give 0 (any)"),
        (asked, {"no_repeat_ngram_size": 2**31}, "no_repeat_ngram_size: 2147483648; give"),
        (asked, {"stop": None}, "stop: None; give a list"),
        (asked, {"stop": "ab"}, "stop: 'ab'; give a list"),
        (asked, {"max_new_tokens": True}, "max_new_tokens: True; give a whole number"),
        (loading, {"weights": "int4"}, "weights: 'int4' is unknown; give int8"),
        (loading, {"mesh": 4}, "mesh: 4; give what jaxspec.sharding.make_mesh returns"),
        (loading, {"dtype": "foo"}, "unknown dtype 'foo'; use one of float32"),
        (loading, {"dtype": np.int8}, "unknown dtype 'int8'; use one of float32"),
        (loading, {"share_tower_with": 4}, "share_tower_with: a int; give"),
        (loading, {"adapter": 4}, "adapter: 4; give a directory's name"),
    ],
)
def test_a_wrong_option_is_one_line(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        make(**options)
    assert "\n" not in str(caught.value)


def test_a_mesh_has_a_device_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(mesh := make_mesh()), "local_devices", [])
    with pytest.raises(InputError, match="none of its 1 devices belongs to process 0 of 1"):
        LoadedModel.load("a", mesh=mesh)


@pytest.mark.parametrize("name", ["max_new_tokens", "seed", "temperature", "stop"])
def test_a_long_value_is_cut_in_its_line(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: 'a") as error:
        Request("Hi", **{name: "a\n" * 10_000})
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)


def test_an_ngram_longer_than_the_text_never_repeats(target: LoadedModel) -> None:
    """An n-gram longer than the text never repeats, and asking for it costs no loop over its
    billion tokens.
    """
    engine, asked = Engine(target, config=replace(CONFIG, views=None)), Request("What?", 6)
    free = engine.generate(asked)
    assert engine.generate(replace(asked, no_repeat_ngram_size=10**9)).tokens == free.tokens


def test_blank_text_is_banned(target: LoadedModel) -> None:
    engine = Engine(target, config=replace(CONFIG, views=None))
    (space,) = engine.encoder.ids("a b")[1:-1]
    (newline,) = engine.encoder.ids("a\nb")[1:-1]
    asked = Request("What?", 6, logit_bias={space: 100.0, newline: 99.0})
    assert {*engine.generate(asked).tokens} == {space}
    assert {*engine.generate(replace(asked, bad_words=[" "])).tokens} == {newline}
    assert not {space, newline} & {*engine.generate(replace(asked, bad_words=[" ", "\n"])).tokens}


@pytest.mark.full
def test_a_broken_image_or_a_long_prompt_fails_its_own_request_alone(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    PAGES[0].save(tmp_path / "page.png")
    good = Request("What?", 4, images=[PAGES[0]])
    file = Request("What?", 4, images=[str(tmp_path / "page.png")])
    bad = Request("What?", 4, images=[str(tmp_path / "broken.png")])
    with pytest.raises(InputError, match=r"request 1: .*broken\.png"):
        Engine(target).generate([good, bad, good])
    sampled = replace(Engine(target).encoder.prompt("Hi" * 300), sample="kitchen")
    with pytest.raises(InputError, match=r"^sample 'kitchen', turn 1: prompt: .* over the target'"):
        Engine(target).generate(Request(sampled))
    asked = [good, bad, file, Request("Hi" * 300)]
    going = Engine(target, config=EngineConfig(keep_going=True))
    first, second, third, long = going.generate(asked)
    assert "broken.png" in second.error
    assert "over the target's context" in long.error
    assert (second.tokens, first.error) == ((), "")
    assert first.tokens == third.tokens == Engine(target).generate(good).tokens
    opened: list[Any] = []
    real = Image.open
    monkeypatch.setattr(
        Image, "open", lambda source, **known: opened.append(source) or real(source, **known)
    )
    stored = StoredImage((tmp_path / "page.png").read_bytes(), "row 1", (28, 28))
    asked = [file, bad, Request("What?", 4, images=[stored])]
    going.generate(asked)
    assert len(opened) == 3, "each image is decoded once"


@pytest.mark.full
def test_settings_of_the_process_change_nothing(
    target: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of the process change no answer, and a second answer equals the first, array for
    array.
    """
    monkeypatch.setattr(batcher, "FIRST", 8)
    asked = [Request("What?", NEW, 1.0, images=PAGES[:1]), Request("Hi", 6), Request("Why", 6)]
    runs = []
    settings: dict[str, Any] = {
        "jax_enable_x64": True, "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise", "jax_default_prng_impl": "rbg",
    }  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (before, settings):
        try:
            for name, value in values.items():
                jax.config.update(name, value)
            engine = Engine(target, draft, CONFIG)
            own = replace(CONFIG, batch_size=2, tree="2:5", weighting="random")
            queue = Engine(target, draft, own)
            answers = [*engine.generate(asked), *queue.generate(asked)]
            answers += engine.samples(asked[0], 2)
            times = {"prefill_ms": 0.0, "decode_ms": 0.0, "compile_ms": 0.0}
            report = engine.memory_report(asked)
            runs.append((report, [replace(answer, **times) for answer in answers]))
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
    assert runs[0] == runs[1]
    assert runs[0][1][0] != runs[0][1][1]


def test_a_warm_engine_compiles_nothing(
    target: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "FIRST", 8)
    compiled: dict[Any, Any] = {}
    monkeypatch.setattr(compile_cache, "EXECUTABLES", compiled)
    engine = Engine(target, draft, CONFIG)
    asked = Request("What?", NEW, images=PAGES[:1])
    engine.warmup([asked])
    known = len(compiled)
    assert known == 4  # prefill, decode, growth to 32 tokens, and decode there
    engine.generate(asked)
    assert len(compiled) == known
    refilled = Engine(target, config=replace(CONFIG, views=()))
    many = [asked] * (CONFIG.batch_size + 1)
    refilled.warmup(many)
    known = len(compiled)
    refilled.generate(many)
    assert len(compiled) == known

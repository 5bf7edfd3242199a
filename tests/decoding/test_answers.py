"""What can be asked of an answer: strings to stop at, samples of one prefill, log-probabilities,
further turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
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
from jaxspec.loading.models import LoadedHead
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.encoder import Prompt
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.tiny.families import FAMILIES

NEW = 24
CONFIG = tiny.ENGINE
PAGES = [
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (28, 28, 3), np.uint8))
    for i in range(2)
]


@pytest.fixture(scope="module")
def head(target: LoadedModel) -> LoadedHead:
    return LoadedHead(*tiny.kv_head(LanguageModel(target.config), target.params))


def engines(
    target: LoadedModel, draft: LoadedModel, head: LoadedHead, **options: Any
) -> dict[str, Engine]:
    config = replace(CONFIG, **options)
    msd = tiny.kv_head(
        LanguageModel(target.config), target.params, feature="eagle1", images="unfused"
    )
    dflash = tiny.kv_head(
        LanguageModel(target.config),
        target.params,
        feature="block",
        target_layers=(0, 1),
        layers=2,
    )
    return {
        "dflash": Engine(target, LoadedHead(*dflash), replace(config, views=None)),
        "MSD": Engine(target, LoadedHead(*msd), replace(config, views=None)),
        "views": Engine(target, draft, config),
        "head": Engine(target, head, replace(config, views=None)),
    }


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
    with pytest.raises(InputError, match="stop: 'ab'; give a list"):
        Request("What?", stop="ab")


def test_samples_are_those_of_their_seeds(
    target: LoadedModel, draft: LoadedModel, head: LoadedHead
) -> None:
    engine = engines(target, draft, head)["MSD"]
    penalty = {"frequency_penalty": 0.3, "no_repeat_ngram_size": 2}
    asked = Request("What?", NEW, 1.0, seed=7, images=PAGES[:1], **penalty)
    drawn = engine.samples(asked, 3)
    alone = engine.generate([replace(asked, seed=7 + i) for i in range(3)])
    assert [result.tokens for result in drawn] == [result.tokens for result in alone]
    assert len({result.tokens for result in drawn}) == 3
    with pytest.raises(InputError, match="temperature: 0 makes all samples equal"):
        engine.samples(Request("What?", NEW), 2)


def test_samples_repeat_the_rows_of_each_view() -> None:
    """Also rows without numbers, as a KV head's of a prompt without images."""
    rows = {"views": jnp.arange(4), "keys": jnp.zeros((2, 3, 0, 8))}
    repeated = copied(rows, tiny.prompts([4, 5], [0, 0], ("M", "T")), tiny.sampling(4))
    assert repeated["views"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert repeated["keys"].shape == (4, 3, 0, 8)


def test_log_probabilities_are_those_of_full_passes(
    target: LoadedModel, draft: LoadedModel, head: LoadedHead
) -> None:
    engine = Engine(target, draft, CONFIG)
    asked = Request(engine.encoder.prompt("What?", PAGES[:1]), 6, 1.0)
    answer = engine.generate(asked).tokens
    rows = [forward_logits(target, asked.prompt, answer[:place]) for place in range(len(answer))]
    expected = [jax.nn.log_softmax(row)[token] for row, token in zip(rows, answer, strict=True)]
    np.testing.assert_allclose(engine.logprobs(asked, answer), expected, atol=1e-4)
    drafted = Engine(target, head, replace(CONFIG, views=None, prompt_buckets=(16, 32, 64)))
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
    with pytest.raises(
        InputError, match=r"prompt: .* and 2000 new ones are over the target's context"
    ):
        engine.logprobs(asked, [5] * 2000)


def test_log_probabilities_are_one_program_for_like_lengths(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket of prompt and answer has no slots for the answer's padding."""
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
    """They equal those of a full pass over the answer, in caches that grow and in rows that others
    had, next to rows that ask for none or fewer.
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


@pytest.mark.parametrize("kind", ["views", *tiny.rarer("head", "dflash")])
def test_a_session_answers_as_whole_prompts_do(
    kind: str,
    target: LoadedModel,
    draft: LoadedModel,
    head: LoadedHead,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An image in the first turn, none in the second, another in the third. Caches of views and
    of a DFlash head grow; the head's third turn samples. Penalties count earlier turns.
    """
    monkeypatch.setattr(batcher, "FIRST", 8 if kind in ("views", "dflash") else 128)
    engine = engines(target, draft, head, prompt_buckets=(256,), image_buckets=(2,))[kind]
    session, prompt, answer, read = Session(engine), None, (), []
    prefill = engine.batcher.prefill
    monkeypatch.setattr(
        engine.batcher,
        "prefill",
        lambda together, *rest, **options: (
            read.append(together.past) or prefill(together, *rest, **options)
        ),
    )
    last = float(kind == "head")  # another kind of loop, so once
    settings: dict[str, Any] = {}
    if kind == "views":
        settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
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
    """OneVision reads one image as many tiles and several as one tile each: a second image changes
    the first.
    """
    config, processor = FAMILIES[family]()
    params = tiny.random_params(config, scale=0.5)
    target = LoadedModel(config, jax.device_put(params), tiny.chat_tokenizer(), processor)
    draft = replace(target, params=jax.device_put(tiny.noisy(params, 0.1)))
    sizes = EngineConfig(gamma=2, prompt_buckets=(512,), image_buckets=(64,), new_buckets=(8,))
    pages = [tiny.page(0, 40, 28)], [tiny.page(1, 28, 40)], [tiny.page(2, 28, 28)], []
    engine = Engine(target, draft, sizes)
    session, prompt, answer = Session(engine), None, ()
    for question, images in zip(("What?", "This?", "So?", "Why?"), pages):
        said = session.ask(question, images, max_new_tokens=8).tokens
        prompt = (
            engine.encoder.follow_up(prompt, answer, question, images)
            if prompt
            else engine.encoder.prompt(question, images)
        )
        answer = engine.generate(Request(prompt, 8)).tokens
        assert said == answer


def test_wrong_arguments_are_one_line(
    target: LoadedModel, draft: LoadedModel, head: LoadedHead
) -> None:
    engine, together, page = Engine(target), CollaborationConfig(), tiny.page()
    closed = Image.fromarray(page)
    closed.close()
    assert Engine(target, [head, draft]).assembly.mixture.names == ("M", "head", "lookup")
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("views: M,T need a draft model", lambda: Engine(target, config=CONFIG)),
        (
            "draft: no view shows the model a prompt",
            lambda: Engine(target, draft, EngineConfig(views=())),
        ),
        (
            "draft: 0 models and 2 heads; give at most one of each",
            lambda: Engine(target, [head, head]),
        ),
        (
            "views: 'lookup,M'; name lookup once, behind",
            lambda: EngineConfig(views=("lookup", "M")),
        ),
        ("views: 'M,head'; a head reads no view", lambda: EngineConfig(views=("M", "head"))),
        (
            "config: CollaborationConfig; give an EngineConfig for one target",
            lambda: Engine(target, config=together),
        ),
        (
            "config: EngineConfig; give a CollaborationConfig",
            lambda: Engine([target, draft], config=CONFIG),
        ),
        # type: ignore[arg-type]
        (
            "draft: EngineConfig; give what load_draft returns",
            lambda: Engine(target, EngineConfig()),
        ),
        # type: ignore[list-item]
        ("requests: a dict; give a Request", lambda: engine.generate([{"prompt": "Hi"}])),
        (
            "image photo.jpg: no such file",
            lambda: engine.generate(Request("Hi", images=["photo.jpg"])),
        ),
        ("prompt: None; give a question, or messages=[...]", Request),
        (
            "messages: there is a prompt too; give one of them",
            lambda: Request("Hi", messages=[{"role": "user", "content": "Hi"}]),
        ),
        ("prompt: has no tokens", lambda: engine.generate(Request(Prompt(np.zeros(0, np.int32))))),
        (
            "images: the prompt is token ids",
            lambda: Request(engine.encoder.prompt("Hi"), images=[page]),
        ),
        (
            "image given in memory: not readable",
            lambda: engine.generate(Request("Hi", images=[closed])),
        ),
        (
            "image given in memory: no array of pixels",
            lambda: engine.generate(Request("Hi", images=[b"PNG"])),
        ),
        (
            "image https://a.org/b.png: a web address",
            lambda: engine.generate(Request("Hi", images=["https://a.org/b.png"])),
        ),
        # type: ignore[arg-type]
        ("requests: a bytes; give a Request", lambda: engine.generate(b"Hi")),
        ("requests: a int; give a Request", lambda: engine.warmup(5)),  # type: ignore[arg-type]
        # type: ignore[arg-type]
        ("temperature: '1'; give 0", lambda: Request("Hi", temperature="1")),
        # type: ignore[arg-type]
        ("top_p: 0; give more than 0", lambda: Request("Hi", top_p=0)),
        (
            "suppress_tokens: token 999; give ids from 0 to",
            lambda: engine.generate(Request("Hi", suppress_tokens=[999])),
        ),
        ("bad_words: [5]; give a list of texts", lambda: Request("Hi", bad_words=[5])),
        ("logit_bias: {1: None}; give {token id", lambda: Request("Hi", logit_bias={1: None})),
        ("repetition_penalty: 0; give 1 (none)", lambda: Request("Hi", repetition_penalty=0)),
        (
            "generation_config: 'none'; give auto or ignore",
            lambda: EngineConfig(generation_config="none"),
        ),
        ("logprobs: 21; give 0 to 20", lambda: Request("Hi", logprobs=21)),
        ("logprobs: 5.0; give 0 to 20", lambda: Request("Hi", logprobs=5.0)),
        ("logprobs: True; give 0 to 20", lambda: Request("Hi", logprobs=True)),
        (
            "min_new_tokens: 2147483648; give 0 (any) to 2147483647",
            lambda: Request("Hi", min_new_tokens=2**31),
        ),
        (
            "no_repeat_ngram_size: 2147483648; give 0 (none) to 2147483647",
            lambda: Request("Hi", no_repeat_ngram_size=2**31),
        ),
        ("batch_size: 4.0; give 1 to 64", lambda: EngineConfig(batch_size=4.0)),
        (
            "continuous_batching: waiting requests always take the rows of finished ones; leave",
            lambda: EngineConfig(continuous_batching=True),
        ),
        (
            "growing_cache: caches always begin small and grow, except at one width; leave it out",
            lambda: CollaborationConfig(growing_cache=False),
        ),
        ("width: 8.0; give 1 to 256", lambda: EngineConfig(width=8.0)),
        ("gammas: 2; give each model 1 or more", lambda: CollaborationConfig(gammas=2)),
        ("gammas: ('2',); give each model 1", lambda: CollaborationConfig(gammas=("2",))),
        (
            "default_proposer: '0' of 2 models; give 0 to 1",
            lambda: Engine([target, draft], config=CollaborationConfig(default_proposer="0")),
        ),
        ("stop: None; give a list", lambda: Request("Hi", stop=None)),  # type: ignore[arg-type]
        ("max_new_tokens: True; give a whole number", lambda: Request("Hi", True)),
        # type: ignore[arg-type]
        ("views: ('M', 5); give a tuple of names", lambda: EngineConfig(views=("M", 5))),
        # type: ignore[arg-type]
        ("views: 5; give a tuple of names", lambda: EngineConfig(views=5)),
        # type: ignore[arg-type]
        ("views: 'MT'; give a tuple of names", lambda: CollaborationConfig(views="MT")),
        # type: ignore[arg-type]
        (
            "weights: '0.5'; give a tuple of numbers",
            lambda: Engine(target, draft, EngineConfig(weights="0.5")),
        ),
        (
            "weighting adaboost: errors 0.2/0.3/0.4 are 3 for 2 views; give one for each",
            lambda: Engine(target, draft, EngineConfig(weighting="adaboost:errors=0.2/0.3/0.4")),
        ),
        # type: ignore[arg-type]
        ("tree: 2; give a string, as '2:32'", lambda: EngineConfig(tree=2)),
        # type: ignore[arg-type]
        ("weighting: None; give a string", lambda: EngineConfig(weighting=None)),
        ("width: 100000; give 1 to 256", lambda: EngineConfig(width=100000)),
        (
            "prompt_buckets: (64, 32); give whole numbers from 1 up",
            lambda: EngineConfig(prompt_buckets=(64, 32)),
        ),
        ("tokens: [-1]; give ids from 0 to", lambda: engine.logprobs("Hi", [-1])),
        # type: ignore[list-item]
        ("tokens: [[1], [2, 3]] (setting", lambda: engine.logprobs("Hi", [[1], [2, 3]])),
        # type: ignore[list-item]
        ("tokens: [1.5]; give the token ids", lambda: engine.logprobs("Hi", [1.5])),
        # type: ignore[arg-type]
        ("weights: 'int4' is unknown; give int8", lambda: LoadedModel.load("a", weights="int4")),
        # type: ignore[arg-type]
        (
            "mesh: 4; give what jaxspec.sharding.make_mesh returns",
            lambda: LoadedModel.load("a", mesh=4),
        ),
        ("model: 'four'; give a whole number, 1 or more", lambda: make_mesh("four")),
        ("unknown dtype 'foo'; use one of float32", lambda: LoadedModel.load("a", dtype="foo")),
        # type: ignore[arg-type]
        ("unknown dtype 'int8'; use one of float32", lambda: LoadedModel.load("a", dtype=np.int8)),
        # type: ignore[arg-type]
        ("share_tower_with: a int; give", lambda: LoadedModel.load("a", share_tower_with=4)),
        # type: ignore[arg-type]
        ("adapter: 4; give a directory's name", lambda: LoadedModel.load("a", adapter=4)),
        # type: ignore[arg-type]
        ("checkpoint: 4; give a directory's name", lambda: Engine.from_pretrained(4)),
    ]
    for message, call in wrong:
        with pytest.raises(InputError, match=re.escape(message)):
            call()


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
    """It costs no loop over its tokens, a billion a pass here."""
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
    with pytest.raises(
        InputError, match=r"^sample 'kitchen', turn 1: prompt: .* over the target's context"
    ):
        Engine(target).generate(Request(sampled))
    asked = [good, bad, file, Request("Hi" * 300)]
    first, second, third, long = Engine(target, config=EngineConfig(keep_going=True)).generate(
        asked
    )
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
    Engine(target, config=EngineConfig(keep_going=True)).generate(asked)
    assert len(opened) == 3, "each image is decoded once"


@pytest.mark.full
def test_settings_of_the_process_change_nothing(
    target: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a second answer differ from the first, array for array."""
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
            queue = Engine(target, draft, replace(CONFIG, batch_size=2))
            answers = [
                *engine.generate(asked),
                *queue.generate(asked),
                *engine.samples(asked[0], 2),
            ]
            times = {"prefill_ms": 0.0, "decode_ms": 0.0, "compile_ms": 0.0}
            runs.append(
                (engine.memory_report(asked), [replace(answer, **times) for answer in answers])
            )
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

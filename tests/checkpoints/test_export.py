"""Exports keep every family bit for bit, with its dtype, vocabulary and the files next to it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, LlamaForCausalLM

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.checkpoints.huggingface import SaveOptions, load, save
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.config import text_config
from jaxspec.errors import InputError
from jaxspec.heads.loading import load_head
from jaxspec.loading.pairs import check_tokens, known_tokens
from jaxspec.models.families import FAMILIES, abstract_params, build, text_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.publishing.export import Target, export, pad_vocabulary
from jaxspec.publishing.licences import licence_of
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe, start_draft
from jaxspec.training.recipes import Stage
from tests import tiny
from tests.tiny import hf, qwen_vl, tiles
from tests.tiny.families import SEEING

MODELS = {"opt": hf.opt, "llava_onevision": tiles.onevision, "qwen3_vl": qwen_vl.qwen3}
"""The tests of parity write every family; these are exported."""


def equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a LLaVA with tokeniser, chat template, processor, licence, and entries of its own in
    config.json.
    """
    path = tmp_path_factory.mktemp("source") / "llava"
    words = tiny.tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tiny.save(path, tiny.CONFIG, tiny.random_params(tiny.CONFIG), words)
    raw = read(path / "config.json")
    raw |= {
        "pad_token_id": 3,
        "initializer_range": 0.03,
        "quantum_flux": [1, 2],
        "auto_map": {"A": "b.C"},
    }
    raw["text_config"] |= {"pretraining_tp": 1, "pad_token_id": None}
    (path / "config.json").write_text(json.dumps(raw))
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "temperature": 0.6})
    )
    (path / "README.md").write_text("---\nlicense: llama2\n---\n# a model\n")
    return path


@pytest.mark.parametrize("model_type", MODELS)
def test_round_trip_bit_for_bit(model_type, tmp_path):
    """A model of transformers that is exported here is the same in transformers: the same tensors
    under the same names, from shards too.
    """
    model = MODELS[model_type]()
    export(
        hf.write(tmp_path / "theirs", model),
        tmp_path / "ours",
        options=SaveOptions(max_shard_bytes=20_000),
    )
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = hf.reload(tmp_path / "ours", type(model))
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name].numpy(), tensor.numpy(), err_msg=name)
    equal(load(tmp_path / "ours").params, load(tmp_path / "theirs").params)


def test_what_lies_beside(source, tmp_path):
    export(source, tmp_path / "copy")
    path = tmp_path / "copy"
    raw = read(path / "config.json")
    assert (raw["pad_token_id"], raw["initializer_range"], raw["quantum_flux"]) == (3, 0.03, [1, 2])
    assert raw["text_config"]["pretraining_tp"] == 1
    assert "auto_map" not in raw
    generation = read(path / "generation_config.json")
    assert (generation["eos_token_id"], generation["temperature"]) == ([2, 7], 0.6)
    messages = [{"role": "user", "content": "Hi"}]
    for reader in (AutoTokenizer.from_pretrained(path), AutoProcessor.from_pretrained(path)):
        assert reader.apply_chat_template(messages, tokenize=False) == "Hi"
    card = (path / "README.md").read_text()
    assert "license: llama2" in card
    assert "LLaVA-1.5" in card
    assert "AutoModelForImageTextToText" in card


@pytest.mark.parametrize(
    ("line", "licence"),
    [
        ("license: llama2", "llama2"),
        ('license: "apache-2.0"  # as upstream', "apache-2.0"),
        ("license:\n- mit", "mit"),
        ("license: [mit, llama2]", None),
        ("license: {mit: 1}", None),
        ("license: other", None),
        (
            "license: other\nlicense_name: qwen\nlicense_link: https://a.b/c",
            "[qwen](https://a.b/c)",
        ),
        ("license: other\nlicense_name: qwen\nlicense_link: LICENSE", None),
        ("license: [mit", None),
        ("language: en", None),
    ],
)
def test_the_licence_is_read_as_yaml(line, licence, tmp_path):
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").write_text(f"---\n{line}\n---\n# a model\n")
    found = licence_of(tmp_path)
    assert (found and str(found)) == licence


def test_dtype_by_command(source, tmp_path, said):
    told = said("export", source, tmp_path / "half", "--dtype", "bfloat16")
    assert told.startswith(f"{tmp_path / 'half'}: llava, ")
    assert read(tmp_path / "half" / "config.json")["dtype"] == "bfloat16"
    equal(load(tmp_path / "half").params, load(source, dtype=jnp.dtype(jnp.bfloat16)).params)


@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if kind.images])
def test_text_only(family, tmp_path):
    """The exported decoder is a model of its own, with the same tensors and, in transformers, the
    same scores.
    """
    whole, processor = SEEING[family]()
    params, words = tiny.random_params(whole), tiny.chat_tokenizer()
    save(tmp_path / "whole", whole, params, tokenizer=words, image_processor=processor)
    export(tmp_path / "whole", tmp_path / "text", text_only=True)
    text = load(tmp_path / "text")
    equal(text.params, text_params(whole, params))
    model = hf.reload(tmp_path / "text", AutoModelForCausalLM)
    assert type(model).__name__ == text.config.architecture
    rows = [hf.text(8)]
    scores = jax.jit(build(text.config).apply)({"params": text.params}, jnp.asarray(rows))
    hf.assert_close(scores[0], hf.logits(model, rows)[0])
    files = {file.name for file in (tmp_path / "text").iterdir()}
    assert "tokenizer.json" in files
    assert not files & {"preprocessor_config.json", "processor_config.json"}


def test_text_only_keeps_ids_of_the_top_level(source, tmp_path):
    export(source, tmp_path / "text", text_only=True)
    decoder = text_config(load(source).config)
    assert load(tmp_path / "text").config == replace(decoder, pad_token_id=3)
    with pytest.raises(InputError, match="'llama' is a text model already"):
        export(tmp_path / "text", tmp_path / "again", text_only=True)


def test_a_window_that_no_row_fills_is_not_copied(tmp_path):
    """A window as long as the context is not written: with it, transformers would run sliding
    layers without a window.
    """
    model = hf.qwen2(
        use_sliding_window=True, max_window_layers=0, sliding_window=64, max_position_embeddings=64
    )
    export(hf.write(tmp_path / "theirs", model), tmp_path / "ours")
    again = hf.reload(tmp_path / "ours", type(model))
    hf.assert_close(hf.logits(again, [hf.text(8)]), hf.logits(model, [hf.text(8)]))


@pytest.mark.parametrize("tied", [False, True])
def test_padded_tokens_are_never_likeliest(tied):
    """The logits of padded tokens are the mean of the others, also where all of these are negative,
    so that no padded token is the likeliest.
    """
    config = replace(text_config(tiny.CONFIG), tie_word_embeddings=tied)
    params = tiny.random_params(config)
    size = config.vocab_size
    padded_config, padded = pad_vocabulary(config, params, size + 5)
    assert padded_config == replace(config, vocab_size=size + 5)
    draw = np.random.default_rng(0)
    rows = params["model"]["embed_tokens"]["embedding"] if tied else params["lm_head"]["weight"]
    hidden = (
        draw.normal(size=(200, config.hidden_size)).astype(np.float32)
        - 4 * rows.mean(0) / rows.std()
    )
    logits = np.asarray(LanguageModel(padded_config).logits(padded, jnp.asarray(hidden)))
    assert logits.shape == (200, size + 5)
    np.testing.assert_allclose(
        logits[:, size:], np.tile(logits[:, :size].mean(1)[:, None], 5), atol=1e-4
    )
    assert logits.argmax(1).max() < size
    np.testing.assert_allclose(logits[:, :size], hidden @ rows.T, atol=1e-4)


def test_embeddings_of_layers_grow_with_the_others() -> None:
    kinds = ("sliding_attention", "full_attention") * 2
    config = tiny.gemma4(kinds, 4, **tiny.E2B)
    grown, params = pad_vocabulary(config, tiny.random_params(config), config.vocab_size + 5)
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_params(grown))
    assert jax.tree.map(jnp.shape, params) == shapes


def test_vocabulary_of_a_target(source, tmp_path, said, refusal):
    """A text draft is padded to the target's vocabulary; one with more tokens, or other words, is
    refused.
    """
    text = replace(text_config(tiny.CONFIG), vocab_size=text_config(tiny.CONFIG).vocab_size - 3)
    draft = tiny.save(tmp_path / "draft", text, tiny.random_params(text))
    said("export", draft, tmp_path / "padded", "--vocab-of", source)
    assert load(tmp_path / "padded").config.vocab_size == text_config(tiny.CONFIG).vocab_size
    card = (tmp_path / "padded" / "README.md").read_text()
    assert "draft for" not in card  # a directory's name says nothing to others
    assert ", of which the last 3 get no probability" in card
    hf.reload(tmp_path / "padded", LlamaForCausalLM)
    with pytest.raises(InputError, match="tokens, more than the target's"):
        export(source, tmp_path / "cut", target=Target("draft", text))
    assert not (tmp_path / "cut").exists()

    other = shutil.copytree(draft, tmp_path / "other")
    tiny.tokenizer(tiny.CHARACTERS[::-1]).save_pretrained(other)
    assert "differs from the target's" in refusal(
        "export", other, tmp_path / "cut", "--vocab-of", source
    )


def test_a_draft_grows_for_a_target_with_many_more_tokens(tmp_path, said):
    """Tokens that the draft cannot know get no probability, here and in transformers; what it knows
    it scores as before.
    """
    lvlm = tiny.CONFIG
    size = text_config(lvlm).vocab_size  # three rows of it are padding
    many = [f"<action_{number}>" for number in range(100)]
    (words := tiny.tokenizer()).add_tokens(many)
    wide = replace(text_config(lvlm), vocab_size=size + 128)
    config = replace(lvlm, text_config=wide)
    target = tiny.save(tmp_path / "target", config, tiny.random_params(config, 1), words)
    text = text_config(lvlm)
    draft = tiny.save(tmp_path / "draft", text, tiny.random_params(text))
    with pytest.raises(InputError, match="100 tokens are in one only"):
        check_tokens(words, tiny.tokenizer())
    said("export", draft, tmp_path / "grown", "--vocab-of", target)
    grown, plain = (LoadedModel.load(tmp_path / name) for name in ("grown", "draft"))
    known = size - 3
    assert (grown.config.known_tokens, grown.config.vocab_size) == (known, size + 128)
    assert grown.tokenizer.get_vocab() == words.get_vocab()
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(7, text.hidden_size)), jnp.float32)
    logits = np.asarray(grown.model.logits(grown.params, hidden))
    before = np.asarray(plain.model.logits(plain.params, hidden))
    np.testing.assert_array_equal(logits[:, :known], before[:, :known])
    assert (logits[:, known:] == -np.inf).all()
    theirs = hf.reload(tmp_path / "grown", LlamaForCausalLM)
    assert theirs.generation_config.suppress_tokens == [*range(known, size + 128)]
    model, asked = LoadedModel.load(target), [Request("What is 1?", 8)]
    asked.append(Request("And <action_3>?", 8, temperature=1.0, seed=3))
    sizes = EngineConfig(prompt_buckets=(64,), new_buckets=(8,), image_buckets=(0,))
    expected = Engine(model, None, sizes).generate(asked)
    results = Engine(model, grown, replace(sizes, views=("T",), gamma=2)).generate(asked)
    assert results[0].tokens == expected[0].tokens
    assert len(results[1].tokens) == 8
    said("export", tmp_path / "grown", tmp_path / "again")
    assert load(tmp_path / "again").config == grown.config
    stages = (Stage("learn", TrainConfig(steps=1, batch=1), (("talk", 1.0),)),)
    recipe = Recipe(
        target=str(target), start=str(tmp_path / "grown"), stages=stages, buckets=(64,), view="T"
    )
    assert text_config(start_draft(recipe, model).config).known_tokens == 0  # it may learn them now


def test_a_token_of_another_name_hides_none_behind_it() -> None:
    """A reserved token of the draft that has a name in the target counts as known, and so does the
    end of a turn behind it.
    """
    ours, theirs = tiny.tokenizer(), tiny.tokenizer()
    theirs.add_tokens(["<reserved>", "<end>"])
    ours.add_tokens(["<picture>", "<end>", "<new>"])
    check_tokens(ours, theirs, grows=True)
    assert known_tokens(ours, theirs) == (ours.convert_tokens_to_ids("<new>"), 2)


def test_nothing_of_the_users_is_lost(source, tmp_path, said, refusal):
    """An export reports in one line what it must not replace, before anything is read or written;
    --overwrite keeps the files of others.
    """
    inner = shutil.copytree(source, tmp_path / "runs" / "best")
    (tmp_path / "runs" / "config.json").write_text("{}")
    copy = shutil.copytree(source, tmp_path / "copy")
    (copy / ".git").mkdir()
    (copy / ".git" / "HEAD").write_text("mine")
    (tmp_path / "alias").symlink_to(inner)
    for name, entries in (("site", {}), ("notes", {"model_type": "llama"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(entries))
        (tmp_path / name / "README.md").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for read, written, why in (
        (inner, tmp_path / "runs", "holds the checkpoint that is read"),
        (inner, inner, "holds the checkpoint that is read"),
        (tmp_path / "alias", inner, "holds the checkpoint that is read"),
        (inner, tmp_path / "alias", "is a symbolic link"),
        (inner, inner / "config.json" / "out", f"{inner}/config.json is a file"),
        (inner, tmp_path / "site", "exists and is no checkpoint; give another path"),
        (inner, tmp_path / "notes", "exists and is no checkpoint; give another path"),
    ):
        line = refusal("export", read, written, "--overwrite", "--text-only")
        assert line.startswith(f"jaxspec: error: {written}: {why}")
    for option in ("--adapter", "--vocab-of"):
        line = refusal("export", inner, copy, "--overwrite", option, copy)
        assert f"{copy}: holds the checkpoint that is read" in line
    assert "copy: holds a checkpoint; give another path, or --overwrite" in refusal(
        "export", inner, copy
    )
    assert sorted(tmp_path.rglob("*")) == before
    said("export", inner, copy, "--overwrite", "--text-only")
    assert (copy / ".git" / "HEAD").read_text() == "mine"
    assert not (copy / "preprocessor_config.json").exists()
    assert load(copy).config.model_type == "llama"


def test_a_path_that_is_no_utf8(source, tmp_path, refusal):
    odd = shutil.copytree(source, tmp_path / "caf\udce9")
    why = r"caf\udce9: a path with bytes that are not UTF-8; rename it"
    assert why in refusal("export", odd, tmp_path / "out")
    assert why in refusal("export", source, odd, "--overwrite")
    with pytest.raises(InputError, match="are not UTF-8; rename it"):
        load_tokenizer(odd)


def test_inspect_by_command(source, tmp_path, said, capsys):
    spoken = json.loads(said("inspect", source, "--json"))
    entries = [spoken[name] for name in ("model_type", "problems", "chat_template")]
    assert entries == ["llava", [], True]
    assert "LLaVA-1.5 (llava)" in said("inspect", source)
    broken = shutil.copytree(source, tmp_path / "broken\x1b[31m")
    (broken / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as stop:
        said("inspect", broken)
    assert stop.value.code == 2
    assert "\x1b" not in capsys.readouterr().out


@pytest.fixture
def head(tmp_path):
    tiny.save_head(tmp_path / "head", tiny.CONFIG, tiny.random_params(tiny.CONFIG))
    return tmp_path / "head"


def test_export_a_kv_head(head, source, tmp_path, said, refusal):
    """A KV head is exported with the same tensors, in another type on request, and a card that
    names the target.
    """
    for dtype in (None, "bfloat16"):
        copy = tmp_path / str(dtype)
        told = said("export", head, copy, *(["--dtype", dtype] if dtype else []))
        assert ": jaxspec_kv_head, " in told
        config, params = load_head(head, dtype and jnp.dtype(dtype))
        found, read = load_head(copy)
        assert found == config
        equal(read, params)
        card = (copy / "README.md").read_text()
        assert (
            f"| draft for | a target of configuration {config.target_hash}, which loading checks |"
            in card
        )
        assert "The source names no licence" in card
        assert "license:" not in card
    for option in (["--text-only"], ["--vocab-of", str(source)]):
        told = refusal("export", head, tmp_path / "other", *option)
        assert f"KV heads take no {option[0][2:]}; leave it out" in told

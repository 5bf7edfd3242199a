"""Tokenisers and image processors next to a checkpoint are read, and copied, as transformers reads
them. None of this needs torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers import AutoProcessor

from jaxspec.checkpoints.processors import copy_processors, load_image_processor, load_tokenizer
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.publishing.export import export
from tests import tiny
from tests.hub import words

IMAGE = tiny.CONFIG.image_token_index


def ids(*words: str) -> list[int]:
    return tiny.tokenizer().convert_tokens_to_ids(list(words))


def test_tokenizer(good):
    tokenizer = load_tokenizer(good)
    assert tokenizer("3<image>5")["input_ids"] == ids("3", "<image>", "5")
    assert tokenizer.decode(ids("<s>", "3", "5", "</s>"), skip_special_tokens=True) == "35"
    # The words of both versions: transformers 4 knows neither this class nor a list of extra
    # tokens.
    written = json.loads((good / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] != "TokenizersBackend"
    assert not isinstance(written.get("extra_special_tokens"), list)


def test_image_processor(good):
    """The image processor gives the Pillow backend's pixels: shortest edge to 28 (bicubic), centre
    28x28, CLIP's mean and std.
    """
    page = np.random.default_rng(0).integers(0, 256, (24, 48, 3), np.uint8)
    processor = load_image_processor(good, tiny.CONFIG)
    ours = processor(images=[Image.fromarray(page)], return_tensors="np")["pixel_values"]
    small = np.asarray(Image.fromarray(page).resize((56, 28), Image.Resampling.BICUBIC))[:, 14:42]
    mean, std = np.array(processor.image_mean), np.array(processor.image_std)
    np.testing.assert_allclose(
        ours, ((small / 255 - mean) / std).transpose(2, 0, 1)[None], atol=1e-5
    )


def template(word: str) -> str:
    """Return a template that writes a word of its own, and an image before the question about
    it.
    """
    return (
        f"{word}{{% for part in messages[-1]['content'] %}}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    )


NAMED = {"default": template("9"), "tool_use": template("8")}
PLACES: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {"tokenizer_config.json": template("9")},
    "tokenizer_config.json, several": {
        "tokenizer_config.json": [{"name": name, "template": text} for name, text in NAMED.items()]
    },
    "chat_template.jinja": {"chat_template.jinja": template("9")},
    "additional_chat_templates": {
        "chat_template.jinja": template("9"),
        "additional_chat_templates/tool_use.jinja": template("8"),
    },
    "chat_template.json": {
        "chat_template.json": template("9"),
        "chat_template.jinja": template("8"),
    },
    "processor_config.json": {
        "processor_config.json": template("9"),
        "chat_template.json": template("8"),
    },
    "processor_config.json, several": {"processor_config.json": NAMED},
    "processor_config.json, a list": {
        "processor_config.json": [{"name": name, "template": text} for name, text in NAMED.items()]
    },
}


def with_templates(path: Path, places: dict[str, Any]) -> Path:
    for name, content in places.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        if file.suffix == ".json":
            before = json.loads(file.read_text()) if file.is_file() else {}
            content = json.dumps(before | {"chat_template": content})
        file.write_text(content)
    return path


@pytest.mark.parametrize("place", PLACES)
def test_chat_template_is_the_one_that_transformers_takes(place, model):
    """The chat template is the one that transformers takes, in whichever file: the processor's
    before the tokeniser's own.
    """
    with_templates(model, {"tokenizer_config.json": template("7"), **PLACES[place]})
    tokenizer = load_tokenizer(model)
    told = PromptEncoder(tokenizer, IMAGE).prompt("3", ["image"]).tokens.tolist()
    assert told == ids("9", "<image>", "3")

    if place == "processor_config.json, a list" or (
        place == "processor_config.json" and transformers.__version__ < "5"
    ):
        return  # transformers' processors take no list; in version 4 the other file wins
    processor = AutoProcessor.from_pretrained(model)
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "3"}]}]
    assert processor.tokenizer.encode(processor.apply_chat_template(said)) == told


@pytest.mark.parametrize("names", [("", ""), ("CLIPImageProcessorPil", "CLIPImageProcessor")])
def test_settings_of_images_are_copied_out_of_a_processors(names, tmp_path):
    """Settings of images inside processor_config.json are copied into the file where transformers 4
    reads them. They may leave their class to config.json.
    """
    nested, written = (
        {"size": 28} | ({"image_processor_type": name} if name else {}) for name in names
    )
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    (tmp_path / "copy").mkdir()
    copy_processors(tmp_path, tmp_path / "copy", tiny.CONFIG, None, add_bos=False)
    assert json.loads((tmp_path / "copy/preprocessor_config.json").read_text()) == written


@pytest.mark.parametrize("place", ["chat_template.jinja", "processor_config.json, several"])
def test_every_chat_template_runs_in_the_sandbox(place, model):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    hostile = json.loads(
        json.dumps(PLACES[place]).replace(json.dumps(template("9")), json.dumps(escape))
    )
    path = with_templates(model, hostile)
    with pytest.raises(InputError, match=r"chat template: .*'__class__' of 'str' object is unsafe"):
        PromptEncoder(load_tokenizer(path), IMAGE).prompt("3", ["image"])


def test_missing_processors(tmp_path):
    assert "no tokenizer" in tiny.one_line(load_tokenizer, tmp_path)
    assert "no image processor" in tiny.one_line(load_image_processor, tmp_path, tiny.CONFIG)


def test_a_missing_tokeniser_is_told_before_weights_are_read(model):
    for file in (*model.glob("tokenizer*"), *model.glob("*.safetensors")):
        file.unlink()
    assert "no tokenizer" in tiny.one_line(LoadedModel.load, model)


TEXT = "the thing in \u00fc w?"


@pytest.mark.parametrize("kind", ["llama2", "llava"])
def test_a_sentencepiece_model_alone(kind, tmp_path):
    """A sentencepiece model alone gives the tokeniser, for Vicuna's files and for a LLaVA whose
    tokenizer.json is missing.
    """
    pytest.importorskip("sentencepiece", reason="install the `sentencepiece` extra")
    known = words.files(kind, tmp_path, whole=False)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT)
    pieces = ["<s>", "_the", "_th", "in", "g", "_", "in", "_", "<0xC3>", "<0xBC>", "_", "w", "?"]
    assert [
        piece.replace("\u2581", "_") for piece in tokenizer.convert_ids_to_tokens(ids)
    ] == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    if kind == "llava":
        assert known["<image>"] in tokenizer.encode("the <image> in")
        assert tokenizer.pad_token_id == known["<pad>"]


@pytest.mark.parametrize(("family", "begin"), [("opt", ["</s>"]), ("qwen2", [])])
def test_a_vocabulary_and_its_merges_alone(family, begin, tmp_path):
    """A vocabulary and its merges alone give the tokeniser, for Qwen's files and for OPT's, whose
    old fast tokeniser forgot its first token.
    """
    words.files("opt" if family == "opt" else "qwen", tmp_path, whole=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT)
    pieces = ["t", "h", "e", "_th", "in", "g", "_", "in", "_", "\u00c3", "\u00bc", "_", "w", "?"]
    assert [
        piece.replace("\u0120", "_") for piece in tokenizer.convert_ids_to_tokens(ids)
    ] == begin + pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert tokenizer.eos_token == ("</s>" if family == "opt" else "<|im_end|>")
    (tmp_path / "merges.txt").unlink()  # which transformers 5 would make up
    with pytest.raises(
        InputError, match=r"no tokenizer \(neither .* nor vocab.json and merges.txt\); copy it"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("settings", ["x", {"image_processor_type": 5}])
def test_settings_of_images_that_are_none_are_one_line(settings, model, tmp_path):
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    line = r"model/processor_config.json: image_processor is not readable \("
    with pytest.raises(InputError, match=line):
        export(model, tmp_path / "out")


def test_half_a_surrogate_pair_is_copied(model, tmp_path):
    """Half a surrogate pair, which JSON holds as an escape and UTF-8 cannot, is copied as it is."""
    (model / "tokenizer_config.json").write_text(json.dumps({"note": "\ud83d", "other": "ü"}))
    copy_processors(model, tmp_path, tiny.CONFIG, None, False)
    written = (tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")
    assert json.loads(written) == {"note": "\ud83d", "other": "ü"}

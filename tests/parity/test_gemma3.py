"""Gemma 3 with images equals transformers' to 1e-4 in float32: prompts, logits, answers, sessions,
and files in both layouts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from eval.lib.drafts.forward import forward_logits, whole_row
from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.checkpoints import huggingface
from jaxspec.config import Gemma3Config, Gemma3TextConfig, with_text
from jaxspec.engine.batches import batcher
from jaxspec.errors import InputError
from jaxspec.models.families import abstract_params
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.messages import Message
from tests import tiny
from tests.hub import configs, words
from tests.tiny import hf
from tests.tiny.hf import torch
from tests.tiny.tiles import page

pytestmark = pytest.mark.full

SIZES = [(), [(31, 90)], [(9, 7), (40, 41)], [(24, 24), (13, 64), (70, 5)]]
"""Sizes of the images of four prompts, odd in every way but one."""
QUESTIONS = ("Who?", "What is it?", "Is <image> like <image>?", "Tell me more")
NEW = 24
SETTINGS = EngineConfig(
    batch_size=4, prompt_buckets=(32, 128), new_buckets=(NEW,), image_buckets=(0, 1, 3)
)


def model(
    ids: dict[str, int], vision: dict[str, Any], tokens: int, tied: bool = False, **text: Any
) -> Any:
    """Return transformers' model. A tied one says one word over and over.

    The second of three layers is full, and images are longer than windows unless `text` says
    otherwise.
    """
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    decoder = {
        **hf.TEXT,
        **{"vocab_size": len(ids) + 5, "head_dim": 12, "query_pre_attn_scalar": 10},
        **{"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 7},
        **{"max_position_embeddings": 2048, "rope_theta": 1000.0, "rope_local_base_freq": 10.0},
        **{"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        **{"bos_token_id": 2, "eos_token_id": 1, "tie_word_embeddings": tied},
    }
    tower = {name: value for name, value in hf.VISION.items() if name != "projection_dim"}
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**decoder | text),
        vision_config=SiglipVisionConfig(**tower | {"vision_use_head": False} | vision),
        mm_tokens_per_image=tokens,
        tie_word_embeddings=tied,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )
    return hf.talkative(hf.random_model(Gemma3ForConditionalGeneration, config))


def write(path: Path, side: int = 24, tokens: int = 9, **changes: Any) -> Any:
    """Write a model of transformers with the processor files of Google's; return it."""
    path.mkdir()
    ids = words.files("gemma", path, chat=configs.GEMMA3)
    vision = {"image_size": side, "patch_size": 4} | changes.pop("vision", {})
    reference = model(ids, vision, tokens, **changes)
    reference.generation_config.eos_token_id = None
    reference.save_pretrained(path)
    files = configs.files_of("gemma3", ids, {})
    images = files["preprocessor_config.json"] | {"size": {"height": side, "width": side}}
    for name, content in {
        "preprocessor_config.json": images,
        "processor_config.json": files["processor_config.json"] | {"image_seq_length": tokens},
        "chat_template.json": files["chat_template.json"],
    }.items():
        (path / name).write_text(json.dumps(content))
    return reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, LoadedModel, Any]:
    """Return transformers' model, ours, and transformers' processor."""
    path = tmp_path_factory.mktemp("gemma3") / "model"
    reference = write(path)
    return reference, LoadedModel.load(path), processor(path)


def processor(path: Path) -> Any:
    from transformers import AutoTokenizer, Gemma3ImageProcessorPil, Gemma3Processor

    raw = json.loads((path / "processor_config.json").read_text())
    template = json.loads((path / "chat_template.json").read_text())["chat_template"]
    images = Gemma3ImageProcessorPil.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    # A mixed class: the check wants the backend of torchvision.
    kind = type("Processor", (Gemma3Processor,), {"check_argument_for_proper_class": lambda *_: 0})
    return kind(images, tokenizer, template, image_seq_length=raw["image_seq_length"])


def inputs(reader: Any, question: str, images: list[Image.Image]) -> dict[str, Any]:
    """Return transformers' inputs of a question, after its images or with them inside."""
    parts: list[dict[str, str]] = [{"type": "image"}] * len(images)
    if "<image>" in question:
        question = question.replace("<image>", "<start_of_image>")
        parts = []
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    text = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    batch = reader(
        images=[images] if images else None,
        text=[text],
        return_tensors="pt",
        add_special_tokens=False,
        return_mm_token_type_ids=True,
    )
    return {name: value for name, value in batch.items() if name != "num_crops"}


def asked() -> list[tuple[str, list[Image.Image]]]:
    return [(q, [page(*size) for size in sizes]) for q, sizes in zip(QUESTIONS, SIZES)]


def answer(reference: Any, batch: dict[str, Any], new: int = NEW) -> list[int]:
    with torch.no_grad():
        out = reference.generate(**batch, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, batch["input_ids"].shape[1] :].tolist()


def slots(ours: LoadedModel, prompt: Prompt) -> list[int]:
    """Return the prompt's tokens with as many image tokens as transformers' has."""
    config: Any = ours.config
    return [
        token
        for token in prompt.tokens.tolist()
        for _ in range(config.image_tokens if token == config.image_token_index else 1)
    ]


def test_prompts_and_logits(pair):
    """Prompts with several images have transformers' tokens and logits."""
    reference, ours, reader = pair
    for question, images in asked()[2:]:
        batch = inputs(reader, question, images)
        prompt = Engine(ours, config=SETTINGS).encoder.prompt(question, images)
        assert slots(ours, prompt) == batch["input_ids"][0].tolist()
        with torch.no_grad():
            logits = reference(**batch).logits[0, -1]
        hf.assert_close(forward_logits(ours, prompt, ()), logits)


def test_logits_without_a_cache(pair):
    """Training's scores equal transformers' at every token."""
    reference, ours, reader = pair
    question, images = asked()[2]
    with torch.no_grad():
        expected = reference(**inputs(reader, question, images)).logits[0]
    prompt = Engine(ours, config=SETTINGS).encoder.prompt(question, images)
    rows, tiles = whole_row(ours, prompt, ())
    assert tiles is not None

    @jax.jit
    def run(params: Any, rows: Any, tiles: Any) -> Any:
        return ours.model.score(params, rows, ours.model.encode(params, tiles))

    hf.assert_close(run(ours.params, rows, tiles)[0, : len(expected)], expected)


@pytest.fixture(scope="module")
def expected(pair) -> list[list[int]]:
    """Return transformers' greedy answers."""
    reference, _, reader = pair
    answers = [answer(reference, inputs(reader, *row)) for row in asked()]
    assert len({token for tokens in answers for token in tokens}) > 20
    return answers


DRAFTS: dict[str, dict[str, Any]] = {
    "plain, in growing caches": {},
    "a chain, with images and pooled": {"views": ("M", "P"), "gamma": 3},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_batch_writes_transformers_answers(pair, expected, name, monkeypatch):
    """A batch of prompts with 0 to 3 images writes transformers' answers, with every kind of
    draft.
    """
    _, ours, _ = pair
    monkeypatch.setattr(batcher, "FIRST", 8)
    options = DRAFTS[name]
    noisy = replace(ours, params=tiny.noisy(ours.params, 0.03))
    drafts = [noisy] if "views" in options else []
    engine = Engine(ours, drafts, replace(SETTINGS, **options))
    results = engine.generate([Request(q, NEW, images=images) for q, images in asked()])
    assert [list(result.tokens) for result in results] == expected
    assert not drafts or sum(int(r.stats.accepted_at.sum()) for r in results) > 5


def test_the_tower_at_full_size(tmp_path):
    """The tower at full size, of 4096 patches and 256 tokens, gives transformers' logits; the
    window is longer than an image.
    """
    tower = {"patch_size": 14, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    reference = write(
        tmp_path / "model", side=896, tokens=256, tied=True, vision=tower, sliding_window=300,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    ours = LoadedModel.load(tmp_path / "model")
    images = [page(40, 61), page(33, 20, seed=1)]
    batch = inputs(processor(tmp_path / "model"), "Alike?", images)
    assert batch["input_ids"].shape[1] > 512
    prompt = Engine(ours).encoder.prompt("Alike?", images)
    with torch.no_grad():
        logits = reference(**batch).logits[0, -1]
    hf.assert_close(forward_logits(ours, prompt, ()), logits)


SIZES_OF = {
    "4B": (4_300_079_472, {"hidden_size": 2560, "intermediate_size": 10240}, (34, 8, 4)),
    "12B": (12_187_325_040, {"hidden_size": 3840, "intermediate_size": 15360}, (48, 16, 8)),
    "27B": (
        27_432_406_640,
        {
            **{"hidden_size": 5376, "intermediate_size": 21504},
            **{"head_dim": 128, "query_pre_attn_scalar": 168},
        },
        (62, 32, 16),
    ),
}
"""Parameters as the hub counts them; the decoder's entries; layers, attention heads, key heads."""


@pytest.mark.parametrize("size", SIZES_OF)
def test_published_sizes(size):
    count, text, depth = SIZES_OF[size]
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    text = text | dict(zip(names, depth)) | {"sliding_window": 1024}
    tower = {
        **{"hidden_size": 1152, "intermediate_size": 4304, "image_size": 896, "patch_size": 14},
        **{"num_attention_heads": 16, "num_hidden_layers": 27},
    }
    config = Gemma3Config.from_hf({"text_config": text, "vision_config": tower})
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config))) == count


def test_files(pair, tmp_path):
    """transformers reads files of the hub's layout and of ours bit for bit."""
    reference, ours, reader = pair
    hub = huggingface.load(hf.write(tmp_path / "hub", reference, hf.hub_tensors(reference)))
    assert with_text(hub.config, eos_token_id=None) == ours.config
    jax.tree.map(np.testing.assert_array_equal, hub.params, ours.params)
    assert type(ours.config).from_hf(ours.config.to_hf()) == ours.config
    out = tmp_path / "out"
    extras = {"tokenizer": ours.tokenizer, "image_processor": ours.image_processor}
    huggingface.save(out, ours.config, ours.params, **extras)
    again = hf.reload(out, type(reference))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    (question, images) = asked()[1]
    batch, written = (inputs(p, question, images) for p in (reader, processor_of(out)))
    for name, value in batch.items():
        assert torch.equal(value, written[name]), name


def processor_of(path: Path) -> Any:
    """Return transformers' processor of a directory, with its tokeniser's template."""
    template = path / "chat_template.jinja"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    return processor(path)


def test_conversations_end_with_the_turn(pair):
    """An answer in training ends with the turn's token, which the model is asked to write."""
    _, ours, _ = pair
    encoder = Engine(ours, config=replace(SETTINGS)).encoder
    encoder = replace(encoder, stops=(1, ours.tokenizer.convert_tokens_to_ids("<end_of_turn>")))
    turns = [Message("user", (None, "Who?"), (None,)), Message("assistant", ("Me.",))]
    ((tokens, mask),) = encoder.dialogues([[*turns, Message("user", ("And?",)), turns[1]]])
    said = ours.tokenizer.decode(tokens)
    turn = "<start_of_turn>model\nMe.<end_of_turn>"
    image = "\n\n<start_of_image><image_soft_token><end_of_image>\n\nWho?"
    assert said == f"<bos><start_of_turn>user\n{image}<end_of_turn>\n{turn}\n" + (
        f"<start_of_turn>user\nAnd?<end_of_turn>\n{turn}"
    )
    assert ours.tokenizer.decode(tokens[mask]) == "Me.<end_of_turn>" * 2


def test_what_is_refused(pair, tmp_path):
    _, ours, _ = pair
    config: Any = ours.config
    for changes in ({"mm_tokens_per_image": 8}, {"mm_tokens_per_image": 16}):
        with pytest.raises(InputError, match="mm_tokens_per_image"):
            replace(config, **changes)
    crops = type(ours.image_processor).from_dict(
        ours.image_processor.to_dict() | {"do_pan_and_scan": True}  # pyright: ignore
    )
    with pytest.raises(InputError, match="do_pan_and_scan"):
        replace(ours, image_processor=crops).images.read([page(9, 9)])  # pyright: ignore
    with pytest.raises(InputError, match="whose image tokens read one another"):
        replace(tiny.CONFIG, text_config=Gemma3TextConfig())

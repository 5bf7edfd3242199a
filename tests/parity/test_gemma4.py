"""Gemma 4 12B with images equals transformers' to 1e-4 in float32: rows of pixels, logits, answers,
and files.

In sliding layers the tokens of an image read one another, by the masks that transformers' model
makes for images. Given no masks, its layers of both kinds read so.
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

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.models.inputs import Pool
from tests import tiny

torch = pytest.importorskip(
    "torch", reason="torch is the oracle of parity: install the `parity` extra"
)

from eval.exactness import forward_logits  # noqa: E402
from jaxspec.checkpoints import huggingface  # noqa: E402
from tests.hub import configs, words  # noqa: E402
from tests.tiny import hf  # noqa: E402
from tests.tiny.tiles import page  # noqa: E402

SIZES = [(), [(31, 90)], [(9, 7), (40, 41)], [(24, 24), (13, 64), (700, 5)]]
"""Sizes of the images of four prompts; the last image is a column of squares."""
QUESTIONS = ("Who?", "What is it?", "Is <image> like <image>?", "Tell me more")
NEW, SIDE, MOST = 8, 12, 70
"""Tokens of an answer, pixels along a square, most squares of an image."""
SETTINGS = EngineConfig(
    batch_size=4, prompt_buckets=(64, 320), new_buckets=(NEW,), image_buckets=(0, 1, 3)
)


def write(path: Path) -> Any:
    """Write a model of transformers with the processor files of Google's; return it."""
    from transformers import (
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedTextConfig,
    )

    path.mkdir()
    ids = words.files("gemma4", path, chat=configs.GEMMA4)
    files = configs.gemma4_unified(ids, {})
    raw = files["config.json"]
    text = {
        **{name: value for name, value in hf.GEMMA4.items() if "per_layer" not in name},
        **{"vocab_size": raw["text_config"]["vocab_size"], "sliding_window": 20},
        **{"max_position_embeddings": 2048, "tie_word_embeddings": False},
        **{"bos_token_id": 2, "eos_token_id": 1},
    }
    vision = {"patch_size": SIDE // 3, "mm_embed_dim": 24, "output_proj_dims": 24}
    config = Gemma4UnifiedConfig(
        text_config=Gemma4UnifiedTextConfig(**text),
        vision_config=vision | {"mm_posemb_size": MOST},
        audio_config=None,
        tie_word_embeddings=False,
        **{name: raw[name] for name in ("boi_token_id", "eoi_token_id", "image_token_id")},
    )
    reference = hf.talkative(hf.random_model(Gemma4UnifiedForConditionalGeneration, config))
    hf.soften(reference.model.language_model.layers)
    reference.generation_config.eos_token_id = None
    reference.save_pretrained(path)
    processor = files["processor_config.json"]
    processor["image_processor"] |= {"max_soft_tokens": MOST, "patch_size": SIDE // 3}
    (path / "processor_config.json").write_text(json.dumps(processor))
    return reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, LoadedModel]:
    """Return transformers' model, and ours."""
    path = tmp_path_factory.mktemp("gemma4") / "model"
    reference = write(path)
    return reference, LoadedModel.load(path)


def asked() -> list[tuple[str, list[Image.Image]]]:
    return [(q, [page(*size) for size in sizes]) for q, sizes in zip(QUESTIONS, SIZES)]


def squares(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Return an image's rows of pixels and positions (x, y), padded: resized and cut by loops."""
    scale = (MOST * SIDE**2 / (image.width * image.height)) ** 0.5
    columns, rows = (int(scale * edge / SIDE) for edge in image.size)
    if not rows:
        rows, columns = 1, min(image.width // image.height, MOST)
    if not columns:
        rows, columns = min(image.height // image.width, MOST), 1
    resized = image.resize((SIDE * columns, SIDE * rows), Image.Resampling.BICUBIC)
    colours = np.asarray(resized, np.float32) / 255
    pixels, position = np.zeros((MOST, 3 * SIDE**2), np.float32), np.full((MOST, 2), -1)
    for y in range(rows):
        for x in range(columns):
            square = colours[SIDE * y : SIDE * (y + 1), SIDE * x : SIDE * (x + 1)]
            pixels[y * columns + x], position[y * columns + x] = square.ravel(), (x, y)
    return pixels, position


def inputs(ours: LoadedModel, question: str, images: list[Image.Image]) -> dict[str, Any]:
    """Return the inputs that transformers' processor, which needs torchvision, would make."""
    config: Any = ours.config
    text = question.replace("<image>", "<|image|>")
    if text == question:
        text = "\n\n<|image|>\n\n" * len(images) + question
    patches = [squares(image) for image in images]
    counts = [int((position[:, 0] >= 0).sum()) for _, position in patches]
    for count in counts:
        text = text.replace("<|image|>", "<|image>" + "<placeholder>" * count + "<image|>", 1)
    text = text.replace("<placeholder>", "<|image|>")
    chat = f"<bos><|turn>user\n{text}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    ids = torch.tensor([ours.tokenizer.encode(chat, add_special_tokens=False)])
    out = {
        **{"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "mm_token_type_ids": (ids == config.image_token_index).long(),
    }
    if patches:
        pixels, positions = zip(*patches)
        out["pixel_values"] = torch.tensor(np.stack(pixels))
        out["image_position_ids"] = torch.tensor(np.stack(positions))
    return out


def answer(reference: Any, batch: dict[str, Any]) -> tuple[Any, list[int]]:
    """Return transformers' logits after the prompt, and its greedy answer, with its masks for
    images and without a cache.
    """
    images = {name: batch[name] for name in ("pixel_values", "image_position_ids") if name in batch}
    ids, kinds, steps = batch["input_ids"], batch["mm_token_type_ids"], []
    for _ in range(NEW):
        embeds, places = torch.zeros(1, ids.shape[1], 32), torch.arange(ids.shape[1])[None]
        masks = reference.create_masks_for_generate(
            reference.config, embeds, torch.ones_like(ids), None, places, kinds
        )
        with torch.no_grad():
            logits = reference(input_ids=ids, attention_mask=masks, **images).logits[0, -1]
        steps.append(logits)
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
        kinds = torch.nn.functional.pad(kinds, (0, 1))
    return steps[0], ids[0, -NEW:].tolist()


@pytest.fixture(scope="module")
def expected(pair) -> list[tuple[Any, list[int]]]:
    reference, ours = pair
    answers = [answer(reference, inputs(ours, *row)) for row in asked()]
    assert len({token for _, tokens in answers for token in tokens}) > 15
    return answers


def test_prompts_and_logits(pair, expected):
    _, ours = pair
    config: Any = ours.config
    for (question, images), (logits, _) in zip(asked(), expected, strict=True):
        batch = inputs(ours, question, images)
        prompt = Engine(ours, config=SETTINGS).encoder.prompt(question, images)
        counts = iter((squares(image)[1][:, 0] >= 0).sum() for image in images)
        slots = [
            token
            for token in prompt.tokens.tolist()
            for _ in range(next(counts) if token == config.image_token_index else 1)
        ]
        assert slots == batch["input_ids"][0].tolist()
        hf.assert_close(forward_logits(ours, prompt, ()), logits)


DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a tree, blind and seeing": {"views": ("M", "T"), "tree": "2:6", "gamma": 3},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_batch_writes_transformers_answers(pair, expected, name):
    """Prompts of 0 to 3 images are one batch."""
    _, ours = pair
    options = DRAFTS[name]
    drafts = [replace(ours, params=tiny.noisy(ours.params, 0.03))] if options else []
    engine = Engine(ours, drafts, replace(SETTINGS, **options))
    results = engine.generate([Request(q, NEW, images=images) for q, images in asked()])
    assert [list(result.tokens) for result in results] == [tokens for _, tokens in expected]
    assert not options or sum(int(r.stats.accepted_at.sum()) for r in results) > 5


def test_files(pair, tmp_path):
    """transformers reads the written files bit for bit; audio is left out."""
    reference, ours = pair
    assert type(ours.config).from_hf(ours.config.to_hf()) == ours.config
    out = tmp_path / "out"
    extras = {"tokenizer": ours.tokenizer, "image_processor": ours.image_processor}
    huggingface.save(out, ours.config, ours.params, **extras)
    for name, tensor in hf.reload(out, type(reference)).state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    again = LoadedModel.load(out)
    assert again.config == ours.config
    jax.tree.map(np.testing.assert_array_equal, again.params, ours.params)
    settings = [model.image_processor.max_soft_tokens for model in (again, ours)]  # pyright: ignore
    assert settings == [MOST] * 2
    images: Any = ours.images
    with pytest.raises(InputError, match="view P: Gemma 4's images are not pooled"):
        images.slots((24, 24), Pool())

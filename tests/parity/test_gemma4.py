"""Gemma 4 with images equals transformers' to 1e-4 in float32: squares, towers, logits, answers,
sessions, and files.

In sliding layers of 12B and 31B the tokens of an image read one another, by the masks that
transformers' model makes for images. Given no masks, the 12B's layers of both kinds read so.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from PIL import Image

from eval.lib.drafts.forward import forward_logits
from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.processors import pillow_class
from jaxspec.config import Gemma4Config
from jaxspec.data.images import Picture
from jaxspec.engine.session import Session
from jaxspec.errors import InputError
from jaxspec.heads.kinds.assistant import AssistantConfig
from jaxspec.heads.making import abstract_head
from jaxspec.loading.images import image_inputs
from jaxspec.loading.models import LoadedHead
from jaxspec.models.inputs import Pool
from jaxspec.models.lvlms.gemma4 import SquareImages
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.hub import configs, words
from tests.tiny import hf
from tests.tiny.files import read_json
from tests.tiny.hf import torch
from tests.tiny.tiles import page

pytestmark = pytest.mark.full

SIZES = [(), [(31, 90)], [(9, 7), (40, 41)], [(24, 24), (13, 64), (700, 5)]]
"""Sizes of the images of four prompts; the last image is a column of squares."""
QUESTIONS = ("Who?", "What is it?", "Is <image> like <image>?", "Tell me more")
NEW, SIDE, MOST = 8, 12, 70
"""Tokens of an answer, pixels along a square, most squares of an image."""
SETTINGS = EngineConfig(
    batch_size=4, prompt_buckets=(64, 320), new_buckets=(NEW,), image_buckets=(0, 1, 3)
)
TOWER = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 12},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": SIDE // 3},
    "position_embedding_size": 3 * MOST,
}
E4B = {
    **{"attention_k_eq_v": False, "num_global_key_value_heads": None, "num_key_value_heads": 2},
    **{"hidden_size_per_layer_input": 6, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "layer_types": 2 * ["sliding_attention", "full_attention"],
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "12B": (
        "Gemma4Unified",
        {"patch_size": SIDE // 3, "mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 70},
        {},
    ),
    "31B": ("Gemma4", TOWER | {"standardize": True}, {"use_bidirectional_attention": "vision"}),
    "E4B": ("Gemma4", TOWER | {"use_clipped_linears": True}, E4B),
}
"""Prefix of transformers' classes, entries of vision_config and of text_config."""


def write(path: Path, kind: str, most: int = MOST, **sizes: int) -> Any:
    """Write a model of transformers with the processor files of Google's; return it.

    sizes: Further entries of vision_config.
    """
    name, vision, changes = KINDS[kind]
    vision = vision | sizes
    path.mkdir()
    ids = words.files("gemma4", path, chat=configs.GEMMA4)
    files = configs.files_of({"Gemma4Unified": "gemma4_unified"}.get(name, "gemma4"), ids, {})
    raw = files["config.json"]
    text = {
        **hf.GEMMA4,
        **{"vocab_size": raw["text_config"]["vocab_size"], "sliding_window": 20},
        **{"max_position_embeddings": 2048, "tie_word_embeddings": False},
        **{"bos_token_id": 2, "eos_token_id": 1, **changes},
    }
    text["vocab_size_per_layer_input"] = text["vocab_size"]
    if name == "Gemma4Unified":
        text = {name: value for name, value in text.items() if "per_layer" not in name}
    config = getattr(transformers, f"{name}Config")(
        text_config=getattr(transformers, f"{name}TextConfig")(**text),
        vision_config=vision,
        audio_config=None,
        tie_word_embeddings=False,
        **{name: raw[name] for name in ("boi_token_id", "eoi_token_id", "image_token_id")},
    )
    made = hf.random_model(getattr(transformers, f"{name}ForConditionalGeneration"), config)
    reference = hf.talkative(made)
    hf.soften(reference.model.language_model.layers)
    fill_buffers(reference.model)
    reference.generation_config.eos_token_id = None
    reference.save_pretrained(path)
    processor = files["processor_config.json"]
    settings = {"max_soft_tokens": most, "patch_size": vision["patch_size"]}
    processor["image_processor"] |= settings
    (path / "processor_config.json").write_text(json.dumps(processor))
    return reference


def fill_buffers(model: Any) -> None:
    """Draw a tower's standardisation, and bounds that clip some of what its matrices read."""
    draw = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        noise = torch.rand(buffer.shape, generator=draw)
        if name.endswith(("std_bias", "std_scale")):
            buffer.copy_(noise + 0.5)
        elif name.endswith(("put_min", "put_max")):
            buffer.copy_((1 + noise) * (1 if name.endswith("max") else -1))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives transformers' model of a kind, and ours."""

    @cache
    def pair(kind: str) -> tuple[Any, LoadedModel]:
        path = tmp_path_factory.mktemp("gemma4") / "model"
        reference = write(path, kind)
        return reference, LoadedModel.load(path)

    return pair


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


def image_arrays(reference: Any, images: list[Image.Image], **settings: int) -> dict[str, Any]:
    """Return transformers' images: of its own processor, which the 12B's needs torchvision for."""
    if "Unified" in type(reference).__name__:
        pixels, positions = (torch.tensor(np.stack(x)) for x in zip(*map(squares, images)))
        return {"pixel_values": pixels, "image_position_ids": positions}
    settings = {"patch_size": SIDE // 3, "max_soft_tokens": MOST} | settings
    out = pillow_class("Gemma4ImageProcessor")(**settings)(images=images, return_tensors="pt")
    return {name: out[name] for name in ("pixel_values", "image_position_ids")}


def inputs(
    reference: Any, ours: LoadedModel, question: str, images: list[Image.Image]
) -> dict[str, Any]:
    """Return the inputs that transformers' processor would make."""
    text = question.replace("<image>", "<|image|>")
    if text == question:
        text = "\n\n<|image|>\n\n" * len(images) + question
    for image in images:
        count = int((squares(image)[1][:, 0] >= 0).sum())
        text = text.replace("<|image|>", "<|image>" + "<placeholder>" * count + "<image|>", 1)
    text = text.replace("<placeholder>", "<|image|>")
    chat = f"<bos><|turn>user\n{text}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    ids = ours.tokenizer.encode(chat, add_special_tokens=False)
    return of_tokens(ours, ids) | (image_arrays(reference, images) if images else {})


def of_tokens(ours: LoadedModel, ids: list[int]) -> dict[str, Any]:
    config: Any = ours.config
    row = torch.tensor([ids])
    return {"input_ids": row, "mm_token_type_ids": (row == config.image_token_index).long()}


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
def expected(pairs: Any) -> Any:
    """Return a function that gives transformers' first logits and answers, of a kind."""

    @cache
    def answers(kind: str) -> list[tuple[Any, list[int]]]:
        reference, ours = pairs(kind)
        rows = [answer(reference, inputs(reference, ours, *row)) for row in asked()]
        assert len({token for _, tokens in rows for token in tokens}) > 15
        return rows

    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_logits(pairs: Any, expected: Any, kind: str) -> None:
    """Prompts with several images have transformers' tokens and logits."""
    reference, ours = pairs(kind)
    config: Any = ours.config
    for (question, images), (logits, _) in [*zip(asked(), expected(kind))][2:]:
        batch = inputs(reference, ours, question, images)
        prompt = Engine(ours, config=SETTINGS).encoder.prompt(question, images)
        counts = iter((squares(image)[1][:, 0] >= 0).sum() for image in images)
        slots = [
            token
            for token in prompt.tokens.tolist()
            for _ in range(next(counts) if token == config.image_token_index else 1)
        ]
        assert slots == batch["input_ids"][0].tolist()
        hf.assert_close(forward_logits(ours, prompt, ()), logits)


@pytest.mark.parametrize("kind", ["31B", "E4B"])
def test_the_tower_at_full_size(tmp_path: Path, kind: str) -> None:
    """The tower at full size reads up to 2520 patches of 16 pixels as 280 tokens, with heads as
    wide as the original's; images of one prompt do not read one another.
    """
    sizes = {"patch_size": 16, "position_embedding_size": 10240, "num_hidden_layers": 1}
    width = {"31B": 72, "E4B": 64}[kind]
    reference = write(tmp_path / "model", kind, 280, head_dim=width, **sizes)
    ours = LoadedModel.load(tmp_path / "model")
    tower, reader = ours.config.vision_config, ours.images  # pyright: ignore
    assert (tower.rope_theta, reference.config.vision_config.rope_parameters["rope_theta"]) == (
        100,
        100,
    )
    assert reader is not None
    images = [page(640, 480), page(3, 500), page(90, 1200)]
    counts = [reader.slots((x.height, x.width), None).sources.size for x in images]
    tiles = [reader.tiles((x.height, x.width)) for x in images]
    assert (counts, tiles) == ([266, 216, 244], [4, 4, 4])
    arrays = image_inputs(ours, [images], sum(tiles))
    found = np.asarray(jax.jit(ours.model.encode)(ours.params, arrays))[0]
    rows = [part.reshape(-1, found.shape[-1]) for part in np.split(found, np.cumsum(tiles)[:-1])]
    theirs = image_arrays(reference, images, max_soft_tokens=280, patch_size=16)
    with torch.no_grad():
        states = reference.model.get_image_features(**theirs).last_hidden_state.numpy()
    features = np.concatenate([part[:count] for part, count in zip(rows, counts)])
    hf.assert_close(features / states.std(), states / states.std())


ODD = [
    ("RGB", (1, 1)), ("RGB", (1, 200)), ("L", (200, 1)), ("RGBA", (3, 3)), ("LA", (3, 1)),
    ("RGB", (1, 3)), ("P", (97, 101)), ("L", (48, 48)), ("RGB", (1000, 7)), ("1", (5, 640)),
]  # fmt: skip
"""Modes and sizes of images, all within jaxspec's limits."""


@pytest.mark.parametrize("most", [70, 280])
def test_odd_images_are_those_of_transformers_processor(most: int) -> None:
    """Odd images are read as transformers reads them: each patch of a square is where the processor
    places it, and transparent ones lie on white.
    """
    processor = pillow_class("Gemma4ImageProcessor")(max_soft_tokens=most)
    reader = SquareImages(Gemma4Config(), processor)
    rng = np.random.default_rng(0)
    images = [
        Image.fromarray(rng.integers(0, 255, (*size, 4), np.uint8)).convert(mode)
        for mode, size in ODD
    ]
    pictures = [Picture.of(image).rgb() for image in images]
    for chosen in (pictures[:1], pictures[1:3], pictures[3:6], pictures[6:]):
        out = processor(images=chosen, return_tensors="np")
        for i, tile in enumerate(reader.read(chosen)):
            size, places = (chosen[i].height, chosen[i].width), out["image_position_ids"][i]
            count = int((places[:, 0] >= 0).sum())
            assert reader.slots(size, None).sources.size * 9 == count
            assert len(tile["pixels"]) == reader.tiles(size)
            patches = tile["pixels"].reshape(-1, 3, 16, 3, 16, 3).swapaxes(2, 3)
            of_place = {
                (3 * x + column, 3 * y + row): patches[square, row, column].ravel()
                for square, (x, y) in enumerate(tile["position"].reshape(-1, 2).tolist())
                for row, column in np.ndindex(3, 3)
                if x >= 0
            }
            assert len(of_place) == count
            for place, patch in zip(places[:count].tolist(), out["pixel_values"][i]):
                np.testing.assert_array_equal(of_place[tuple(place)], patch)


def test_an_image_longer_than_the_learned_positions_is_refused_before_it_is_read() -> None:
    vision = replace(Gemma4Config().vision_config, position_embedding_size=210)
    config = replace(Gemma4Config(), vision_config=vision)
    reader = SquareImages(config, pillow_class("Gemma4ImageProcessor")(max_soft_tokens=140))
    assert reader.tiles((140, 4)) == reader.tiles((4, 140)) == 2
    for size, name in (((1, 140), "140x1"), ((140, 1), "1x140")):
        with pytest.raises(InputError, match=f"image of {name}: 140 squares along a side, .* crop"):
            reader.tiles(size)


DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "its assistant, a model and lookup": {"views": ("M", "lookup"), "gamma": 3},
}
CASES = [("12B", "plain"), ("E4B", "plain"), ("31B", "its assistant, a model and lookup")]


def engine(ours: LoadedModel, drafts: str, **options: Any) -> Engine:
    """Return an engine with one of `DRAFTS`."""
    models: list[Any] = []
    if drafts != "plain":
        models.append(replace(ours, params=tiny.noisy(ours.params, 0.03)))
    if "assistant" in drafts:
        models.append(assistant(ours))
    return Engine(ours, models, replace(SETTINGS, **DRAFTS[drafts] | options))


def assistant(ours: LoadedModel) -> LoadedHead:
    """Return an assistant of random weights, with a layer of each kind."""
    text: Any = ours.config.text_config  # pyright: ignore
    kinds = ("sliding_attention", "full_attention")
    layers = {"num_hidden_layers": 2, "layer_types": kinds, "tie_word_embeddings": True}
    config = AssistantConfig(
        replace(text, **layers, final_logit_softcapping=None), backbone_hidden_size=32
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.2, x.shape), x.dtype), abstract_head(config)
    )
    return LoadedHead(config.for_target(ours.config), params)


def tokens(results: Any) -> list[list[int]]:
    return [list(result.tokens) for result in results]


def requests() -> list[Request]:
    return [Request(question, NEW, images=images) for question, images in asked()]


@pytest.mark.parametrize(("kind", "drafts"), CASES)
def test_a_batch_writes_transformers_answers(
    pairs: Any, expected: Any, kind: str, drafts: str
) -> None:
    """A batch of prompts with 0 to 3 images writes transformers' answers, with every kind of
    draft.
    """
    results = engine(pairs(kind)[1], drafts).generate(requests())
    assert tokens(results) == [answer for _, answer in expected(kind)]
    assert drafts == "plain" or sum(int(r.stats.accepted_at.sum()) for r in results) > 5


def test_a_mesh_changes_no_token(pairs: Any, expected: Any) -> None:
    """A target on two devices writes transformers' answers, and its drafts change none of them."""
    split = tiny.split(pairs("31B")[1], make_mesh(model=2))
    results = engine(split, "its assistant, a model and lookup").generate(requests())
    assert tokens(results) == [answer for _, answer in expected("31B")]


@pytest.mark.parametrize("kind", ["12B", "E4B"])
def test_a_session_reads_images_of_later_turns(pairs: Any, expected: Any, kind: str) -> None:
    """A session reads images of later turns: the cache holds the first turn, and the images behind
    it read themselves both ways.
    """
    reference, ours = pairs(kind)
    session = Session(engine(ours, "its assistant, a model and lookup"))
    (question, first), (_, second) = asked()[1], asked()[2]
    said = session.ask(question, images=first, max_new_tokens=NEW).tokens
    assert list(said) == expected(kind)[1][1]
    result = session.ask("And these?", images=second, max_new_tokens=NEW)
    ids = inputs(reference, ours, question, first)["input_ids"][0].tolist()
    after = inputs(reference, ours, "And these?", second)["input_ids"][0].tolist()[1:]
    close, empty = (
        ours.tokenizer.encode(text, add_special_tokens=False)
        for text in ("<turn|>\n", "<|channel>thought\n<channel|>")
    )
    if ids[-len(empty) :] == empty:  # later turns show no reasoning, as in the template
        del ids[-len(empty) :]
    whole = of_tokens(ours, [*ids, *said, *close, *after])
    _, theirs = answer(reference, whole | image_arrays(reference, [*first, *second]))
    assert list(result.tokens) == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_files(pairs: Any, tmp_path: Path, kind: str) -> None:
    """transformers reads the written files bit for bit; audio is left out."""
    reference, ours = pairs(kind)
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
    kinds = read_json(out / "preprocessor_config.json")["image_processor_type"]
    assert kinds == f"{KINDS[kind][0]}ImageProcessor"
    images: Any = ours.images
    with pytest.raises(InputError, match="view P: Gemma 4's images are not pooled"):
        images.slots((24, 24), Pool())

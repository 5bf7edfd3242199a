"""Qwen2.5-VL equals transformers' to 1e-4 in float32: module by module, with images of any size,
and written.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoints import huggingface
from jaxspec.config import QwenVLConfig
from jaxspec.errors import InputError
from jaxspec.loading.images import image_inputs
from jaxspec.loading.models import LoadedModel
from jaxspec.models.inputs import PromptRows
from jaxspec.models.lvlms.qwen_vl import VisionTower, window_contents
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import dialogue
from jaxspec.prompts.rows import rewrite, stack_rows
from tests.tiny import QUICK, hf, qwen_vl
from tests.tiny.hf import torch

pytestmark = pytest.mark.full

SIZES = [(20, 50), (9, 8), (43, 19)]
"""Sizes of images, odd in every way: grids of 3x6, 2x2 (grown) and 5x2 merge groups."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, LoadedModel]:
    made = qwen_vl.model()
    return made, LoadedModel.load(qwen_vl.write(tmp_path_factory.mktemp("qwen_vl"), made))


def test_tower(pair):
    """Each part of the tower equals transformers': patch embedding, a windowed, a full and another
    windowed block, and the merger; two rows, one of two images.
    """
    made, loaded = pair
    images = qwen_vl.pictures(*SIZES)
    theirs: dict[str, np.ndarray] = {}
    visual = made.model.visual
    hooks = [
        visual.blocks[0].register_forward_pre_hook(
            lambda _, given: theirs.update(patch_embed=given[0].numpy())
        )
    ]
    for name, module in [
        *((f"blocks_{i}", block) for i, block in enumerate(visual.blocks)),
        ("merger", visual.merger),
    ]:
        keep = functools.partial(lambda name, _, __, out: theirs.update({name: out.numpy()}), name)
        hooks.append(module.register_forward_hook(keep))
    given = qwen_vl.inputs([qwen_vl.IMAGE] * 3, images)
    with torch.no_grad():
        visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
    for hook in hooks:
        hook.remove()

    arrays = image_inputs(loaded, [images[:2], images[2:]], 8)
    assert arrays is not None
    tower = VisionTower(loaded.config.vision_config)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params: Any, patches: jax.Array, window: jax.Array) -> Any:
        out, inside = tower.apply({"params": params}, patches, window, capture_intermediates=True)
        inside = {
            name: there["__call__"][0]
            for name, there in inside["intermediates"].items()
            if name != "__call__"
        }
        merged = tower.apply({"params": params}, out, method=lambda tower, x: tower.merger(x))
        return inside | {"merger": merged}

    ours: Any = run(loaded.params["visual"], **arrays)
    _, owner = window_contents(loaded.config.vision_config, arrays["window"])
    assert set(theirs) == set(ours)
    for name, expected in theirs.items():
        there = np.asarray(owner) >= 0
        found = np.asarray(ours[name])
        if name == "merger":
            there = there.reshape(*found.shape[:2], -1)[..., 0]
        hf.assert_close(found[there], expected, name)


def prompts() -> tuple[list[list[int]], list[list[Any]]]:
    """Return ragged rows with 2, 0 and 1 images."""
    images = qwen_vl.pictures(*SIZES)
    mark = [qwen_vl.START, qwen_vl.IMAGE, qwen_vl.STOP]
    rows = [[7, *mark, 9, 8, *mark, 20, 21], [30, 31, 32], [*mark, *range(40, 60)]]
    return rows, [images[:2], [], images[2:]]


def our_rows(
    loaded: LoadedModel, rows: list[list[int]], images: list[list[Any]], width: int
) -> tuple[list[Any], PromptRows, dict[str, np.ndarray]]:
    """Return each row, all of them in one batch, and its images."""
    assert loaded.images is not None
    reader = loaded.images
    made = [
        rewrite(
            np.asarray(row), qwen_vl.IMAGE, [reader.slots((x.height, x.width), None) for x in seen]
        )
        for row, seen in zip(rows, images)
    ]
    batch = stack_rows(made, width)
    given = image_inputs(loaded, images, 32)
    assert given is not None
    return made, batch, given


def our_logits(
    loaded: LoadedModel, rows: list[list[int]], images: list[list[Any]], width: int
) -> list[np.ndarray]:
    """Return the logits [L, V] of each row, in one batch."""
    made, batch, given = our_rows(loaded, rows, images, width)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params: Any, rows: PromptRows, images: Any) -> jax.Array:
        return loaded.model.score(params, rows, loaded.model.encode(params, images))

    out = run(loaded.params, batch, given)
    return [np.asarray(logits[: len(row)]) for logits, row in zip(out, made)]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, sections, theta, eps, wide windows": {
        "tie_word_embeddings": True,
        "vision": {"window_size": 24, "fullatt_block_indexes": [0, 2]},
        "text": {
            "rope_scaling": qwen_vl.ROPE | {"mrope_section": [4, 1, 3]},
            "rope_theta": 30.0,
            "rms_norm_eps": 0.01,
        },
    },
    "a window a merge group, none full": {
        "vision": {"window_size": 8, "fullatt_block_indexes": [], "depth": 2}
    },
}
QWEN3: dict[str, dict[str, Any]] = {
    "Qwen3-VL": {},
    "Qwen3-VL, tied, sections, one layer stacked": {
        "tie_word_embeddings": True,
        "vision": {"deepstack_visual_indexes": [1], "num_position_embeddings": 49},
        "text": {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "rope_theta": 30.0,
            },
        },
    },
    "Qwen3-VL, more stacked than layers": {"text": {"num_hidden_layers": 1}},
}


@pytest.mark.parametrize("name", [*VARIANTS, *QWEN3])
def test_logits_and_round_trip(tmp_path, name):
    """A model of transformers has its logits here to 1e-4, and, in a directory that this library
    writes, again in transformers, bit for bit.
    """
    made = qwen_vl.qwen3(**QWEN3[name]) if name in QWEN3 else qwen_vl.model(**VARIANTS[name])
    loaded = LoadedModel.load(qwen_vl.write(tmp_path / "theirs", made))
    rows, images = prompts()
    theirs = [run(made, row, seen) for row, seen in zip(rows, images)]
    for found, expected in zip(our_logits(loaded, rows, images, 64), theirs):
        hf.assert_close(found, expected)
    assert type(loaded.config).from_hf(loaded.config.to_hf()) == loaded.config

    huggingface.save(tmp_path / "ours", loaded.config, loaded.params)
    again = hf.reload(tmp_path / "ours", type(made))
    for expected, row, seen in zip(theirs, rows, images):
        np.testing.assert_array_equal(run(again, row, seen), expected)


def test_heads_read_states_after_deepstacks_addition(tmp_path):
    """The states that heads read are the inputs of transformers' next layers; its layers' outputs,
    which some trainers keep, lack the addition at image slots.
    """
    made = qwen_vl.qwen3(text={"num_hidden_layers": 3})
    loaded = LoadedModel.load(qwen_vl.write(tmp_path, made))
    rows, images = (part[:1] for part in prompts())
    read: list[np.ndarray] = []
    wrote: list[np.ndarray] = []
    for layer in made.model.language_model.layers:
        layer.register_forward_pre_hook(lambda _, args: read.append(args[0][0].numpy()))
        layer.register_forward_hook(lambda _, __, out: wrote.append(out[0].numpy().copy()))
    run(made, rows[0], images[0])

    _, batch, given = our_rows(loaded, rows, images, 64)
    model, params, layers = loaded.model, loaded.params, tuple(range(len(read)))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def states(given: dict[str, Any]) -> Any:
        embeds = model.embed(params, batch, model.encode(params, given))
        return model.read(params, embeds, batch, 64, layers)[1].hidden

    kept = np.split(np.asarray(states(given))[0, 0, : len(read[0])], len(layers), axis=-1)
    for found, expected in zip(kept, read):
        hf.assert_close(found, expected)
    pictures = np.asarray(batch.tokens[0, : len(read[0])]) == qwen_vl.IMAGE
    for after, before in zip(kept[1:], wrote):
        hf.assert_close(after[~pictures], before[~pictures])
        assert np.all(np.abs(after - before)[pictures].max(-1) > 0.01)


def run(made: Any, row: list[int], images: list[Any]) -> np.ndarray:
    with torch.no_grad():
        return made(**qwen_vl.inputs(row, images)).logits[0].numpy()


def test_key_layouts(tmp_path, pair):
    """The hub's files, those of transformers 5's modules, and flat configurations give one
    model.
    """
    made, loaded = pair
    tensors = {name: tensor.numpy().copy() for name, tensor in made.state_dict().items()}
    assert "model.language_model.norm.weight" in tensors
    hub = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
    }
    for folder, names in (("modules", tensors), ("hub", hub)):
        found = huggingface.load(hf.write(tmp_path / folder, made, names))
        assert found.config == loaded.config
        jax.tree.map(np.testing.assert_array_equal, found.params, loaded.params)
    nested = loaded.config.to_hf()
    flat = {
        **nested["text_config"],
        **{name: part for name, part in nested.items() if name != "text_config"},
    }
    assert QwenVLConfig.from_hf(flat) == loaded.config


def test_prompts(pair):
    """In a question `<image>` means the placeholder and its marks; without one, images come first
    and no line follows them.
    """
    _, loaded = pair
    config, words = loaded.config, loaded.tokenizer
    encoder = PromptEncoder(words, config.image_token_index, config.image_marks)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    asked = {"Is <image> like <image>?": f"Is {mark} like {mark}?", "Alike?": f"{mark}{mark}Alike?"}
    for question, expected in asked.items():
        said = words.decode(encoder.prompt(question, [None, None]).tokens)
        assert said.endswith(f"<|im_start|>user\n{expected}<|im_end|>\n<|im_start|>assistant\n")
        ((tokens, _),) = encoder.dialogues(
            [dialogue([(question.replace("Alike", "<image><image>Alike"), "Yes.")], [None, None])]
        )
        assert words.decode(tokens).endswith(
            f"{expected}<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
        )
    for name in ("image_token_index", "vision_start_token_id", "vision_end_token_id"):
        other, unknown = (replace(config, **{name: new}) for new in (1, 999))
        changed = PromptEncoder(words, other.image_token_index, other.image_marks).prompt(
            "A?", [None]
        )
        assert changed.tokens.tolist() != encoder.prompt("A?", [None]).tokens.tolist()
        with pytest.raises(InputError, match="the tokeniser that belongs to the model"):
            PromptEncoder(words, unknown.image_token_index, unknown.image_marks)

"""LLaVA-NeXT and LLaVA-OneVision equal transformers' in tiles, unpadding, packed features, logits
and files.
"""

from __future__ import annotations

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from eval.lib.drafts.forward import forward_logits
from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.processors import load_image_processor
from jaxspec.config import LlavaNextConfig, VisionConfig
from jaxspec.decoding.speculative import Autoregressive
from jaxspec.engine.memory import Sizes, plan_memory
from jaxspec.errors import InputError
from jaxspec.models.families import abstract_params, family_of
from jaxspec.models.inputs import ImageInputs, Pool
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.encoder import PromptEncoder
from tests.tiny import hf, tiles
from tests.tiny.hf import torch

pytestmark = pytest.mark.full

SIZES = st.tuples(st.integers(9, 400), st.integers(9, 400))
SIDES = st.integers(1, 4)


def reader(
    family: str, side: int, pinpoints: list[list[int]], most: int = 9
) -> tuple[ImageInputs, Any]:
    """Return how a family reads pages of `side` times 4 pixels and some, and the tower-less self of
    transformers' model.
    """
    import transformers

    pixels = 4 * side + 1
    tower = {"image_size": pixels, "patch_size": 4}
    grids = [[height * pixels, width * pixels] for height, width in pinpoints]
    kind = "clip_vision_model" if family == "llava_next" else "siglip_vision_model"
    given: dict[str, Any] = {
        "vision_config": VisionConfig(kind, **tower),
        "image_grid_pinpoints": grids,
    }
    if family == "llava_onevision":
        given["vision_aspect_ratio"] = f"anyres_max_{most}"
    config = family_of(family).config(**given)
    theirs = getattr(transformers, type(config).__name__)(
        vision_config={"model_type": kind, **tower}
    )
    theirs.image_grid_pinpoints = grids
    images = family_of(family).images
    assert images is not None
    return images(config, None), types.SimpleNamespace(config=theirs)


def packed(
    family: str, model: Any, features: Any, size: tuple[int, int], newline: Any, most: int
) -> np.ndarray:
    """Return transformers' features of one image."""
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    if family == "llava_next":
        return LlavaNextModel.pack_image_features(model, [features], [size], "default", newline)[0][
            0
        ].numpy()
    ratio = f"anyres_max_{most}"
    return LlavaOnevisionModel.pack_image_features(model, [features], [size], newline, ratio)[0][
        0
    ].numpy()


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
@given(
    size=SIZES,
    side=st.sampled_from([2, 3, 5]),
    pinpoints=st.lists(st.tuples(SIDES, SIDES).map(list), min_size=1, max_size=5),
    most=st.sampled_from([1, 2, 9]),
    images=st.sampled_from([1, 1, 2]),
)
@example(size=(333, 127), side=3, pinpoints=[[4, 2]], most=1, images=1)
@example(
    size=(200, 300), side=5, pinpoints=[[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]], most=9, images=1
)
def test_slots_show_what_transformers_packs(family, size, side, pinpoints, most, images):
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    ours, model = reader(family, side, pinpoints, most)
    try:
        slots = ours.slots(size, None, images)
    except InputError:
        assume(False)
    alone = family == "llava_onevision" and images > 1
    grids, pixels = model.config.image_grid_pinpoints, model.config.vision_config.image_size
    count = 1 if alone else image_size_to_num_patches(size, grids, pixels)
    assert ours.tiles(size, images) == count
    assert slots.rows == count * side**2 > slots.sources.max()
    table = np.random.default_rng(0).normal(size=(count * side**2 + 1, 3)).astype(np.float32)
    features = torch.tensor(table[:-1].reshape(count, side**2, 3))
    theirs = packed(family, model, features, size, torch.tensor(table[-1]), most)
    np.testing.assert_allclose(tiles.shown(table, slots.sources, slots.blend), theirs, atol=1e-5)
    assert slots.sources.shape[1] == ours.blended(None)
    pooled = ours.slots(size, Pool(), images)
    assert pooled.rows == count * len(pooled.sources)
    assert pooled.sources[:, 0].tolist() == list(range(Pool().count(side**2)))


@pytest.mark.parametrize(("family", "count"), [("llava_next", 576), ("llava_onevision", 729)])
def test_published_sizes(family, count):
    """Images of the published resolutions have the token counts of transformers' processors."""
    config = family_of(family).config()
    images = family_of(family).images
    assert images is not None
    assert config.image_tokens == count
    side = config.vision_config.image_size
    model = tiles.onevision() if family == "llava_onevision" else tiles.llava_next()
    counter = tiles.processor(model)
    counter.image_processor.image_grid_pinpoints = [
        list(pinpoint) for pinpoint in config.image_grid_pinpoints
    ]
    counter.num_image_tokens, counter.patch_size, counter.vision_aspect_ratio = (
        count,
        14,
        "anyres_max_9",
    )
    for size in [(336, 336), (480, 640), (1080, 1920), (3000, 500), (77, 1234), (2304, 2304)]:
        expected = counter._get_number_of_features(*size, side, side) - (family == "llava_next")
        assert len(images(config, None).slots(size, None).sources) == expected


def test_default_pooling_is_a_square():
    assert [Pool().count(tokens) for tokens in (576, 729, 9, 4)] == [144, 169, 1, 1]


@pytest.fixture(scope="module", params=tiles.MODELS)
def pair(request, tmp_path_factory) -> tuple[Any, Any]:
    model = tiles.MODELS[request.param]()
    return model, tiles.load(tmp_path_factory.mktemp(request.param) / "model", model)


def test_logits(pair):
    """Logits behind prompts of none, one and several images are transformers'."""
    model, ours = pair
    encoder = PromptEncoder(ours.tokenizer, tiles.IMAGE)
    for shapes in [(), [(90, 31)], [(40, 41), (13, 64)]]:
        prompt = encoder.prompt("what?", [tiles.page(*shape) for shape in shapes])
        with torch.no_grad():
            theirs = model(**tiles.inputs(model, prompt)).logits[0, -1]
        hf.assert_close(forward_logits(ours, prompt, ()), theirs)


def test_files(pair, tmp_path):
    """Weights are written and read bit for bit, in transformers and here, with what transformers'
    processor counts placeholders by.
    """
    model, ours = pair
    out, processor = tmp_path / "out", tiles.processor(model)
    huggingface.save(
        out,
        ours.config,
        ours.params,
        tokenizer=ours.tokenizer,
        image_processor=ours.image_processor,
    )
    again = hf.reload(out, type(model))
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert huggingface.load(out).config == ours.config
    assert again.config.image_grid_pinpoints == model.config.image_grid_pinpoints
    written = json.loads((out / "processor_config.json").read_text())
    assert written.pop("processor_class") == type(processor).__name__
    written.pop("video_token", None)  # of no use without videos
    assert written == {name: getattr(processor, name) for name in written}
    assert load_image_processor(out, ours.config).to_dict() == ours.image_processor.to_dict()
    hub = huggingface.load(hf.write(tmp_path / "hub", model, hf.hub_tensors(model)))
    np.testing.assert_array_equal(hub.params["image_newline"], ours.params["image_newline"])


def test_processor_of_another_model(pair):
    """An image processor that cuts other tiles than config.json says is refused in one line."""
    _, ours = pair
    assert ours.images is not None
    other = tiles.processor(pair[0]).image_processor
    other.image_grid_pinpoints = [[12, 12]]
    reader = type(ours.images)(ours.config, other)
    line = r"makes 2 tiles of 50x50 pixels, but config\.json asks for 10"
    with pytest.raises(InputError, match=line):
        reader.read([tiles.page(50, 50)])


def test_full_size():
    """NeXT has its published number of weights, and the memory for an image in the largest grid is
    planned from shapes alone.
    """
    config, parameters = LlavaNextConfig.from_hf({"text_config": {"vocab_size": 32064}}), 7.063e9
    params = abstract_params(config, jnp.bfloat16)
    leaves = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in leaves) == pytest.approx(parameters, rel=0.005)
    images = family_of(config.model_type).images
    assert images is not None
    size = max(config.image_grid_pinpoints)
    reader = images(config, None)
    sizes = Sizes(len(reader.slots(size, None).sources) + 64, (reader.tiles(size), 0), 128)
    report = plan_memory(Autoregressive(LanguageModel(config)), {"target": params}, 1, sizes)
    assert report.target_weights == pytest.approx(2 * parameters, rel=0.005)
    pixels = 4 * 3 * config.vision_config.image_size**2 * reader.tiles(size)
    assert pixels < report.inputs < 1.1 * pixels
    assert report.working < 4 << 30

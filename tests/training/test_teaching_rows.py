"""Rows of every recipe's data have an answer within its buckets: what `--debug` cannot see, and a
run of days must not end by.

The data sets are synthetic rows of the sizes that the recipes and docs/data.md name, and the
picture book's own; images have the slots of the real targets. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from PIL import Image

from jaxspec.command import load_preset, preset_names
from jaxspec.data.prepared import mixture
from jaxspec.data.samples import Sample
from jaxspec.loading.models import LoadedModel, prompt_encoder
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.prompts.views import parse_view
from jaxspec.training.conversations import GROUP, ConversationBatches
from jaxspec_demo import ASSETS
from picturebook.training import Picturebook, named
from tests import tiny
from tests.tiny import families
from train.prepare import Llava, with_few_images
from train.recipe import KIND

BATCH = 16
PHOTO = Image.new("RGB", (640, 480))
FRAMES = Llava.frames
SIZES = {
    "blip_laion_cc_sbu_558k": ((1, 1), (0, 0)),
    "llava_v1_5_mix665k": ((1, 1), (20, 200)),
    "sharegpt": ((0, 0), (20, 800)),
    "recap_558k": ((1, 1), (20, 60)),
    "recap_118k": ((1, 1), (20, 60)),
    "recap_cc3m": ((1, 1), (20, 60)),
    "ureader_tr": ((1, 1), (20, 60)),
    "synthdog_en": ((1, 1), (20, 60)),
    "synthdog_zh": ((1, 1), (20, 60)),
    "evol_instruct": ((0, 0), (20, 800)),
    "onevision_single_image": ((1, 1), (20, 400)),
    "m4_instruct": ((2, 8), (20, 400)),
    "m4_instruct_video": ((FRAMES, FRAMES), (20, 200)),
    "redpajama_1t_sample": ((0, 0), (0, 0)),
    "oig_small_chip2": ((0, 0), (10, 100)),
    "oasst1": ((0, 0), (10, 400)),
    "prompts": ((0, 0), (20, 320)),
    "smollm2_t0": ((0, 0), (20, 320)),
    "coder_t0": ((0, 0), (20, 320)),
}
"""Least and most images of a row, and tokens of its first question."""
DRAWN = {
    "eyes_pages_t0": "picturebook:describe,read,exist,reason,chart",
    "eyes_more_t0": "picturebook:edit,brush,spot,facts,sums",
    "picturebook_t0": "picturebook",
    "picturebook_t1": "picturebook",
}


class Synthetic(Sequence[Sample]):
    """Give rows from the least to the most images and tokens; a character is a token."""

    def __init__(self, images: tuple[int, int], tokens: tuple[int, int]) -> None:
        self.images, self.tokens = images, tokens

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: Any) -> Sample:
        spread = range(self.images[0], self.images[1] + 1)
        images = spread[i % len(spread)]
        words = self.tokens[0] + i * (self.tokens[1] - self.tokens[0]) // len(self)
        question = PLACEHOLDER * images + "w" * words
        return Sample(str(i), "synthetic", (PHOTO,) * images, ((question, "a" * 200),))


def source(name: str) -> Sequence[Sample]:
    if name.startswith("stories_"):
        pages = Picturebook(kinds=("saga", "album"))
        return [with_few_images(pages[i], int(name[-1])) for i in range(64)]
    base = next((size for size in SIZES if name.startswith(size)), None)
    return named(DRAWN.get(name, name)) or Synthetic(*SIZES[base or name])


@cache
def reader(target: str) -> LoadedModel:
    """Return a tiny model with the slots of a real target's images; the mini models as they are."""
    config: Any
    if "qwen" in target.lower() and "vl" in target.lower():
        config, processor = families.FAMILIES["qwen3_vl" if "Qwen3" in target else "qwen2_5_vl"]()
        side = 16 if "Qwen3" in target else 14
        window = {} if "Qwen3" in target else {"window_size": 8 * side}
        vision = replace(config.vision_config, patch_size=side, **window)
        edges = {"shortest_edge": 4 * side**2, "longest_edge": 1280 * 4 * side**2}
        pages = type(processor)(patch_size=side, size=edges)
        return LoadedModel(replace(config, vision_config=vision), {}, tiny.chat_tokenizer(), pages)
    if "gemma" in target:
        config, processor = families.SQUARES["gemma4"]()
        pages = type(processor)(max_soft_tokens=280, patch_size=16, pooling_kernel_size=3)
        vision = replace(config.vision_config, patch_size=16, position_embedding_size=10240)
        return LoadedModel(replace(config, vision_config=vision), {}, tiny.chat_tokenizer(), pages)
    if "llava" in target:
        vision = replace(tiny.CONFIG.vision_config, image_size=336)
        return tiny.loaded({}, replace(tiny.CONFIG, vision_config=vision))
    mini = LoadedModel.without_weights(str(ASSETS / "mini" / "target"))
    if "eyes" in target:  # 144 slots; words are as long as in SmolLM2's vocabulary, or longer
        config = mini.config
        vision = config.vision_config
        side = replace(vision, image_size=12 * vision.patch_size)
        return replace(mini, config=replace(config, vision_config=side))
    return mini if str(ASSETS) in target or "tower" in target else tiny.loaded({})


@cache
def share_lost(
    target: str, data: tuple[tuple[str, float], ...], view: str, plain: bool, **lengths: Any
) -> float:
    """Return the share of rows that teach nothing, as training counts them; once for alike ones."""
    model = reader(target)
    samples = mixture([(source(name), weight) for name, weight in data], 0)
    rows = ConversationBatches(
        samples, prompt_encoder(model), model, BATCH, view=parse_view(view), plain=plain, **lengths
    )
    return sum(rows.unlearned(step) for step in range(GROUP)) / (GROUP * BATCH)


@pytest.mark.parametrize("name", preset_names(KIND))
def test_the_rows_of_a_recipe_teach(name: str) -> None:
    recipe = load_preset(KIND, name)
    lengths = {"buckets": recipe.buckets, "tile_buckets": recipe.tile_buckets}
    for stage in recipe.stages:
        view = getattr(recipe, "view", "M")
        lost = share_lost(recipe.target, stage.data, view, stage.plain, **lengths)
        assert lost <= 0.02, f"{stage.name}: {lost:.1%}"

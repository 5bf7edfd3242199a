"""Make tiny random LLaVA-NeXT and LLaVA-OneVision models of transformers, with its processors:
pages of 12 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.processors import pillow_class
from jaxspec.engine.engine import LoadedModel
from jaxspec.prompts.encoder import Prompt
from tests.tiny import SPECIAL, chat_tokenizer, hf, tokenizer
from tests.tiny.hf import torch
from tests.tiny.requests import page as noise

IMAGE = SPECIAL.index("<image>")
PINPOINTS = [[12, 24], [24, 12], [24, 24], [36, 12], [12, 36], [36, 36]]
TEXT = {"vocab_size": 104, "max_position_embeddings": 1024}
SIGLIP = {name: value for name, value in hf.VISION.items() if name != "projection_dim"}


def llava_next(**changes: Any) -> Any:
    from transformers import CLIPVisionConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    config = LlavaNextConfig(
        text_config=hf.text_config(TEXT),
        vision_config=CLIPVisionConfig(**hf.VISION),
        image_token_index=IMAGE,
        image_grid_pinpoints=PINPOINTS,
        **changes,
    )
    return hf.talkative(hf.random_model(LlavaNextForConditionalGeneration, config))


def onevision(text: Any = None, vision: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return a OneVision with at most two tiles' worth of features: a grid of three times three is
    scaled down.
    """
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        SiglipVisionConfig,
    )

    config = LlavaOnevisionConfig(
        text_config=text or hf.text_config(TEXT),
        vision_config=SiglipVisionConfig(**SIGLIP | {"vision_use_head": False} | (vision or {})),
        image_token_index=IMAGE,
        video_token_index=SPECIAL.index("<pad>"),
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
        **changes,
    )
    return hf.talkative(hf.random_model(LlavaOnevisionForConditionalGeneration, config))


def onevision_qwen2() -> Any:
    from transformers import Qwen2Config

    return onevision(text=Qwen2Config(**hf.TEXT | TEXT | {"tie_word_embeddings": True}))


MODELS = {"next": llava_next, "onevision": onevision, "onevision-qwen2": onevision_qwen2}


def processor(model: Any) -> Any:
    """Return transformers' processor of the model's family, on Pillow."""
    import transformers

    name = type(model).__name__.removesuffix("ForConditionalGeneration")
    size = {"shortest_edge": 12} if name == "LlavaNext" else {"height": 12, "width": 12}
    crop = {"crop_size": {"height": 12, "width": 12}} if name == "LlavaNext" else {}
    counts: dict[str, Any] = {"patch_size": 4, "num_additional_image_tokens": 1}
    if name == "LlavaOnevision":
        counts = {"num_image_tokens": 9, "vision_aspect_ratio": model.config.vision_aspect_ratio}
    kind = getattr(transformers, f"{name}Processor")
    # OneVision's cannot even be made without torchvision, for the sake of its videos.
    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    return unchecked(
        pillow_class(f"{name}ImageProcessor")(size=size, image_grid_pinpoints=PINPOINTS, **crop),
        tokenizer(),
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        **counts,
    )


def load(path: Any, model: Any) -> LoadedModel:
    """Return the model, saved by transformers, as this library reads it."""
    model.save_pretrained(path)
    found = huggingface.load(path)
    return LoadedModel(
        found.config, found.params, chat_tokenizer(), processor(model).image_processor
    )


def page(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(seed, height, width))


def inputs(model: Any, prompt: Prompt) -> dict[str, Any]:
    """Return what transformers reads of a prompt; its processor says how many placeholders stand
    for each image.
    """
    if not prompt.images:
        return {"input_ids": torch.tensor(prompt.tokens[None].astype(np.int64))}
    # The images of one prompt in a list of their own, as transformers' chat templates hand them
    # over.
    made = processor(model)(
        images=[list(prompt.images)], text=["<image>x" * len(prompt.images)], return_tensors="np"
    )
    runs = "".join("i" if token == IMAGE else " " for token in made["input_ids"][0]).split()
    counts = iter(map(len, runs))
    ids = [
        token for one in prompt.tokens for token in [one] * (next(counts) if one == IMAGE else 1)
    ]
    rest = {
        key: torch.tensor(np.asarray(made[key]))
        for key in made
        if key not in ("input_ids", "attention_mask")
    }
    return {"input_ids": torch.tensor([ids]), **rest}


def generate(model: Any, prompt: Prompt, new: int) -> list[int]:
    """Return transformers' greedy answer."""
    given = inputs(model, prompt)
    mask = torch.ones_like(given["input_ids"])
    with torch.no_grad():
        out = model.generate(
            **given, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    return out[0, given["input_ids"].shape[1] :].tolist()


def shown(table: np.ndarray, sources: np.ndarray, blend: np.ndarray | None) -> np.ndarray:
    """Return rows of a table whose last is the end-of-line embedding, blended as slots say."""
    rows = table[np.where(sources < 0, len(table) - 1, sources)]
    return rows[:, 0] if blend is None else np.einsum("pk,pkd->pd", blend, rows)


def sizes(images: Sequence[Image.Image]) -> list[tuple[int, int]]:
    return [(image.height, image.width) for image in images]

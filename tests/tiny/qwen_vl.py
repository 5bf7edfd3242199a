"""Make tiny random Qwen2.5-VL models by transformers, their processors, and prompts as transformers
wants them.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.hub.configs import CHATML
from tests.tiny import CHARACTERS, hf
from tests.tiny.checkpoints import character_tokenizer
from tests.tiny.hf import torch

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    "<|image_pad|>",
)
START, STOP, IMAGE = (
    SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad")
)
PADDED = len(SPECIAL) + len(CHARACTERS) + 2
"""Rows of the target's vocabulary: two more than the tokeniser has words."""
TEMPLATE = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
"""What Qwen2.5-VL's says of text and images."""

TEXT: dict[str, Any] = {
    **{"vocab_size": PADDED, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
    **{"rope_theta": 100.0, "eos_token_id": None, "bos_token_id": None},
}
VISION: dict[str, Any] = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16},
    **{"fullatt_block_indexes": [1], "out_hidden_size": 32},
}
ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
"""Sections of the decoder's 8 frequencies."""
SIDE = 8
"""Pixels along one side of a merge group; windows are twice as wide."""


def model(
    text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Return a Qwen2.5-VL whose configuration is flat, as on the hub."""
    flat = TEXT | {"rope_scaling": deepcopy(ROPE)} | (text or {})
    config = Qwen2_5_VLConfig(
        **flat | {"vision_config": VISION | (vision or {}), "image_token_id": IMAGE} | changes,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    return hf.random_model(Qwen2_5_VLForConditionalGeneration, config)


def qwen3(
    text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Return a Qwen3-VL with a square of 5x5 learned positions."""
    rope = {
        "rope_type": "default",
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "rope_theta": 100.0,
    }
    decoder = {
        name: value
        for name, value in TEXT.items()
        if name not in ("rope_theta", "eos_token_id", "bos_token_id")
    }
    tower = {
        name: value
        for name, value in VISION.items()
        if name not in ("window_size", "fullatt_block_indexes")
    }
    config = Qwen3VLConfig(
        text_config=decoder | {"head_dim": 16, "rope_parameters": rope} | (text or {}),
        vision_config=tower
        | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
        | (vision or {}),
        **{"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": STOP}
        | changes,
    )
    return hf.random_model(Qwen3VLForConditionalGeneration, config)


MODELS = {"qwen2_5_vl": model, "qwen3_vl": qwen3}


def text_model(kind: str = "qwen2", **changes: Any) -> Any:
    """Return a Qwen2.5 or Qwen3 of the same words, with fewer rows of padding."""
    sizes = TEXT | {"vocab_size": PADDED - 2, "head_dim": 16} | changes
    if kind == "qwen3":
        return hf.random_model(Qwen3ForCausalLM, Qwen3Config(**sizes))
    return hf.random_model(Qwen2ForCausalLM, Qwen2Config(**sizes))


def tokenizer() -> Any:
    options = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    return character_tokenizer(SPECIAL, CHARACTERS, "<|endoftext|>", **options)


def image_processor(most: int = 40) -> Any:
    """Return a processor that gives an image 4 to `most` tokens."""
    return Qwen2VLImageProcessorPil(
        patch_size=VISION["patch_size"],
        size={"shortest_edge": 4 * SIDE**2, "longest_edge": most * SIDE**2},
    )


def write(path: Path, made: Any) -> Path:
    """Write a whole checkpoint directory."""
    made.save_pretrained(path)
    tokenizer().save_pretrained(path)
    image_processor().save_pretrained(path)
    return path


def pictures(*sizes: tuple[int, int], seed: int = 0) -> list[Image.Image]:
    """Return images of noise of these heights and widths."""
    draw = np.random.default_rng(seed)
    return [Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


def inputs(row: list[int], images: list[Image.Image]) -> dict[str, Any]:
    """Return arguments of transformers' model for a prompt with one placeholder an image."""
    if not images:
        return {
            "input_ids": torch.tensor([row]),
            "attention_mask": torch.ones(1, len(row), dtype=torch.long),
        }
    seen = image_processor()(images=images, return_tensors="np")
    patches, grids = np.asarray(seen["pixel_values"]), np.asarray(seen["image_grid_thw"])
    counts = iter(grids.prod(axis=1) // VISION["spatial_merge_size"] ** 2)
    ids = torch.tensor(
        [[t for token in row for t in [token] * (next(counts) if token == IMAGE else 1)]]
    )
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.tensor(patches),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def generate(
    made: Any, row: list[int], images: list[Image.Image], new: int, **options: Any
) -> list[int]:
    """Return what transformers writes greedily."""
    given = inputs(row, images)
    with torch.no_grad():
        options = {"do_sample": False, "pad_token_id": 0} | options
        out = made.generate(**given, max_new_tokens=new, **options)
    return out[0, given["input_ids"].shape[1] :].tolist()

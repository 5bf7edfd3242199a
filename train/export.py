"""What the mini models are shipped with: one tokeniser, one image processor, bfloat16 weights."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
from transformers import CLIPImageProcessor

from configs.models.mini import IMAGE_TOKEN, TOWER
from jaxspec.checkpoints import huggingface
from jaxspec.config import LlavaConfig
from jaxspec.data.prompts import PromptEncoder
from jaxspec.typing import Params
from train.tokenizer import make_tokenizer


@lru_cache(maxsize=1)
def encoder() -> PromptEncoder:
    return PromptEncoder(make_tokenizer(), IMAGE_TOKEN)


def image_processor() -> CLIPImageProcessor:
    size = TOWER.image_size
    return CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def export(config: LlavaConfig, params: Params, out: Path) -> None:
    """Writes the Hugging Face directory `out`; of several processes, the first does."""
    if jax.process_index():
        return
    huggingface.save(
        out,
        config,
        params,
        tokenizer=encoder().tokenizer,
        image_processor=image_processor(),
        dtype=jnp.dtype("bfloat16"),
    )
    print(f"wrote {out}")

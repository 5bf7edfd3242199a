"""The mini LVLMs: what they are shipped with, and their training on picturebook on top of a finished tower."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
from transformers import CLIPImageProcessor

from configs.models.mini import IMAGE_TOKEN, TOWER
from configs.train.mini import Pages
from jaxspec.checkpoints import directories, huggingface
from jaxspec.config import LlavaConfig
from jaxspec.data.prompts import PromptEncoder
from jaxspec.data.sources import Picturebook, mixture
from jaxspec.decoding.loading import LoadedModel
from jaxspec.models import init_params
from jaxspec.sharding import shardings
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import ConversationBatches
from jaxspec.training.fingerprints import params_fingerprint
from jaxspec.training.objectives import tuning_loss
from jaxspec.training.trainer import Evaluate, fit
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


def unread(config: LlavaConfig) -> LoadedModel:
    """A mini model without its parameters."""
    return LoadedModel(config, {}, encoder().tokenizer, image_processor())


def train_lvlm(
    config: LlavaConfig,
    train: TrainConfig,
    pages: Pages,
    tower: Params,
    directory: Path,
    out: Path,
    evaluate: Evaluate | None = None,
) -> None:
    """Trains projector and decoder from scratch, as `fit` does, and writes the model with weights in bfloat16.

    Args:
      directory: of checkpoints and metrics.
      out: the Hugging Face directory; of several processes, the first writes it.
    """
    directories.check_output(out, directory)
    samples = mixture([(Picturebook(train.seed, pages.kinds), 1.0)], train.seed)
    model = unread(config)
    batches = ConversationBatches(
        samples, encoder(), model, train.batch, pages.buckets, pages.images, seed=train.seed
    )
    params = {**init_params(config, jax.random.key(train.seed)), "vision_tower": tower}
    places = partial(shardings, config, params)
    inputs = {"model": asdict(config), "pages": asdict(pages), "tower": params_fingerprint(tower)}
    loss_fn = tuning_loss(model.model)
    params = fit(train, params, loss_fn, batches, directory, places=places, evaluate=evaluate, inputs=inputs)
    if jax.process_index() == 0:
        bfloat16 = jnp.dtype("bfloat16")
        huggingface.save(
            out, config, params, tokenizer=model.tokenizer, image_processor=model.image_processor, dtype=bfloat16,
            overwrite=True,
        )
        print(f"wrote {out}")

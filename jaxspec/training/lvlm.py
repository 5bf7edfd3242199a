"""Visual instruction tuning: next-token loss on what the assistant wrote, the vision tower frozen (LLaVA, stage 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxspec.config import LlavaConfig
from jaxspec.models import build, init_params
from jaxspec.sharding import shardings
from jaxspec.training.batches import Batch, BatchIterator
from jaxspec.training.config import TrainConfig
from jaxspec.training.losses import next_token_loss
from jaxspec.training.step import LossFn
from jaxspec.training.trainer import Evaluate, fit
from jaxspec.typing import Array, Params


def lvlm_loss(config: LlavaConfig) -> LossFn:
    """The next-token loss of batches {tokens [B,L], mask [B,L], pixels [B,I,Y,X,3]}."""
    module = build(config)

    def loss_fn(params: Params, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        dtype = params["multi_modal_projector"]["linear_1"]["kernel"].dtype
        logits: Any = module.apply({"params": params}, batch["tokens"], batch["pixels"].astype(dtype))
        return next_token_loss(logits, batch["tokens"], batch["mask"])

    return loss_fn


def train_lvlm(
    config: LlavaConfig,
    stage: TrainConfig,
    tower: Params,
    batches: BatchIterator | Callable[[int], Batch],
    directory: Path,
    evaluate: Evaluate | None = None,
) -> Params:
    """Trains projector and decoder from scratch on top of a given tower, as `fit` does."""
    params = {**init_params(config, jax.random.key(stage.seed)), "vision_tower": tower}
    places = partial(shardings, config, params)
    return fit(stage, params, lvlm_loss(config), batches, directory, places=places, evaluate=evaluate)

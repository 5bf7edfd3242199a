"""Three models of random weights and planted agreement, as checkpoints: sizes at which passes are what time goes into.

    python -m eval.planted
    python -m eval.collaborative planted

A target of 54M knows the whole cycle of `jaxspec.evaluation.planted`, a partner of the same size and a draft of 3M
know a share of it each. All see pages of 576 image tokens, and use the mini models' tokeniser.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from configs.eval.mini import ASSETS
from jaxspec.checkpoints import huggingface
from jaxspec.command import run_script
from jaxspec.config import LlavaConfig
from jaxspec.decoding.loading import LoadedModel
from jaxspec.errors import InputError
from jaxspec.evaluation.latency import random_params
from jaxspec.evaluation.planted import plant
from jaxspec.presets import load_preset
from jaxspec.runtime import setup_runtime


def main(out: Path = Path("runs/planted"), partner: float = 0.8, draft: float = 0.7) -> None:
    """Writes OUT/target, OUT/partner and OUT/draft in Hugging Face layout.

    Args:
      partner: share of the cycle's tokens after which the partner is right.
      draft: likewise, the draft.
    """
    setup_runtime()
    sizes = load_preset("latency", "pair55m")
    shares = {"target": (sizes.target, 1.0), "partner": (sizes.target, partner), "draft": (sizes.draft, draft)}
    for seed, (name, (config, right)) in enumerate(shares.items()):
        write(out / name, config, right, seed)
        print(f"wrote {out / name}")


def write(path: Path, config: LlavaConfig, right: float, seed: int) -> None:
    """One planted model as a checkpoint. Raises InputError where the share is none."""
    if not 0 <= right <= 1:
        raise InputError(f"{path.name}: right after {right:g} of the tokens; give a share from 0 to 1")
    mini = LoadedModel.load(ASSETS / "target")
    config = replace(config, image_token_index=mini.config.image_token_index)  # type: ignore[union-attr]
    params = plant(config, random_params(config, jnp.dtype("float32"), seed), right)
    side = config.vision_config.image_size
    processor = type(mini.image_processor)(
        **(mini.image_processor.to_dict() | {"size": {"shortest_edge": side}, "crop_size": side})
    )
    huggingface.save(path, config, params, tokenizer=mini.tokenizer, image_processor=processor, overwrite=True)


if __name__ == "__main__":
    run_script(main, __doc__)

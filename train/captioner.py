"""Trains the mini captioner on top of a finished model's vision tower, and writes it in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from configs.models.mini import CAPTIONER
from configs.train import mini
from jaxspec.checkpoints import huggingface
from jaxspec.command import run_script
from jaxspec.runtime import join_cluster, setup_runtime
from jaxspec.training.config import TrainConfig
from train.lvlm import train_lvlm


def main(
    train: TrainConfig = mini.CAPTIONER,
    tower_of: Path = Path("jaxspec/assets/mini/draft"),
    runs: Path = Path("runs/train"),
    out: Path = Path("runs/train/captioner/hf"),
    cluster: str = "",
) -> None:
    """Trains the captioner; a run that was stopped goes on where it was.

    Args:
      tower_of: the model whose vision tower it takes, a Hugging Face directory.
      runs: checkpoints and metrics go to RUNS/captioner.
      out: the finished model, a Hugging Face directory.
      cluster: on several hosts `auto`, or HOST:PORT,COUNT,INDEX.
    """
    join_cluster(cluster)
    setup_runtime()
    tower = huggingface.load(tower_of, dtype=jnp.dtype("float32")).params["vision_tower"]
    train_lvlm(CAPTIONER, train, mini.CAPTIONER_PAGES, tower, runs / "captioner", out)


if __name__ == "__main__":
    run_script(main, __doc__)

"""Trains the mini draft LVLM (and, first, the tower it looks through) and writes it in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from configs.models.mini import DRAFT
from configs.train import mini
from jaxspec.command import run_script
from jaxspec.data.picturebook import TWINS, test_set
from jaxspec.decoding.engine import EngineConfig, LoadedModel, Request
from jaxspec.evaluation.block_efficiency import first_question
from jaxspec.runtime import join_cluster, setup_runtime
from jaxspec.training.config import TrainConfig
from jaxspec.training.held_out import HeldOut
from train import tower
from train.lvlm import encoder, train_lvlm, unread


def held_out(target: Path, samples: int = 4) -> HeldOut:
    """The draft in the engine, on the first samples of every twin's test split, all in one bucket."""
    model = LoadedModel.load(target, jnp.dtype("float32"))
    requests = [Request(first_question(encoder(), s).prompt, 64) for name in TWINS for s in test_set(name, samples)]
    engine = EngineConfig(batch_size=16, prompt_buckets=(384,), image_buckets=(6,))
    return HeldOut(model, unread(DRAFT), tuple(requests), engine)


def main(
    train: TrainConfig = mini.DRAFT,
    tower_train: TrainConfig = mini.TOWER,
    runs: Path = Path("runs/train"),
    out: Path = Path("runs/train/draft/hf"),
    target: Path | None = None,
    cluster: str = "",
) -> None:
    """Trains tower and draft; a run that was stopped goes on where it was.

    Args:
      runs: checkpoints and metrics go to RUNS/tower and RUNS/draft.
      out: the finished model, a Hugging Face directory.
      target: decode with this model, a Hugging Face directory, every `--train.evaluate-every` steps, and log how many
        tokens a pass of it gives.
      cluster: on several hosts `auto`, or HOST:PORT,COUNT,INDEX.
    """
    join_cluster(cluster)
    setup_runtime()
    seen = tower.main(tower_train, runs / "tower")
    evaluate = None if target is None else held_out(target)
    train_lvlm(DRAFT, train, mini.DRAFT_PAGES, seen, runs / "draft", out, evaluate)


if __name__ == "__main__":
    run_script(main, __doc__)

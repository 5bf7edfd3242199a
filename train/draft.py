"""Trains the mini draft LVLM (and, first, the tower it looks through) and writes it in Hugging Face layout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax.numpy as jnp
import tyro

from configs.models.mini import DRAFT
from configs.train import mini
from jaxspec.data.loader import DialogueBatches
from jaxspec.data.picturebook import TWINS, test_set
from jaxspec.decoding.engine import EngineConfig, LoadedModel, Request
from jaxspec.evaluation.block_efficiency import first_question
from jaxspec.runtime import input_errors, join_cluster, setup_runtime
from jaxspec.training.config import TrainConfig
from jaxspec.training.held_out import HeldOut
from jaxspec.training.lvlm import train_lvlm
from train import tower
from train.export import encoder, export, image_processor


def held_out(target: Path, samples: int = 4) -> HeldOut:
    """The draft in the engine, on the first samples of every twin's test split, all in one bucket."""
    model, made = LoadedModel.load(target, jnp.dtype("float32")), encoder()
    requests = [Request(first_question(made, s).prompt, 64) for name in TWINS for s in test_set(name, samples)]
    engine = EngineConfig(batch_size=16, prompt_buckets=(384,), image_buckets=(6,))
    return HeldOut(model, LoadedModel(DRAFT, {}, made.tokenizer, image_processor()), tuple(requests), engine)


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
    setup_runtime(train.dtype)
    batches = DialogueBatches(
        encoder(), DRAFT, train.batch, train.seed, mini.DRAFT_BUCKETS, images=(2,), kinds=mini.DRAFT_KINDS
    )
    seen = tower.main(tower_train, runs / "tower")
    evaluate = None if target is None else held_out(target)
    params = train_lvlm(DRAFT, train, seen, batches, runs / "draft", evaluate)
    export(DRAFT, params, out)


if __name__ == "__main__":
    with input_errors("draft"):
        tyro.cli(main)

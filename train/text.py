"""Trains a small text model on questions and answers, and writes it in Hugging Face layout.

    python train/text.py left --data path/to/gsm8k/train.jsonl

The data is GSM8K's `train.jsonl`, or any JSONL with `question` and `answer`. All models that are trained on one file
get one tokeniser, so that they can write together.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import tyro

from configs.train.gsm8k import BUCKETS, STAGES, VOCABULARY, TextStage
from jaxspec.checkpoints import huggingface
from jaxspec.data.benchmarks import benchmark_samples
from jaxspec.data.loader import TextBatches
from jaxspec.data.prompts import PromptEncoder
from jaxspec.errors import InputError, nearest
from jaxspec.models import build, init_params
from jaxspec.runtime import input_errors
from jaxspec.training.losses import next_token_loss
from jaxspec.training.trainer import fit
from jaxspec.typing import Array, Params
from train.tokenizer import train_tokenizer


def main(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    data: Path,
    runs: Path = Path("runs/train/gsm8k"),
) -> None:
    """Trains one of the models of configs/train/gsm8k.py; a run that was stopped goes on where it was.

    Args:
      name: left, right, whole or amateur.
      data: JSONL with question and answer.
      runs: checkpoints and metrics go to RUNS/NAME, the finished model to RUNS/NAME/hf, a Hugging Face directory.
    """
    if name not in STAGES:
        raise InputError(f"model {name!r}: no such stage in configs/train/gsm8k.py; {nearest(name, tuple(STAGES))}")
    train(STAGES[name], data, runs / name)


def train(stage: TextStage, data: Path, directory: Path) -> None:
    """One model: questions and answers alike are what it learns to write."""
    turns = [sample.turns for sample in benchmark_samples("gsm8k", data)]
    encoder = PromptEncoder(train_tokenizer((text for turn in turns for text in turn[0]), VOCABULARY))
    first, step = stage.part
    rows = [tokens for tokens, _ in encoder.dialogues(turns[first::step])]
    module = build(stage.model)

    def loss_fn(params: Params, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        logits = module.apply({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["tokens"], batch["mask"])  # type: ignore[arg-type]

    batches = TextBatches(tuple(rows), stage.train.batch, stage.train.seed, BUCKETS)
    params = init_params(stage.model, jax.random.key(stage.train.seed))
    params = fit(stage.train, params, loss_fn, batches, directory)
    huggingface.save(directory / "hf", stage.model, params, tokenizer=encoder.tokenizer, dtype=jnp.dtype("bfloat16"))
    print(f"wrote {directory / 'hf'}")


if __name__ == "__main__":
    with input_errors("text"):
        tyro.cli(main)

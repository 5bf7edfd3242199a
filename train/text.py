"""Train a small text model on questions and answers, and write it in Hugging Face layout.

    python -m train.text left --data path/to/gsm8k/train.jsonl

The data is GSM8K's `train.jsonl`, or any JSONL with `question` and `answer`. All models of one file
get one tokeniser, so that they can decode collaboratively.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro

from configs.train.gsm8k import BUCKETS, STAGES, VOCABULARY, TextStage
from jaxspec.checkpoints import huggingface
from jaxspec.cli.options import run_script
from jaxspec.data.benchmarks import benchmark_samples
from jaxspec.data.prepared import mixture
from jaxspec.errors import InputError, nearest
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import init_params
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.training.conversations import ConversationBatch, ConversationBatches
from jaxspec.training.loop.batches import process_share
from jaxspec.training.loop.signatures import data_signature
from jaxspec.training.loop.trainer import fit
from jaxspec.training.losses import Loss, Sums, next_token_loss
from jaxspec.typing import Array, Params
from train.setup import begin, own_output
from train.tokenizer import train_tokenizer


def main(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    data: Path,
    runs: Path = Path("runs/train/gsm8k"),
    cluster: str = "",
    debug: bool = False,
) -> None:
    """Train one of the models of configs/train/gsm8k.py. A stopped run goes on.

    Args:
      name: Model to train: left, right, whole or amateur.
      data: JSONL with question and answer.
      runs: Folder of all models; RUNS/NAME gets checkpoints and metrics, RUNS/NAME/hf the model.
      cluster: Place of this process among several hosts: `auto`, or HOST:PORT,COUNT,INDEX.
      debug: Try the command out: two steps of as few samples as the mesh takes, into runs/debug.
    """
    if name not in STAGES:
        raise InputError(
            f"model {name!r}: not in configs/train/gsm8k.py; {nearest(name, tuple(STAGES))}"
        )
    stage = STAGES[name]
    directory, _ = begin(runs / name, None, cluster, debug)
    options = stage.train.shortened() if debug else stage.train
    train(replace(stage, train=options), data, directory)


def train(stage: TextStage, data: Path, directory: Path) -> None:
    """Train one model to write questions and answers; it goes to `directory`/hf."""
    samples = list(benchmark_samples("gsm8k", data))
    texts = (text for sample in samples for text in sample.turns[0])
    encoder = PromptEncoder(train_tokenizer(texts, VOCABULARY))
    model = LoadedModel(stage.model, {}, encoder.tokenizer, None)
    first, step = stage.part
    seed = stage.train.seed
    endless = mixture([(samples[first::step], 1.0)], seed)
    process = process_share(stage.train.make_mesh())
    batches = ConversationBatches(
        endless, encoder, model, stage.train.batch, BUCKETS, seed=seed, process=process
    )

    def every(batch: ConversationBatch) -> Array:
        return jnp.arange(batch.tokens.shape[1]) < batch.rows.length[:, None]

    def share(params: Params, batch: ConversationBatch, count: Array) -> tuple[Array, Sums]:
        logits = model.model.score(params, batch.rows, None)
        return next_token_loss(logits, batch.tokens, every(batch), count)

    loss = Loss(share, lambda batch: every(batch)[:, 1:].sum(dtype=jnp.float32))
    start = init_params(stage.model, jax.random.key(seed))
    inputs = {
        "model": asdict(stage.model), "part": stage.part, "buckets": BUCKETS,
        "data": (str(data), len(samples), data_signature(samples)),
    }  # fmt: skip
    params = fit(stage.train, start, loss, batches, directory, inputs=inputs)
    if jax.process_index() == 0:
        bfloat16 = jnp.dtype("bfloat16")
        huggingface.save(
            directory / "hf",
            stage.model,
            params,
            huggingface.SaveOptions(dtype=bfloat16, overwrite=True),
            tokenizer=encoder.tokenizer,
            write_more=own_output(directory / "hf", directory),
        )
        print(f"wrote {directory / 'hf'}")


if __name__ == "__main__":
    run_script(main, __doc__)

"""Trains the mini KV head on picturebook dialogues by Target-Draft attention, and writes its directory.

    python train/kv_head.py
    python train/kv_head.py --preset ablation --head.pooling drop --runs runs/drop --out runs/drop/kv_head/hf
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import tyro

from configs.train.kv_head import PRESETS
from jaxspec.checkpoints.kv_head import save_kv_head
from jaxspec.config import KVHeadConfig, LlavaConfig
from jaxspec.config.kv_head import Pooling
from jaxspec.data.loader import DialogueBatches
from jaxspec.decoding.loading import LoadedModel
from jaxspec.runtime import input_errors, join_cluster, setup_runtime
from jaxspec.training.kv_head import train_kv_head
from train.export import encoder


@dataclass(frozen=True)
class Ablation:
    """What may be changed of the head; see `KVHeadConfig`."""

    pooling: Pooling = "linear"
    slot_bias: bool = True
    reads_text: bool = True


def main(
    preset: Literal["mini", "ablation", "debug"] = "mini",
    head: Ablation = Ablation(),
    runs: Path = Path("runs/train"),
    out: Path = Path("runs/train/kv_head/hf"),
    cluster: str = "",
) -> None:
    """Trains the head; a run that was stopped goes on where it was.

    Args:
      runs: checkpoints and metrics go to RUNS/kv_head.
      out: the finished head, a directory of this library's own format.
      cluster: on several hosts `auto`, or HOST:PORT,COUNT,INDEX.
    """
    join_cluster(cluster)
    plan = PRESETS[preset]
    setup_runtime(plan.train.dtype)
    target = LoadedModel.load(plan.target, jnp.dtype("float32"))
    assert isinstance(target.config, LlavaConfig)
    options = {**plan.head, "target_name": Path(plan.target).name, **vars(head)}
    config = KVHeadConfig.of_target(target.config, **options)
    batches = DialogueBatches(
        encoder(), target.config, plan.train.batch, plan.train.seed, plan.buckets, plan.images, plan.kinds
    )
    params = train_kv_head(
        config, target.model, target.params, plan.train, plan.anchoring, batches, runs / "kv_head"
    )
    if jax.process_index() == 0:
        save_kv_head(out, config, params)
        print(f"wrote {out}")


if __name__ == "__main__":
    with input_errors("kv_head"):
        tyro.cli(main)

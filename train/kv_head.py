"""Trains a KV head by Target-Draft attention and writes its directory.

    python -m train.kv_head
    python -m train.kv_head --head.pooling drop --runs runs/drop
    python -m train.kv_head --recipe llava15_7b --data text=/data/chats llava_v1_5_mix665k=/data/mix
    python -m train.kv_head --recipe mini_answers --loss ce     # on what the target answers: train.distill_data
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax

from configs.train.kv_head import RECIPES
from jaxspec.checkpoints.directories import check_output
from jaxspec.checkpoints.kv_head import save_kv_head
from jaxspec.command import run_script
from jaxspec.config.kv_head import Feature, Pooling
from jaxspec.runtime import join_cluster, setup_runtime
from jaxspec.training.kv_head import Loss, train_kv_head
from jaxspec.training.recipes import parse_data


@dataclass(frozen=True)
class Ablation:
    """What may be changed of the recipe's head; see `KVHeadConfig`."""

    pooling: Pooling = "linear"
    """How an image becomes slots: by learned matrices (linear, the paper's), learned queries (attention) or averages
    (avgpool), not at all (none), or it is left out (drop)."""
    reads_text: bool = True
    """Without, the target's keys and values of text are left out."""
    feature: Feature = "none"
    """What is read of a token besides its embedding: nothing, as in the paper, or the target's last hidden state."""


def main(
    recipe: Literal[
        "mini", "mini_answers", "debug", "llava15_7b", "llava15_7b_answers", "llava15_7b_paper", "llava15_13b"
    ] = "mini",
    head: Ablation = Ablation(),
    target: str | None = None,
    steps: int | None = None,
    loss: Loss | None = None,
    data: tuple[str, ...] = (),
    buckets: tuple[int, ...] | None = None,
    runs: Path = Path("runs/train"),
    out: Path | None = None,
    cluster: str = "",
) -> None:
    """Trains the head; a run that was stopped goes on where it was.

    Args:
      recipe: one of configs/train/kv_head.py.
      target: directory or hub id of the target; by default the recipe's.
      steps: of every stage, in place of the recipe's.
      loss: likewise; `kl` to the target's distributions, or `ce`, cross entropy of the answers.
      data: PATH of a prepared data set to train on instead of the recipe's; several are mixed alike. Or NAME=PATH,
        where one of the recipe's own lies, if not in runs/data.
      buckets: of row lengths in tokens; longer rows are cut at the last; by default the recipe's.
      runs: checkpoints and metrics go to RUNS/STAGE.
      out: the finished head, a directory of this library's own format; by default RUNS/kv_head/hf.
      cluster: on several hosts `auto`, or HOST:PORT,COUNT,INDEX.
    """
    join_cluster(cluster)
    plan = RECIPES[recipe]
    changed = {"target": target, "buckets": buckets}
    plan = replace(plan, **{key: value for key, value in changed.items() if value is not None})
    setup_runtime()
    options = {**plan.head, **vars(head)}
    stages, places = parse_data(data, plan.stages)
    anchoring = plan.anchoring if loss is None else replace(plan.anchoring, loss=loss)
    if steps is not None:
        stages = tuple(replace(stage, train=replace(stage.train, steps=steps)) for stage in stages)
    out = out or runs / "kv_head" / "hf"
    check_output(out, *(runs / stage.name for stage in stages))
    config, params = train_kv_head(replace(plan, head=options, stages=stages, anchoring=anchoring), runs, places)
    if jax.process_index() == 0:
        save_kv_head(out, config, params, overwrite=True)
        print(f"wrote {out}")


if __name__ == "__main__":
    run_script(main, __doc__)

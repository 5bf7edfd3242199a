"""Prepare a training script's run."""

from __future__ import annotations

from pathlib import Path

from jaxspec.checkpoints.directories import check_output
from jaxspec.cluster import join_cluster
from jaxspec.files import forget_trial, trial_of
from jaxspec.runtime import setup_runtime
from jaxspec.training.config import TrainConfig


def begin(
    train: TrainConfig, runs: Path, out: Path | None, cluster: str, debug: bool
) -> tuple[TrainConfig, Path, Path]:
    """Join the cluster, check that the model can be written, and return `train`, `runs` and `out`.

    Args:
      out: Directory of the model; by default RUNS/hf.
      debug: Return a trial's options and places, and remove an earlier trial's output.
    """
    out = out or runs / "hf"
    if debug:
        train, runs, out = train.shortened(), trial_of(runs), trial_of(out)
        forget_trial(runs)  # before the hosts wait for each other
        forget_trial(out)
    join_cluster(cluster)
    setup_runtime()
    check_output(out, runs)
    return train, runs, out

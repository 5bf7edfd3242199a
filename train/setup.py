"""Prepare a training script's run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxspec.checkpoints.directories import check_output
from jaxspec.cluster import join_cluster
from jaxspec.files import forget_trial, trial_of
from jaxspec.runtime import setup_runtime


def begin(
    runs: Path, out: Path | None, cluster: str, debug: bool, stages: Sequence[str] = ("",)
) -> tuple[Path, Path]:
    """Join the cluster, check that all can be written, and return `runs` and `out`.

    Args:
      out: Directory of the model; by default RUNS/hf.
      debug: Return a trial's places, and remove an earlier trial's output.
      stages: Folders of checkpoints in `runs`; by default `runs` itself.
    """
    out = out or runs / "hf"
    if debug:
        runs, out = trial_of(runs), trial_of(out)
        forget_trial(runs)  # before the hosts wait for each other
        forget_trial(out)
    join_cluster(cluster)
    setup_runtime()
    check_output(out, *(runs / stage for stage in stages))
    return runs, out

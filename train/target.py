"""Trains the mini target LVLM (and, first, the tower it looks through) and writes it in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

from configs.models.mini import TARGET
from configs.train import mini
from jaxspec.command import run_script
from jaxspec.runtime import join_cluster, setup_runtime
from jaxspec.training.config import TrainConfig
from train import tower
from train.lvlm import train_lvlm


def main(
    train: TrainConfig = mini.TARGET,
    tower_train: TrainConfig = mini.TOWER,
    runs: Path = Path("runs/train"),
    out: Path = Path("runs/train/target/hf"),
    cluster: str = "",
) -> None:
    """Trains tower and target; a run that was stopped goes on where it was.

    Args:
      runs: checkpoints and metrics go to RUNS/tower and RUNS/target.
      out: the finished model, a Hugging Face directory.
      cluster: on several hosts `auto`, or HOST:PORT,COUNT,INDEX.
    """
    join_cluster(cluster)
    setup_runtime()
    seen = tower.main(tower_train, runs / "tower")
    train_lvlm(TARGET, train, mini.TARGET_PAGES, seen, runs / "target", out)


if __name__ == "__main__":
    run_script(main, __doc__)

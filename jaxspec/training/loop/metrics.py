"""Write a JSON line for each logged step, and on request TensorBoard's and W&B's records."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from etils import epath

from jaxspec.cluster import on_first
from jaxspec.errors import InputError, needing
from jaxspec.files import logged, write_text, writing
from jaxspec.training.config import TrainConfig

AGAIN = "the same command goes on"


class MetricsLog:
    """Write the first process's `metrics.jsonl`, and other logs on request; a context manager.

    A resumed run first removes the lines that the interrupted one wrote beyond step `start`. Where
    the first process cannot begin, all processes raise.

    Attributes:
      evaluated: Whether the log has an evaluation of step `start`; the same in all processes.
    """

    def __init__(self, directory: Path, config: TrainConfig, start: int) -> None:
        self._path = directory / "metrics.jsonl"
        self._file = self._board = self._wandb = None
        self.evaluated = on_first(lambda: self._begin(directory, config, start))

    def _begin(self, directory: Path, config: TrainConfig, start: int) -> bool:
        with writing(self._path):
            earlier = [line for line in logged(self._path) if line["step"] <= start]
            write_text(self._path, "".join(f"{json.dumps(line)}\n" for line in earlier))
            self._file = self._path.open("a", encoding="utf-8")
        if config.tensorboard:
            self._board = _tensorboard(directory / "tensorboard", start)
        if config.wandb:
            self._wandb = _wandb(directory, config, start)
        # Every line of a training step has a rate.
        return any(line["step"] == start and "learning_rate" not in line for line in earlier)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Closing repeats the write that failed, whose error was raised already.
        with suppress(*[InputError] * (kind is not None)), writing(self._path, AGAIN):
            for log in (self._file, self._board):
                if log is not None:
                    log.close()
            if self._wandb is not None:
                self._wandb.finish()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's metrics; `metrics.jsonl` is on disk when this returns."""
        if self._file is not None:
            with writing(self._path, AGAIN):
                self._file.write(json.dumps({**values, "step": step}) + "\n")
                self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)


def last_step(path: Path) -> int:
    """Return the last step in a file of metrics; 0 without one."""
    lines = logged(path)
    return lines[-1]["step"] if lines else 0


def _tensorboard(directory: Path, start: int) -> Any:
    with needing("tensorboard", "tensorboard"):
        from tensorboardX import SummaryWriter
    return SummaryWriter(str(directory), purge_step=start + 1)


def _wandb(directory: Path, config: TrainConfig, start: int) -> Any:
    """Begin or resume the run of a directory on Weights & Biases.

    The run's id lies with its checkpoints, which other machines may resume from. A run of an older
    release has none, and its id was its path.
    """
    with needing("wandb", "wandb"):
        import wandb  # pyright: ignore[reportMissingImports]
    file = epath.Path(config.checkpoints or directory / "checkpoints") / "wandb_id"
    with writing(str(file)):
        name = file.read_text() if file.exists() else ""
        if not name:
            path = directory.absolute().as_posix().strip("/").replace("/", "-")
            name = path[-64:] if start else uuid.uuid4().hex
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(name)
    return wandb.init(
        project=config.wandb,
        name=directory.name,
        id=name,
        resume="allow",
        dir=str(directory),
        config=vars(config),
    )

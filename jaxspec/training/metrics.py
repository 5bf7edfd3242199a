"""What a run reports: one JSON line a measured step always; TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jaxspec.errors import InputError
from jaxspec.files import write_text, writing
from jaxspec.training.config import TrainConfig

AGAIN = "the same command goes on"
Writer = Callable[[int, Mapping[str, float]], None]


class MetricsLog:
    """Writes `metrics.jsonl` and what else is asked for, in the first process only; a context manager."""

    def __init__(self, directory: Path, config: TrainConfig, start: int) -> None:
        """Goes on from step `start`: what an interrupted run wrote beyond it is taken back."""
        self._directory = directory
        self._writers: list[tuple[Writer, Callable[[], None]]] = []
        """Each with what closes it."""
        if jax.process_index():
            return
        self._writers.append(_lines(directory / "metrics.jsonl", start))
        if config.tensorboard:
            self._writers.append(_tensorboard(directory / "tensorboard", start))
        if config.wandb:
            self._writers.append(_wandb(directory, config))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for _write, close in self._writers:
            try:
                with writing(self._directory, AGAIN):
                    close()
            except InputError:
                if kind is None:  # or it tries again what could not be written, and that was told
                    raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line of a step's metrics, on disk when this returns."""
        for write, _ in self._writers:
            write(step, values)


def _lines(path: Path, start: int) -> tuple[Writer, Callable[[], None]]:
    with writing(path):
        write_text(path, "".join(f"{line}\n" for step, line in _read(path) if step <= start))
        file = path.open("a", encoding="utf-8")

    def write(step: int, values: Mapping[str, float]) -> None:
        with writing(path, AGAIN):
            file.write(json.dumps({**values, "step": step}) + "\n")
            file.flush()

    return write, file.close


def _read(path: Path) -> list[tuple[float, str]]:
    """Return the lines of metrics, with their steps. Where a file holds others too it is kept, under another name."""
    if not path.exists():
        return []
    lines = [
        (_step(line), line)
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")
    ]
    if lines[-1][0] is None:
        lines.pop()  # nothing, or the half that a kill left
    odd = [number for number, (step, _) in enumerate(lines, 1) if step is None]
    if odd:
        names = (f"metrics.damaged{number or ''}.jsonl" for number in itertools.count())
        aside = next(name for name in names if not (path.parent / name).exists())
        path.replace(path.with_name(aside))
        print(
            f"{path}: line {odd[0]} is none of metrics ({len(odd)} are not); it is {aside} now",
            file=sys.stderr,
        )
    return [(step, line) for step, line in lines if step is not None]


def _step(line: str) -> float | None:
    """Return the step of a line of metrics; None where it is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None


def _tensorboard(directory: Path, start: int) -> tuple[Writer, Callable[[], None]]:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InputError("tensorboard: not installed; pip install -e '.[tensorboard]'") from None
    writer = SummaryWriter(str(directory), purge_step=start + 1)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(directory: Path, config: TrainConfig) -> tuple[Writer, Callable[[], None]]:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError("wandb: not installed; pip install -e '.[wandb]'") from None
    name = directory.absolute().as_posix().strip("/").replace("/", "-")
    run = wandb.init(
        project=config.wandb,
        name=directory.name,
        id=name[-64:],
        resume="allow",
        dir=str(directory),
        config=vars(config),
    )
    return lambda step, values: run.log(dict(values), step=step), run.finish

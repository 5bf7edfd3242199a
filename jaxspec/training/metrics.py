"""What a run reports: one JSON line a measured step always; TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec.errors import InputError
from jaxspec.files import write_text, writing
from jaxspec.training.config import TrainConfig


class MetricsLog:
    """Writes `metrics.jsonl` and what else is asked for, in the first process only; a context manager."""

    def __init__(self, directory: Path, config: TrainConfig, start: int) -> None:
        """Goes on from step `start`: what an interrupted run wrote beyond it is taken back."""
        self._directory = directory
        self._file: Any = None
        self._others: list[Any] = []
        if jax.process_index():
            return
        path = directory / "metrics.jsonl"
        with writing(path):
            kept = [line for step, line in _lines(path) if step <= start]
            write_text(path, "".join(f"{line}\n" for line in kept))
            self._file = path.open("a", encoding="utf-8")
        if config.tensorboard:
            self._others.append(_TensorBoard(directory / "tensorboard", start))
        if config.wandb:
            self._others.append(_Wandb(directory, config))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for part in (self._file, *self._others):
            if part is None:
                continue
            try:
                with writing(self._directory, "the same command goes on"):
                    part.close()
            except InputError:
                if kind is None:  # or it tries again what could not be written, and that was told
                    raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line of a step's metrics, on disk when this returns."""
        if self._file is None:
            return
        with writing(self._file.name, "the same command goes on"):
            self._file.write(json.dumps({**values, "step": step}) + "\n")
            self._file.flush()
        for part in self._others:
            part.write(step, values)


def _lines(path: Path) -> list[tuple[float, str]]:
    """The lines of metrics, with their steps. Where a file holds others too it is kept, under another name."""
    if not path.exists():
        return []
    lines = [(_step(line), line) for line in path.read_text(encoding="utf-8", errors="replace").split("\n")]
    if lines[-1][0] is None:
        lines.pop()  # nothing, or the half that a kill left
    odd = [number for number, (step, _) in enumerate(lines, 1) if step is None]
    if odd:
        names = (f"metrics.damaged{number or ''}.jsonl" for number in itertools.count())
        aside = next(name for name in names if not (path.parent / name).exists())
        path.replace(path.with_name(aside))
        print(f"{path}: line {odd[0]} is none of metrics ({len(odd)} are not); it is {aside} now", file=sys.stderr)
    return [(step, line) for step, line in lines if step is not None]


def _step(line: str) -> float | None:
    """The step of a line of metrics; None where it is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None


class _TensorBoard:
    def __init__(self, directory: Path, start: int) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise InputError("tensorboard: not installed; pip install 'jaxspec[tensorboard]'") from None
        self._writer = SummaryWriter(str(directory), purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, directory: Path, config: TrainConfig) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise InputError("wandb: not installed; pip install 'jaxspec[wandb]'") from None
        name = directory.absolute().as_posix().strip("/").replace("/", "-")
        self._run = wandb.init(
            project=config.wandb, name=directory.name, id=name[-64:], resume="allow", dir=str(directory),
            config=vars(config),
        )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()

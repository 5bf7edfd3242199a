"""Prepare a training script's run, and guard the model that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxspec.checkpoints.directories import check_destination, weight_files
from jaxspec.cluster import join_cluster
from jaxspec.errors import InputError
from jaxspec.files import forget_trial, trial_of, write_text
from jaxspec.runtime import setup_runtime
from jaxspec.training.loop.signatures import file_signature

WRITTEN = "written.json"
"""File of a run with the fingerprints of the models that it has written."""


def begin(
    runs: Path, out: Path | None, cluster: str, debug: bool, parts: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Join the cluster, check that all can be written, and return `runs` and `out`.

    Args:
      out: Directory of the model; by default RUNS/hf.
      debug: Return a trial's paths, and remove an earlier trial's output.
      parts: Names of the folders in `out` that hold a model each; () for a model in `out` itself.
    """
    out = out or runs / "hf"
    if debug:
        runs, out = trial_of(runs), trial_of(out)
        forget_trial(runs)  # before the hosts wait for each other
        forget_trial(out)
    join_cluster(cluster)
    setup_runtime()
    for model in [out / part for part in parts] or [out]:
        check_output(model, runs)
    return runs, out


def check_output(out: Path, runs: Path) -> None:
    """Raise InputError where `out` holds a model that the run in `runs` has not written."""
    check_destination(out, overwrite=True)
    if (out / "config.json").exists() and _signature(out) not in _written(runs):
        raise InputError(f"--out {out}: holds another run's model; give another path, or remove it")


def own_output(out: Path, runs: Path) -> Callable[[Path], None]:
    """Return the `write_more` of a run's model: it checks `out` again, and notes the new model."""

    def note(model: Path) -> None:
        check_output(out, runs)
        # Before the model is renamed to `out`, so that a kill leaves no model without its note.
        write_text(runs / WRITTEN, json.dumps([*_written(runs), _signature(model)]) + "\n")

    return note


def _written(runs: Path) -> list[str]:
    file = runs / WRITTEN
    return json.loads(file.read_text()) if file.exists() else []


def _signature(model: Path) -> str:
    return "-".join(map(file_signature, weight_files(model)))

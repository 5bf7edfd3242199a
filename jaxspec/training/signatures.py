"""What decides a run: signatures of its data and models, and a run that goes on only with those that it began with.

Signatures of data and checkpoints are of samples and bytes here and there, not of all: terabytes take no time, and
what was made anew (shuffled, cut, written by another model, trained further) differs everywhere. One row that was
mended may go unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.directories import weight_files
from jaxspec.checkpoints.locating import SMALL, locate
from jaxspec.data.images import StoredImage, image_hash, to_rgb
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from jaxspec.files import write_text
from jaxspec.training.config import RUNTIME, TrainConfig
from jaxspec.training.step import make_schedule

SAMPLES = 8
BLOCKS, BLOCK = 64, 4096
"""So many pieces of each file of weights, of so many bytes."""
READ = (".json", ".model", ".txt", ".jinja")
"""Files besides weights that decide what a model reads and says; they are taken whole."""


def data_signature(source: Sequence[Sample]) -> str:
    """Sum up how many samples there are, the first, the last, and some between."""
    found, last = hashlib.sha256(), len(source) - 1
    for place in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
        sample = source[place]
        found.update(repr((last, sample.id, sample.turns)).encode())
        for image in sample.images:
            content = (
                image.content
                if isinstance(image, StoredImage)
                else image_hash(to_rgb(image)).encode()
            )
            found.update(hashlib.sha256(content).digest())
    return f"fingerprint {found.hexdigest()[:12]}"


def model_signature(name: str | Path, weights: Sequence[Path] | None = None) -> str:
    """Sum up a checkpoint: its name, the sizes of its weights and pieces of them, its configuration and tokeniser.

    Args:
      weights: files of weights that count; None: all, which are fetched from the hub if need be.
    """
    found = hashlib.sha256()
    path = locate(name, wanted=None if weights is None else SMALL)
    of_weights = weight_files(path) if weights is None else weights
    for file in sorted(path.iterdir()):
        holds_weights = file in of_weights
        if not holds_weights and (file.suffix not in READ or file.name == "generation_config.json"):
            continue
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            if not holds_weights:
                found.update(content.read())
                continue
            for i in range(BLOCKS):
                content.seek(max(size - BLOCK, 0) * i // (BLOCKS - 1))
                found.update(content.read(BLOCK))
    return f"{name}, fingerprint {found.hexdigest()[:12]}"


def run_signature(config: TrainConfig, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return all that decides a run, as JSON gives it back: the configuration, and what else `fit` is told."""
    return json.loads(json.dumps(asdict(config) | inputs))


def claim(
    directory: Path, config: TrainConfig, run: dict[str, Any], saved: tuple[int, Any] | None
) -> None:
    """Refuse to go on with what another run saved; else write `train_config.json`, for people.

    The number of steps may be another where the steps that are done would have been the same.

    Args:
      saved: the newest step that is saved, and the signature of the run that saved it.
    """
    if saved is not None:
        done, old = saved[0], saved[1] or run
        theirs, mine = (
            dict[str, Any](flatten_dict(_lasting(values), sep=".")) for values in (old, run)
        )
        if done <= config.steps and _same_rates(config, old["steps"], done):
            theirs["steps"] = config.steps
        for name in sorted(theirs.keys() | mine.keys()):
            before, now = theirs.get(name), mine.get(name)
            if before != now:
                why = ""
                if name == "steps" and old["steps"] < config.steps:
                    why = ", on which its learning rates depend (behind the warm-up those of final_rate 1 do not)"
                raise InputError(
                    f"{directory}: holds a run with {name} {before!r}, and now it is {now!r}{why}; "
                    "go on with that, or train in another directory (--runs)"
                )
    if jax.process_index() == 0:
        write_text(directory / "train_config.json", json.dumps(run, indent=1) + "\n")


def _lasting(values: dict[str, Any]) -> dict[str, Any]:
    """Return what may not differ when a run goes on."""
    return {name: value for name, value in values.items() if name not in RUNTIME}


def _same_rates(config: TrainConfig, steps: int, done: int) -> bool:
    """Return whether a run of so many steps has had the same learning rate at each of the first `done` of them."""
    at = np.arange(done)
    return np.array_equal(
        make_schedule(config)(at), make_schedule(replace(config, steps=steps))(at)
    )

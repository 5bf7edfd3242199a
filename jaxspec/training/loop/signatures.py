"""Sign a run's data and models, so that it goes on only with those that it began with.

A signature covers some samples, or some bytes of each file, so that terabytes take no time. Data
that was shuffled, cut or answered anew and weights that were trained further differ there. A single
changed row may go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.directories import READ, read_json, weight_files
from jaxspec.checkpoints.locating import SMALL, locate
from jaxspec.cluster import in_all, on_first
from jaxspec.data.forms import SUFFIXES as IMAGES
from jaxspec.data.images import StoredImage, image_hash, to_rgb
from jaxspec.data.rows import SUFFIXES as ROWS
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from jaxspec.files import write_text
from jaxspec.training.config import RUNTIME, TrainConfig
from jaxspec.training.loop.metrics import last_step
from jaxspec.training.loop.step import make_schedule

SAMPLES = 8
BLOCKS, BLOCK = 64, 4096
"""Pieces of each file of weights, and the bytes of each."""

DECIDING = (*READ, ".safetensors", ".bin", *ROWS)
"""Ends of the names of the files in a folder that a fingerprint covers, except images."""
OF_PROCESS = ("checkpoints", "keep", "log_every", "profile", "tensorboard", "wandb")
"""Options that may differ between the processes of a run."""
WHOLE = 64 << 20
"""Bytes of the largest file that a fingerprint reads whole."""


def data_signature(source: Sequence[Sample]) -> str:
    """Return a fingerprint of the number of samples and of some samples."""
    digest, last = hashlib.sha256(), len(source) - 1
    for index in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
        sample = source[index]
        texts = last, sample.id, sample.turns, *filter(None, [sample.system])
        digest.update(repr(texts).encode())
        for image in sample.images:
            stored = isinstance(image, StoredImage)
            content = image.content if stored else image_hash(to_rgb(image)).encode()
            digest.update(hashlib.sha256(content).digest())
    return f"fingerprint {digest.hexdigest()[:12]}"


def model_signature(name: str | Path, weights: Sequence[Path] | None = None) -> str:
    """Return a checkpoint's name, and a fingerprint of its configuration, tokeniser and weights.

    Args:
      weights: Files of weights that count. None counts all, and fetches them from the hub.
    """
    digest = hashlib.sha256()
    path = locate(name, files=None if weights is None else SMALL)
    of_weights = weight_files(path) if weights is None else weights
    for file in sorted(path.iterdir()):
        holds_weights = file in of_weights
        if not holds_weights and (file.suffix not in READ or file.name == "generation_config.json"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        for piece in _sampled_blocks(file) if holds_weights else [file.read_bytes()]:
            digest.update(piece)
    return f"{name}, fingerprint {digest.hexdigest()[:12]}"


def content_of(value: Any) -> Any:
    """Return a signature of models or data without their names, which change with their places.

    "here/target, fingerprint 1" becomes "1", and ["here/mix", 0.5, 20, "fingerprint 2"] the list
    without its first entry. Other values stay as they are.
    """
    if isinstance(value, str):
        return value.rpartition(", fingerprint ")[2]
    if isinstance(value, list):
        is_named = str(value[-1:]).startswith("['fingerprint ")
        return list(map(content_of, value[1:] if is_named else value))
    return value


def check_unchanged(old: Mapping[str, Any], new: Mapping[str, Any], what: str, mend: str) -> None:
    """Raise InputError for the first input, by name, whose content is another one now."""
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if content_of(before) != content_of(now):
            raise InputError(
                f"{what} {name} {before!r}, but now it is {now!r}; go on with that, or {mend}"
            )


def file_signature(path: Path) -> str:
    """Return a fingerprint of a file, or of the models, rows and images in a folder.

    Of images, and of files over 64 MiB, the size counts, and of the latter some bytes.
    """
    content = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        images = file.suffix.lower() in IMAGES
        if not file.is_file() or (file != path and not (images or file.name.endswith(DECIDING))):
            continue
        size = file.stat().st_size
        content.update(f"{file.relative_to(path)} {size}".encode())
        if not images and size <= WHOLE:
            content.update(file.read_bytes())
        elif not images:
            for block in _sampled_blocks(file):
                content.update(block)
    return content.hexdigest()[:12]


def _sampled_blocks(file: Path) -> Iterator[bytes]:
    """Yield BLOCKS pieces of a file, spread evenly from its beginning to its end."""
    last = max(file.stat().st_size - BLOCK, 0)
    with file.open("rb") as content:
        for i in range(BLOCKS):
            content.seek(last * i // (BLOCKS - 1))
            yield content.read(BLOCK)


def run_signature(config: TrainConfig, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration and the other inputs of a run, as read back from JSON."""
    return json.loads(json.dumps(asdict(config) | inputs))


def claim(
    directory: Path, config: TrainConfig, run: dict[str, Any], saved: tuple[int, Any] | None
) -> None:
    """Raise InputError if another run saved a step here; else write `train_config.json`.

    The number of steps may differ if the saved steps had the same learning rates. A run that must
    have saved a step by its metrics, and has none, is not begun anew. Processes that run with other
    options, or on other data, are refused: they would wait for each other, or learn other things.

    Args:
      saved: The newest saved step, and the signature of the run that saved it.
    """
    first, *others = map(_values_of_all, in_all(lambda: run))
    for number, values in enumerate(others, 1):
        for name in sorted(first.keys() | values.keys()):
            expected, actual = first.get(name), values.get(name)
            if content_of(expected) != content_of(actual):
                raise InputError(
                    f"process {number}: {name} {actual!r:.100}, but process 0 has "
                    f"{expected!r:.100}; give all processes the same options and data"
                )
    if saved is not None:
        done, old = saved[0], saved[1] or run
        old_run, new_run = _fixed_values(old), _fixed_values(run)
        if done <= config.steps and _same_rates(config, old["steps"], done):
            old_run["steps"] = config.steps
        what, mend = f"{directory}: holds a run with", "train in another directory (--runs)"
        check_unchanged(old_run, new_run, what, mend)
    on_first(lambda: _write_config(directory, run, lost=saved is None))


def _write_config(directory: Path, run: dict[str, Any], lost: bool) -> None:
    """Write `train_config.json`; raise InputError where a run lost all of its checkpoints."""
    file = directory / "train_config.json"
    if lost and file.is_file():
        # A save ends before the next one begins, so the first is whole after the second.
        before, done = read_json(file), last_step(directory / "metrics.jsonl")
        if done > 2 * before.get("save_every", done):
            near = directory / "checkpoints"
            raise InputError(
                f"{run['checkpoints'] or near}: no checkpoint, but the run of {directory} saved in "
                f"{before.get('checkpoints') or near} and reached step {done}; give that folder, "
                "or train in another directory (--runs)"
            )
    write_text(file, json.dumps(run, indent=1) + "\n")


def _values_of_all(run: dict[str, Any]) -> dict[str, Any]:
    """Return the values that all processes must have, by their dotted names.

    Models are left out: the hub's cache may hold files that are not read.
    """
    flat: Any = flatten_dict({k: v for k, v in run.items() if k not in OF_PROCESS}, sep=".")
    return {k: v for k, v in flat.items() if not (isinstance(v, str) and content_of(v) != v)}


def _fixed_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that may not differ when a run goes on, by their dotted names.

    A run of an older release lacks newer options, and had their defaults.
    """
    defaults = vars(TrainConfig(steps=1, batch=1))
    newer = "schedule", "optimizer", "ema", "packing"
    values = {"plain": False} | {name: defaults[name] for name in newer} | values
    lasting = {name: value for name, value in values.items() if name not in RUNTIME}
    flat: Any = flatten_dict(lasting, sep=".")
    return dict(flat)


def _same_rates(config: TrainConfig, steps: int, done: int) -> bool:
    """Return whether a run of `steps` steps had the same rates in its first `done` steps."""
    at = np.arange(done)
    return np.array_equal(
        make_schedule(config)(at), make_schedule(replace(config, steps=steps, profile=""))(at)
    )

"""Fingerprints of data and models: by them a run that goes on knows those that it began with from others so called.

They are of samples and bytes here and there, not of all: terabytes are told apart in no time, and what was made anew
(shuffled, cut, written by another model, trained further) differs everywhere. One row that was mended may go unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoints.directories import locate
from jaxspec.data.images import StoredImage, image_hash, to_rgb
from jaxspec.data.samples import Sample
from jaxspec.typing import Params

SAMPLES = 8
BLOCKS, BLOCK = 64, 4096
"""So many pieces of each file of weights, of so many bytes."""
READ = (".json", ".model", ".txt", ".jinja")
"""Files besides weights that decide what a model reads and says; they are taken whole."""


def data_fingerprint(source: Sequence[Sample]) -> str:
    """Sums up how many samples there are, the first, the last, and some between."""
    found, last = hashlib.sha256(), len(source) - 1
    for place in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
        sample = source[place]
        found.update(repr((last, sample.id, sample.turns)).encode())
        for image in sample.images:
            content = image.content if isinstance(image, StoredImage) else image_hash(to_rgb(image)).encode()
            found.update(hashlib.sha256(content).digest())
    return _told(found)


def model_fingerprint(name: str | Path) -> str:
    """Sums up a checkpoint: its name, the sizes of its weights and pieces of them, its configuration and tokeniser."""
    found = hashlib.sha256()
    for file in sorted(locate(name).iterdir()):
        weights = file.suffix == ".safetensors"
        if not weights and (file.suffix not in READ or file.name == "generation_config.json"):
            continue
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            if not weights:
                found.update(content.read())
                continue
            for i in range(BLOCKS):
                content.seek(max(size - BLOCK, 0) * i // (BLOCKS - 1))
                found.update(content.read(BLOCK))
    return f"{name}, {_told(found)}"


def params_fingerprint(params: Params) -> str:
    """Sums up all of these parameters."""
    return _told(hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))))


def _told(found: Any) -> str:
    return f"fingerprint {found.hexdigest()[:12]}"

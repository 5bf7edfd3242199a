"""Upload an export to the hub: one commit onto a revision that nobody has changed.

`huggingface_hub` uploads the files before the commit, and the hub keeps those that arrived, so a
push that was cut off goes on where it stopped. jaxspec's cache has the revision that this
machine pushed last: a repository with another one is somebody's newer work, and is not touched, or
on request (`Repository.onto`) keeps its card.
"""

from __future__ import annotations

import json
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.directories import PARTS, read_json
from jaxspec.checkpoints.locating import REPOSITORY
from jaxspec.errors import InputError, first_line
from jaxspec.files import write_text
from jaxspec.publishing.model_card import Terms
from jaxspec.runtime import cache_directory

CARD = "README.md"


@dataclass(frozen=True)
class Repository:
    """Name a repository of models on the hub.

    Fields:
      name: Its id, owner/name.
      public: Whether everybody may see it; by default it is created private.
      onto: Its newest revision, if somebody else made that; or the first characters of it.
    """

    name: str
    public: bool = False
    onto: str | None = None

    def __post_init__(self) -> None:
        if not REPOSITORY.fullmatch(self.name):
            raise InputError(f"push: {self.name!r}; give the repository's id, owner/name")

    @property
    def folder(self) -> Path:
        """Return the directory of jaxspec's cache in which an export waits for its upload."""
        return cache_directory() / "push" / self.name


@dataclass(frozen=True)
class Pushed:
    """Hold the result of a push."""

    url: str
    revision: str
    private: bool
    keeps_card: bool = False
    """Whether the repository's README.md is somebody else's, and stays."""

    def __str__(self) -> str:
        kind = "private" if self.private else "public"
        note = "; its README.md, which somebody edited, stays" * self.keeps_card
        return f"pushed to {self.url} ({kind}), revision {self.revision[:8]}{note}"


def check_terms(source: Path, terms: Terms) -> None:
    """Raise InputError unless a card's licence and base model are known."""
    if not terms.licence:
        raise InputError(
            f"push: {source} names no licence; look it up, and give it as --licence apache-2.0"
        )
    if not terms.base_model:
        raise InputError(
            f"push: the hub's id of the model that {source} was made from is unknown; give it as "
            "--base-model owner/name"
        )


def push(folder: Path, repository: Repository) -> Pushed:
    """Upload a directory's checkpoint to its repository on the hub, which is created if need be.

    Files of an earlier push that the checkpoint lacks, such as other shards, are removed there.
    Other files of the directory stay here. A directory in jaxspec's cache is removed afterwards.

    Raises InputError where the repository holds revisions that this machine did not push, is public
    although `repository` is not, or cannot be reached; then the same call goes on.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api, name = HfApi(), repository.name
    with _hub_errors(name), _progress_on_terminals():
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:
            api.create_repo(name, private=not repository.public, exist_ok=True)
            info = api.model_info(name)
        if not (info.private or repository.public):
            raise InputError(f"push: {name} is public; give --public, or another name")
        files = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
        newest = str(info.sha)
        is_own = not files or _is_ours(api, name, info.sha)
        if not (is_own or (repository.onto and newest.startswith(repository.onto))):
            raise InputError(
                f"push: {name} holds revision {newest[:8]}, which this machine did not push; read "
                f"it, then give --onto {newest[:8]}, or give another name"
            )
        keeps_card = CARD in files and (not is_own or _record_of(name).get("keeps_card", False))
        parts = (file for file in files if PARTS.fullmatch(file.partition("/")[0]))
        stale = [file for file in parts if not (folder / file).exists()]
        # A push whose reply was lost repeats no commit: `upload_folder` makes none where the hub
        # holds all files as they are here, and returns the newest revision.
        mark = uuid.uuid4().hex[:12]
        record: dict[str, Any] = {"mark": mark, "keeps_card": keeps_card}
        _record(name, record | {"revision": info.sha})
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            parent_commit=info.sha,
            commit_message=f"jaxspec export {mark}",
            allow_patterns=[
                f"{entry.name}/*" if entry.is_dir() else entry.name
                for entry in folder.iterdir()
                if PARTS.fullmatch(entry.name) and not (keeps_card and entry.name == CARD)
            ],
            delete_patterns=stale or None,  # without patterns the hub's files are not listed again
        )
        _record(name, record | {"revision": commit.oid})
        if folder == repository.folder:
            shutil.rmtree(folder)
        return Pushed(f"{api.endpoint}/{name}", commit.oid, bool(info.private), keeps_card)


def _is_ours(api: Any, name: str, revision: str | None) -> bool:
    """Return whether this machine pushed a revision, also if it never learned that it arrived."""
    record = _record_of(name)
    if not record or record["revision"] == revision:
        return bool(record)
    return api.list_repo_commits(name)[0].title.endswith(record["mark"])


def _record_file(name: str) -> Path:
    return cache_directory() / "push" / f"{name}.json"


def _record_of(name: str) -> dict[str, Any]:
    file = _record_file(name)
    return read_json(file) if file.is_file() else {}


def _record(name: str, entries: dict[str, Any]) -> None:
    write_text(_record_file(name), json.dumps(entries) + "\n")


@contextmanager
def _progress_on_terminals() -> Iterator[None]:
    """Show `huggingface_hub`'s bars only on a terminal: a file gets one line at most."""
    from huggingface_hub.utils import are_progress_bars_disabled as disabled
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    hidden = not (sys.stderr.isatty() or disabled())
    if hidden:
        disable_progress_bars()
    try:
        yield
    finally:
        if hidden:
            enable_progress_bars()


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Raise InputError for an error of the hub or of the connection within."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    mend = "run the same command again: files that arrived are not sent twice"
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
            mend = "log in with `hf auth login` and a token that may write there"
        elif status in (409, 412):
            mend = "somebody has changed the repository meanwhile; run the same command again"
        raise InputError(f"push to {name}: {first_line(error)}; {mend}") from error

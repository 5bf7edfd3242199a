"""`jaxspec drafts`: list the published drafts that are known for a target.

Claims are cited, not measured here. No revision is known, because no draft was downloaded: tests
read tiny copies in the drafts' formats.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

import tyro

from jaxspec.checkpoints.locating import model_name
from jaxspec.errors import InputError, nearest

LISTED = "November 2026"
"""When the list was last compared with what is published."""
UNKNOWN = "not known"


@dataclass(frozen=True)
class PublishedDraft:
    """Describe a draft that can be downloaded."""

    id: str
    target: str
    kind: str
    claim: str = UNKNOWN
    """Gain of the draft, and who reports it."""
    licence: str = UNKNOWN
    options: str = ""
    """Options of `generate` in addition to the ids."""
    window: int = 0
    """Newest tokens that the draft's sliding layers read; 0 if it has none, or if it is unknown."""

    @property
    def question(self) -> str:
        """Return a question in the command's form, about an image if the target reads images."""
        sees = any(part in self.target for part in ("-VL-", "llava", "gemma-3-4b", "gemma-4"))
        image = "--image photo.jpg " if sees else ""
        return f'{image}--prompt "{"What is unusual here?" if image else "Why is the sky blue?"}"'


def _published() -> Iterator[PublishedDraft]:
    """Yield the drafts of `drafts.toml`, in order."""
    text = Path(__file__).with_name("drafts.toml").read_text(encoding="utf-8")
    for target, drafts in tomllib.loads(text).items():
        for name, facts in drafts.items():
            yield PublishedDraft(name, target, **facts)


PUBLISHED = tuple(_published())
"""The drafts that this library reads, for each target the ones with the best claims first."""


@dataclass(frozen=True)
class Drafts:
    """List the published drafts for a target: kind, claim, licence and the command.

    $ jaxspec drafts llava-hf/llava-1.5-7b-hf
    """

    target: Annotated[str, tyro.conf.Positional] = ""
    """Hub id of the target, or a directory of its name; without one, all targets are listed."""


def run(args: Drafts) -> None:
    """Print each target's drafts, each with its command."""
    drafts = drafts_of(args.target) if args.target else PUBLISHED
    print(f"Published drafts, as of {LISTED}; claims are their sources', not measured here.\n")
    targets = dict.fromkeys(draft.target for draft in drafts)
    for target in targets:
        print(f"{target}\n")
        for draft in (draft for draft in drafts if draft.target == target):
            window = f" with a window of {draft.window} tokens" if draft.window else ""
            facts = f"{draft.kind}{window}; claim: {draft.claim}; licence: {draft.licence}"
            print(f"  {draft.id}: {facts}")
            ids = f"--target {shlex.quote(args.target or target)} --draft {draft.id}"
            print(f"    jaxspec generate {ids} {draft.options} {draft.question}\n")


def drafts_of(target: str) -> tuple[PublishedDraft, ...]:
    """Return the drafts for a target.

    Raises InputError, which names the nearest target, if none is known.
    """
    name = PurePath(target).name.lower()
    drafts = tuple(draft for draft in PUBLISHED if PurePath(draft.target).name.lower() == name)
    if not drafts:
        advice = nearest(target, sorted({draft.target for draft in PUBLISHED}))
        raise InputError(
            f"no published draft is known for {target!r}; {advice} (lookup needs no draft)"
        )
    return drafts


def cached_draft(target: str, revision: str | None = None) -> Path:
    """Return the directory of a target's first listed draft that is in the hub's cache.

    Nothing is fetched.

    Raises InputError if none is in the cache, or none is known.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    drafts = [draft.id for draft in drafts_of(model_name(target))]
    for draft in drafts:
        file = try_to_load_from_cache(draft, "config.json", constants.HF_HUB_CACHE, revision)
        if isinstance(file, str) and any(Path(file).parent.glob("*model*.*")):
            return Path(file).parent
    raise InputError(
        f"draft 'auto': none of {', '.join(drafts)} is in the hub's cache; fetch one, or name it "
        "(--draft)"
    )

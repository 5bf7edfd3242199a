"""What an evaluation runs: models, rows of the table, sets, and how to decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from jaxspec.data.picturebook import FOLLOW_UPS, SYNTHETIC_SETS
from jaxspec.data.samples import Sample
from jaxspec.data.sets import SETS, check_names, evaluation_set
from jaxspec.decoding.collaboration import CollaborationConfig, Method
from jaxspec.decoding.engine_config import EngineConfig
from jaxspec.decoding.requests import IMAGE_BUCKETS, PROMPT_BUCKETS
from jaxspec.errors import InputError, check_counts


@dataclass(frozen=True)
class Row:
    """A row of the table: the views that draft, their weights (uniform when None) and how these learn, and the tree,
    if not a chain."""

    name: str
    views: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    weighting: str = "static"
    tree: str | None = None
    """As in `EngineConfig`, like the next."""
    adaptive_gamma: bool = False
    published: tuple[float, ...] = ()
    """What a paper reports for this row as the average over sets, a number a turn; for models of the same names."""


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation; a preset under `configs/eval/` is an instance, fields can be overridden on the command line."""

    target: str
    """Directory or hub id of the target, or `replay:FILE`, its recorded greedy answers."""
    draft: str
    """Directory or hub id of the draft."""
    rows: tyro.conf.Suppress[tuple[Row, ...]]
    sets: tuple[str, ...]
    """Names of picturebook's synthetic sets, of the papers' benchmarks, `mmspec`, or NAME=FILE.jsonl of your own
    (docs/tables.md)."""
    data: tuple[str, ...] = ()
    """NAME=PATH where a benchmark's local copy lies; those not named are read from the hub."""
    images: Path | None = None
    """Folder of the images of your own sets; by default beside their files."""
    follow_ups: tuple[str, ...] = tuple(FOLLOW_UPS)
    """Kinds of second turns; sample i has kind i modulo their number."""
    turns: tuple[int, ...] = (1, 2)
    """1: the first question. 2: the follow-up, after the target's own answer to the first."""
    limit: int = 100
    """Samples of each set."""
    gamma: int = 5
    """Drafted tokens a block."""
    max_new_tokens: int = 96
    temperature: float = 0.0
    batch_size: int = 8
    dtype: str = "float32"
    tiles: bool = True
    """Without, a LLaVA-NeXT reads one page an image, as LLaVA-1.5 does."""
    seed: int = 0
    repeats: int = 1
    """Runs of everything, by turns, of whose times the median counts."""
    trace: bool = False
    """Keep of every token who wrote it: for figures of weights and overlap, and the answers in report.html."""
    prompt_buckets: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    image_buckets: tuple[int, ...] = (0, 1, 2, 3, 5, 8, 10, 16)
    """Few and coarse buckets compile less and pad more."""
    kv_head: str | None = None
    """Directory of a KV head made for the target, for view kv."""
    captioner: str | None = None
    """What captions images for view C: jax:DIR, florence2:ID, blip:ID or file:captions.jsonl."""

    @property
    def pair(self) -> str:
        """The models for titles: of a directory its last two parts, so that figures tell no one's folders."""
        names = ["/".join(Path(place).parts[-2:]) for place in (self.target, self.draft)]
        return f"target {names[0]}, draft {names[1]}"

    def engine(self, row: Row) -> EngineConfig:
        """How one row of the table decodes."""
        return EngineConfig(
            views=row.views,
            weights=row.weights,
            weighting=row.weighting,
            gamma=self.gamma,
            tree=row.tree,
            adaptive_gamma=row.adaptive_gamma,
            batch_size=self.batch_size,
            prompt_buckets=self.prompt_buckets,
            image_buckets=self.image_buckets,
            new_buckets=(self.max_new_tokens,),
            trace=self.trace,
        )

    def plain(self) -> EngineConfig:
        """How the target decodes alone."""
        return self.engine(replace(self.rows[0], views=("M",), weights=None))

    def samples(self, name: str, turns: int = 1) -> Sequence[Sample]:
        """The first `limit` samples of a set, with one turn or two."""
        return evaluation_set(name, self.limit, turns, self.follow_ups, data_places(self.data), images=self.images)

    def __post_init__(self) -> None:
        check_names(self.sets, tuple(data_places(self.data)))
        check_counts(limit=self.limit, repeats=self.repeats)
        if not set(self.turns) <= {1, 2} or not self.turns:
            raise InputError(f"turns: {self.turns} must be 1, 2 or both")


@dataclass(frozen=True)
class Pairing:
    """Models that write together in one way: a part of the table of collaborative decoding."""

    name: str
    models: tuple[str, ...]
    """Directories or hub ids."""
    combine: str
    """As in `CollaborationConfig`, like the next."""
    temperature: float = 1.0
    gammas: tuple[int, ...] = (5, 1)
    proposer: int = 0
    views: tuple[str, ...] | None = None
    dial: tuple[tuple[float, str], ...] = ()
    """Values of lambda or mu and what to combine there, for the grid of quality and speed."""


@dataclass(frozen=True)
class CollaborativeEvalConfig:
    """An evaluation of collaborative decoding; presets as of `EvalConfig`."""

    pairings: tyro.conf.Suppress[tuple[Pairing, ...]]
    sets: tuple[str, ...]
    """Names of picturebook's synthetic sets, of the papers' benchmarks, or NAME=FILE.jsonl of your own
    (docs/tables.md)."""
    data: tuple[str, ...] = ()
    """NAME=PATH where a benchmark's local copy lies; those not named are read from the hub."""
    images: Path | None = None
    """Folder of the images of your own sets; by default beside their files."""
    shots: tuple[str, ...] = ()
    """Sets to ask with the paper's number of worked examples in front: NAME, or NAME=PATH of a local copy of these."""
    limit: int = 16
    """Samples of each set, decoded one by one, as the paper does."""
    held_out: int = 64
    """Samples whose reference answers' likelihood is measured."""
    repeats: int = 10
    """Runs of everything, by turns, of which the fastest counts."""
    max_new_tokens: int = 96
    dtype: str = "float32"
    seed: int = 0
    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    image_buckets: tuple[int, ...] = IMAGE_BUCKETS

    def collaboration(
        self, pairing: Pairing, method: Method, gammas: tuple[int, ...], combine: str | None = None
    ) -> CollaborationConfig:
        """How one row of the table decodes."""
        return CollaborationConfig(
            combine or pairing.combine,
            method,
            gammas,
            pairing.proposer,
            pairing.views,
            batch_size=1,
            prompt_buckets=self.prompt_buckets,
            image_buckets=self.image_buckets,
            new_buckets=(self.max_new_tokens,),
        )

    def samples(self, name: str, limit: int) -> Sequence[Sample]:
        """The first samples of a set, with one turn."""
        return evaluation_set(
            name, limit, data=data_places(self.data), shots=shot_places(self.shots), images=self.images
        )

    def __post_init__(self) -> None:
        check_names(self.sets, tuple(data_places(self.data)))
        shot_places(self.shots)
        check_counts(limit=self.limit, held_out=self.held_out, repeats=self.repeats)


def data_places(entries: Sequence[str]) -> dict[str, Path]:
    """Where local copies of sets lie, and sets of one's own, from NAME=PATH each."""
    places = {}
    for entry in entries:
        name, _, path = entry.partition("=")
        if not (name and path):
            raise InputError(f"data: {entry!r} is not NAME=PATH, such as pope=data/pope.parquet")
        if name in SYNTHETIC_SETS:
            raise InputError(f"data: {name!r} is a set of picturebook, which is drawn; give yours another name")
        places[name] = Path(path)
    return places


def with_own_sets(given: dict[str, Any]) -> dict[str, Any]:
    """A preset's fields, with what stands as NAME=PATH among `sets` moved to `data`.

    Raises InputError for data of no known set that is not asked for, and for a folder of images that no set reads.
    """
    names = tuple(entry.partition("=")[0] for entry in given["sets"])
    check_names([entry.partition("=")[0] for entry in given["data"]], names)
    if given["images"] is not None and set(names) <= set(SETS):
        raise InputError(f"images: {given['images']} is of sets of your own; name one with --sets NAME=FILE.jsonl")
    return given | {"sets": names, "data": (*given["data"], *(entry for entry in given["sets"] if "=" in entry))}


def shot_places(entries: Sequence[str]) -> dict[str, Path | None]:
    """The sets to ask with worked examples, and where local copies of these lie, from NAME or NAME=PATH each."""
    parts = [entry.partition("=") for entry in entries]
    check_names([name for name, _, _ in parts])
    return {name: Path(path) if path else None for name, _, path in parts}

"""What an evaluation runs, which of its rows can be measured here, and loading its models."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eval.lib.published import Published
from eval.lib.replay import PREFIX as REPLAY
from eval.lib.replay import RecordedTarget
from eval.lib.sets import MMSPEC, SETS, check_names, evaluation_set
from eval.lib.synthetic import PREFIX as SYNTHETIC
from eval.lib.synthetic import parse_synthetic, synthetic_model
from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.cluster import process
from jaxspec.data.rows import local_rows
from jaxspec.data.samples import Sample
from jaxspec.decoding.captioners import captioner_lack, check_captioner, load_captioner
from jaxspec.decoding.engine_config import (
    IMAGE_BUCKETS,
    PROMPT_BUCKETS,
    CollaborationConfig,
    EngineConfig,
    Method,
)
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError, check_counts, nearest
from jaxspec.loading import LoadedModel
from jaxspec.prompts.captions import Captioner
from jaxspec.sharding import Placement, shardings
from picturebook import FOLLOW_UPS, SYNTHETIC_SETS


@dataclass(frozen=True)
class Variant:
    """A way to draft, a row of the table: the views, their weights (uniform when None) and how these learn, and the
    tree, if not a chain."""

    name: str
    views: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    weighting: str = "static"
    tree: str | None = None
    """As in `EngineConfig`."""


# The bases of a configuration are the groups of options that --help shows.


@dataclass(frozen=True, kw_only=True)
class Models:
    """What decodes."""

    target: str
    """Directory or hub id of the target, or `replay:FILE`, its recorded greedy answers."""
    draft: str
    """Directory or hub id of the draft; empty where KV heads alone draft."""
    kv_head: str | None = None
    """Directory of a KV head made for the target, for view kv."""
    captioner: str | None = None
    """What captions images for view C: jax:DIR, florence2:ID, blip:ID or file:captions.jsonl."""
    tiles: bool = True
    """Without, a LLaVA-NeXT reads one tile an image, as LLaVA-1.5 does."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is asked."""

    sets: tuple[str, ...]
    """Names of picturebook's synthetic sets, of the papers' benchmarks, `mmspec`, or NAME=FILE.jsonl of your own
    (docs/tables.md)."""
    data: tuple[str, ...] = ()
    """NAME=PATH where a benchmark's local copy lies, or NAME=tfds:PLACE; those not named are read from the hub."""
    images: Path | None = None
    """Folder of the images of your own sets; by default beside their files."""
    limit: int = 100
    """Samples of each set."""


@dataclass(frozen=True, kw_only=True)
class Dialogues(Data):
    """What is asked."""

    turns: tuple[int, ...] = (1, 2)
    """1: the first question. 2: the follow-up, after the target's own answer to the first."""
    follow_ups: tuple[str, ...] = tuple(FOLLOW_UPS)
    """Kinds of second turns; sample i has kind i modulo their number."""
    each_follow_up: bool = False
    """All kinds follow each sample, as TABED asks them; what is shown is the mean over kinds."""
    one_turn: tuple[str, ...] = ()
    """Sets that are asked first questions alone."""


@dataclass(frozen=True, kw_only=True)
class Examples(Data):
    """What is asked."""

    shots: tuple[str, ...] = ()
    """Sets to ask with the paper's number of worked examples in front: NAME, or NAME=PATH of a local copy of these."""
    held_out: int = 64
    """Samples whose reference answers' likelihood is measured."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How it is decoded and timed."""

    max_new_tokens: int = 96
    dtype: str = "float32"
    seed: int = 0
    repeats: int = 1
    """Runs of everything, by turns, of whose times the median counts; in collaborative decoding the least."""
    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    """Few and coarse buckets compile less and pad more."""
    image_buckets: tuple[int, ...] = IMAGE_BUCKETS


@dataclass(frozen=True, kw_only=True)
class Drafting(Decoding):
    """How it is decoded and timed."""

    gamma: int = 5
    """Drafted tokens a block."""
    temperature: float = 0.0
    batch_size: int = 8
    trace: bool = False
    """Keep of every token who wrote it: for figures of weights and overlap, and the answers in report.html."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Models, Dialogues, Drafting, Placement):
    """One evaluation; a preset under `configs/eval/` is an instance, fields can be overridden on the command line."""

    rows: tuple[Variant, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Rows that cannot be measured here, and why."""
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns of means, each over some of the sets; without, one over all."""
    published: tuple[Published, ...] = ()
    """What papers print for these rows."""

    @property
    def pair(self) -> str:
        """Return the models for titles: of a directory its last two parts, so that figures tell no one's folders."""
        names = [
            "/".join(Path(place).parts[-2:])
            for place in (self.target, self.draft or self.kv_head or "")
        ]
        return f"target {names[0]}, draft {names[1]}"

    def engine(self, row: Variant) -> EngineConfig:
        """Return how one row of the table decodes."""
        return EngineConfig(
            views=row.views,
            weights=row.weights,
            weighting=row.weighting,
            gamma=self.gamma,
            tree=row.tree,
            batch_size=self.batch_size,
            prompt_buckets=self.prompt_buckets,
            image_buckets=self.image_buckets,
            new_buckets=(self.max_new_tokens,),
            spread=True,
            trace=self.trace,
        )

    def plain(self) -> EngineConfig:
        """Return how the target decodes alone."""
        return self.engine(replace(self.rows[0], views=("M",), weights=None))

    def samples(self, name: str, turns: int = 1) -> Sequence[Sample]:
        """Return the first `limit` samples of a set, with one turn or two."""
        return evaluation_set(
            name, self.limit, turns, self.follow_ups, data_places(self.data), images=self.images
        )

    def turns_of(self, name: str) -> tuple[int, ...]:
        """Return the turns of a set that are asked."""
        return tuple(turn for turn in self.turns if turn == 1 or name not in self.one_turn)

    def parts(self) -> Iterator[tuple[dict[str, Any], EvalConfig]]:
        """Yield what of each set is measured together: its place in the records, and the configuration of it alone."""
        for name in self.sets:
            brings_turns = name == MMSPEC or name not in SETS
            for turn in self.turns_of(name):
                part = replace(self, turns=(turn,))
                if turn == 1 or not self.each_follow_up or brings_turns:
                    yield {"dataset": name, "turn": turn}, part
                    continue
                for kind in self.follow_ups:
                    yield (
                        {"dataset": name, "turn": turn, "follow_up": kind},
                        replace(part, follow_ups=(kind,)),
                    )

    def __post_init__(self) -> None:
        check_names(self.sets, tuple(data_places(self.data)))
        check_counts(limit=self.limit, repeats=self.repeats)
        if not set(self.turns) <= {1, 2} or not self.turns:
            raise InputError(f"turns: {self.turns} must be 1, 2 or both")
        if not any(map(self.turns_of, self.sets)):
            raise InputError(
                f"turns: of {', '.join(self.sets)} the first alone is asked; give 1, or other --one-turn"
            )


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
    sweep: str = ""
    """As in `Together`."""
    alone: int = 0
    """Draft length of the methods with one proposer; 0 takes the proposer's in `gammas`."""
    form: Literal["chat", "raw"] = "chat"
    """How questions are asked: in the chat form of the model that leads, or as raw text, for base models."""

    def points(self, sweep: str = "") -> list[Point]:
        """Return where a sweep measures: this, or the pairing's own.

        Along `lambda` and `mu` each value counts twice, with the pairing's draft lengths and with 1 each. `lambda` is
        the weight of the proposer, `gamma` its draft length.
        """
        dial, _, values = (sweep or self.sweep).partition(":")
        if not dial:
            return []
        if dial not in DIALS:
            raise InputError(f"sweep: unknown dial {dial!r}; {nearest(dial, DIALS)}")
        if dial != "gamma" and len(self.models) != 2:
            raise InputError(
                f"sweep: {dial} is of two models, and {self.name!r} has {len(self.models)}; leave it out"
            )
        try:
            found = [float(value) for value in values.split(",")]
        except ValueError:
            raise InputError(
                f"sweep: {values!r} are no numbers; give such as {dial}:1,3,5"
            ) from None
        points = []
        for value in found:
            runs, combine = dict.fromkeys([(1,) * len(self.models), self.gammas]), self.combine
            if dial == "gamma":
                if value < 1 or value % 1:
                    raise InputError(
                        f"sweep: gamma {value:g} is no draft length; give whole numbers, 1 or more"
                    )
                runs = [
                    tuple(
                        int(value) if m == self.proposer else gamma
                        for m, gamma in enumerate(self.gammas)
                    )
                ]
            elif dial == "mu":
                combine = f"contrastive:mu={value:g}"
            else:
                first = 1 - value if self.proposer else value
                combine = f"weighted:{first:g},{1 - first:g}"
            points += [Point(dial, value, combine, gammas) for gammas in runs]
        return points


DIALS = ("lambda", "mu", "gamma")


class Point(NamedTuple):
    """One of a sweep."""

    dial: str
    value: float
    combine: str
    gammas: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Together(Decoding):
    """How it is decoded and timed."""

    repeats: int = 5
    timed: int = 4
    """Samples of each set that are decoded `repeats` times, for speeds. All are decoded once, for quality, by standard
    decoding and by CoS."""
    sweep: str = ""
    """Measure also along a dial: `lambda:0.1,0.5,0.9`, `mu:0.1,0.5` or `gamma:1,3,5`; by default each pairing's own."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeEvalConfig(Examples, Together, Placement):
    """An evaluation of collaborative decoding, one request at a time as in the paper; presets as of `EvalConfig`."""

    pairings: tuple[Pairing, ...]
    limit: int = 16
    published: tuple[Published, ...] = ()
    """Speed-ups that papers print, by pairing and row: `Qwen 3B, CoS`."""

    def collaboration(
        self, pairing: Pairing, method: Method, gammas: tuple[int, ...], combine: str | None = None
    ) -> CollaborationConfig:
        """Return how one row of the table decodes."""
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
            spread=True,
        )

    def samples(self, name: str, limit: int) -> Sequence[Sample]:
        """Return the first samples of a set, with one turn."""
        shots = set_places(self.shots)
        return evaluation_set(
            name, limit, data=data_places(self.data), shots=shots, images=self.images
        )

    def __post_init__(self) -> None:
        check_names(self.sets, tuple(data_places(self.data)))
        check_names(list(set_places(self.shots)))
        check_counts(
            limit=self.limit, held_out=self.held_out, repeats=self.repeats, timed=self.timed
        )
        for pairing in self.pairings:
            pairing.points(self.sweep)


def set_places(entries: Sequence[str]) -> dict[str, Path | None]:
    """Return what NAME or NAME=PATH each name, and where it lies."""
    parts = [entry.partition("=") for entry in entries]
    return {name: Path(path) if path else None for name, _, path in parts}


def data_places(entries: Sequence[str]) -> dict[str, Path]:
    """Return where local copies of sets lie, and sets of one's own, from NAME=PATH each."""
    places = {}
    for name, path in set_places(entries).items():
        if not name or path is None:
            raise InputError(f"data: {name!r} is not NAME=PATH, such as pope=data/pope.parquet")
        if name in SYNTHETIC_SETS:
            raise InputError(
                f"data: {name!r} is a set of picturebook, which is drawn; give yours another name"
            )
        places[name] = path
    return places


def measurable(
    rows: tuple[Variant, ...], target: str, draft: str, captioner: str | None
) -> tuple[tuple[Variant, ...], dict[str, str]]:
    """Return the rows that can be measured here, and of each other one why not; a line a reason is printed.

    Raises InputError where no row is left.
    """
    wanted = captioner if any("C" in row.views for row in rows) else None
    no_captions = None if wanted is None else captioner_lack(wanted)
    lacks: dict[str, str] = {}
    for row in rows:
        why = (target.startswith(REPLAY) and _lacks_for(row)) or ("C" in row.views and no_captions)
        if not (why or draft or set(row.views) <= {"kv"}):
            why = "no draft is named; give one as --draft"
        if why:
            lacks[row.name] = why
    if len(lacks) == len(rows):
        raise InputError(f"rows: none can be measured; {'; '.join(by_reason(lacks))}")
    for line in by_reason(lacks):
        print(f"rows left out: {line}", file=sys.stderr)
    return tuple(row for row in rows if row.name not in lacks), lacks


def by_reason(told: Mapping[str, str]) -> list[str]:
    """Return a line for each reason: the names that it is told of, and itself."""
    return [
        f"{', '.join(name for name in told if told[name] == why)}: {why}"
        for why in dict.fromkeys(told.values())
    ]


def _lacks_for(row: Variant) -> str | None:
    """Return what a row asks of its target that recorded answers lack."""
    if "kv" in row.views:
        return "recorded answers have no keys and values; give a model as target"
    if not parse_weighting(row.weighting).hard_labels:
        return "recorded answers have no probabilities to learn from; give a model as target"
    return None


def load_model(
    name: str,
    dtype: str,
    tiles: bool = True,
    share_tower_with: LoadedModel | None = None,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Load the model of a directory, hub id, or `synthetic:ROLE:SHARE`."""
    if name.startswith(SYNTHETIC):
        model = synthetic_model(name, jnp.dtype(dtype))
        places = None if mesh is None else shardings(model.config, model.params, mesh)
        return replace(model, params=jax.device_put(model.params, places))
    return LoadedModel.load(
        name, jnp.dtype(dtype), tiles=tiles, share_tower_with=share_tower_with, mesh=mesh
    )


def load_models(
    config: EvalConfig, views: Sequence[str] | None = None
) -> tuple[LoadedModel, LoadedModel | None, Captioner | None]:
    """Load target, draft where there is one and, for views that show captions, captioner, in the preset's dtype.

    Towers that are alike are held once.

    A target `replay:FILE` is a file of recorded answers. The views are those of the preset's rows, or as given.
    """
    shown = [name for row in config.rows for name in row.views] if views is None else views
    head = config.kv_head if "kv" in shown else None
    captioner = config.captioner if "C" in shown else None
    check_files(config, head, captioner)
    draft = None
    if config.target.startswith(REPLAY):
        draft = load_model(config.draft, config.dtype, config.tiles)
        target: LoadedModel = RecordedTarget.read(Path(config.target.removeprefix(REPLAY)), draft)
    else:
        target = load_model(
            config.target, config.dtype, config.tiles, mesh=config.mesh(config.batch_size)
        )
        if config.draft:
            draft = load_model(config.draft, config.dtype, config.tiles, target)
    if head is not None:
        target = target.with_head(head)
    if process()[0] == 0:
        print(f"target {config.target}\ndraft  {config.draft or head}", file=sys.stderr)
    if captioner is None:
        return target, draft, None
    return (
        target,
        draft,
        load_captioner(captioner, jnp.dtype(config.dtype), share_tower_with=target),
    )


def check_files(config: EvalConfig, head: str | None = None, captioner: str | None = None) -> None:
    """Raise InputError for what is not there, models, KV head, captions and the user's data, before any is loaded."""
    if not config.draft and any(view != "kv" for row in config.rows for view in row.views):
        raise InputError(
            "draft: there is none, and not all rows draft with the KV head alone; give --draft DIR"
        )
    for place in filter(None, (config.target, config.draft)):
        if place.startswith(REPLAY):
            next(local_rows(Path(place.removeprefix(REPLAY))), None)
        elif place.startswith(SYNTHETIC):
            parse_synthetic(place)
        else:
            read_config(locate(place))
    if head is not None and not is_kv_head(head):
        raise InputError(f"kv_head {head}: no KV head lies there; give the directory of one")
    if captioner is not None:
        kind, where, _ = check_captioner(captioner)
        if kind == "jax":
            read_config(locate(where))
        elif kind == "file" and not Path(captioner.removeprefix("file:")).is_file():
            raise InputError(f"captioner {captioner}: no such file; check the path")
    for name in config.sets:
        if name in data_places(config.data) or name == MMSPEC:
            for turn in config.turns_of(name):
                config.samples(name, turn)


def shown(place: str) -> tuple[str, str]:
    """Split DIRECTORY:VIEW in two; the view is empty where none is named."""
    path, _, view = place.rpartition(":")
    return (path, view) if path and "/" not in view else (place, "")


def named(entry: str) -> tuple[str, str]:
    """Split NAME=PLACE in two."""
    name, _, place = entry.partition("=")
    if not (name and place):
        raise InputError(f"{entry!r} is not NAME=DIRECTORY")
    return name, place

"""Define an evaluation of drafts: presets under `configs/eval/`, and their options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tyro

from eval.lib.drafts.published import Published
from eval.lib.questions.sets import MMSPEC, SETS, check_names, evaluation_set
from jaxspec.data.samples import Sample
from jaxspec.decoding.sources.lookup import LOOKUP
from jaxspec.engine.config import IMAGE_BUCKETS, PROMPT_BUCKETS, EngineConfig
from jaxspec.engine.drafts import HEAD
from jaxspec.errors import InputError, check_counts, check_seed, located
from jaxspec.files import local_path
from jaxspec.models.int8 import Weights
from jaxspec.runtime import parse_dtype
from jaxspec.sharding import Placement
from picturebook import FOLLOW_UPS, SYNTHETIC_SETS


@dataclass(frozen=True)
class Variant:
    """Describe a row of the table: one way to draft. All fields but `name` are as in
    `EngineConfig`.
    """

    name: str
    views: tuple[str, ...]
    """Views of a draft model, then `head` for a head, then `lookup`."""
    weights: tuple[float, ...] | None = None
    weighting: str = "static"
    tree: str | None = None

    @property
    def draft_views(self) -> tuple[str, ...]:
        """Return the views of a draft model."""
        return tuple(name for name in self.views if name not in (HEAD, LOOKUP))


# The bases of a configuration are the groups of options in --help.


@dataclass(frozen=True, kw_only=True)
class Models:
    """Choose the target, and what drafts for it."""

    target: str
    """Directory or hub id of the target, OWNER/NAME@REVISION for one revision, or `replay:FILE`
    with its recorded greedy answers."""
    adapter: str | None = None
    """Directory of the target's LoRA adapter in PEFT's format, merged at loading."""
    draft: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Directory or hub id of a draft model or a head. Repeat the option for a model
    and a head; together they replace the preset's, and '' leaves these out."""
    target_weights: Weights | None = None
    """int8 quantises the target's layers, for plain decoding too."""
    captioner: str | None = None
    """Captioner for view C: jax:DIR, florence2:ID, blip:ID or file:captions.jsonl."""
    tiles: bool = True
    """Read images in tiles, as LLaVA-NeXT does; otherwise one tile an image, as LLaVA-1.5 does."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Choose the questions."""

    sets: tuple[str, ...]
    """Names of sets: picturebook's, the papers' benchmarks, `mmspec`, or NAME=FILE.jsonl of your
    own (docs/tables.md)."""
    data: tuple[str, ...] = ()
    """NAME=PATH of a benchmark's local copy, NAME=tfds:PLACE, or NAME=hub:OWNER/NAME@REVISION/FILE;
    other sets come from the hub."""
    images: Path | None = None
    """Folder of the images of your own sets; the default is next to their files."""
    limit: int = 100
    """Samples of each set."""

    @property
    def places(self) -> dict[str, Path]:
        """Return the places of local copies and of your own sets, by name."""
        places = {}
        for name, path in set_places(self.data).items():
            if not name or path is None:
                raise InputError(f"data: {name!r} is not NAME=PATH, such as pope=data/pope.parquet")
            if name in SYNTHETIC_SETS:
                raise InputError(
                    f"data: {name!r} is a drawn set of picturebook; give yours another name"
                )
            places[name] = path
        return places

    def named(self, name: str) -> AbstractContextManager[None]:
        """Put the name of a set, and its file, before the text of an InputError within."""
        path = self.places.get(name)
        return located(f"set {name}" + (f" ({path})" if path else ""))

    def check(self) -> None:
        """Raise InputError for no sets or unknown ones, and for a limit below 1."""
        if not self.sets:
            raise InputError("sets: none; give one or more")
        check_names(self.sets, tuple(self.places))
        check_counts(limit=self.limit)


@dataclass(frozen=True, kw_only=True)
class Dialogues(Data):
    """Choose the questions."""

    turns: tuple[int, ...] = (1, 2)
    """1: the first question. 2: the follow-up, after the target's own answer to the first."""
    follow_ups: tuple[str, ...] = tuple(FOLLOW_UPS)
    """Kinds of second turns: question, caption, summary, story, fact, sum. Samples take turns."""
    each_follow_up: bool = False
    """Ask every kind after each sample, as TABED does; the table shows the mean over kinds."""
    one_turn: tuple[str, ...] = ()
    """Sets that are asked only their first question."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Choose how answers are decoded and timed."""

    max_new_tokens: int = 96
    """Maximum tokens of an answer."""
    dtype: str = "float32"
    """Data type of weights and caches: float32, bfloat16 or float16."""
    seed: int = 0
    """Seed of sampling."""
    repeats: int = 1
    """Timed runs of everything, by turns. The median of their times counts, in collaborative
    decoding the least."""
    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    """Prompt lengths to compile for; fewer and coarser buckets compile less and pad more."""
    image_buckets: tuple[int, ...] = IMAGE_BUCKETS
    """Numbers of image tiles to compile for."""

    def check_decoding(self) -> None:
        """Raise InputError for an unknown dtype, and for numbers out of range."""
        parse_dtype(self.dtype)
        check_counts(max_new_tokens=self.max_new_tokens, repeats=self.repeats)
        check_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class Drafting(Decoding):
    """Choose how answers are decoded and timed."""

    gamma: int = 5
    """Drafted tokens per block."""
    width: int | None = None
    """Tokens that each target pass reads, padding included. It makes answers equal plain decoding's
    in 16 bits too; rows with trees are left out."""
    temperature: float = 0.0
    """0 decodes greedily; larger values sample."""
    batch_size: int = 8
    """Requests that decode together."""
    times: bool = True
    """Time answers and passes. --no-times only counts tokens, exactly on a busy machine too."""
    trace: bool = False
    """Keep the writer of each token, for figures of weights and overlap and for report.html."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Models, Dialogues, Drafting, Placement):
    """Describe one evaluation; presets under `configs/eval/` are instances, and options replace
    fields.
    """

    rows: tuple[Variant, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Rows that cannot be measured here, and why."""
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns of means and the sets of each; the default is one column over all sets."""
    published: tuple[Published, ...] = ()
    """Papers' numbers for these rows."""
    scores: tuple[Published, ...] = ()
    """Papers' scores of answers, by model and measure."""

    @property
    def pair(self) -> str:
        """Return the models' names for titles; a directory gives its last two parts."""
        places = self.target, *self.draft
        target, *drafts = ("/".join(Path(path).parts[-2:]) for path in places)
        target += f" ({self.target_weights})" if self.target_weights else ""
        return f"target {target}" + (f", draft {' and '.join(drafts)}" if any(drafts) else "")

    def engine(self, row: Variant) -> EngineConfig:
        """Return the decoding of one row of the table."""
        shared = {each.name for each in fields(EngineConfig)}
        drafting = {name: value for name, value in vars(row).items() if name in shared}
        drafting["views"] = tuple(name for name in row.views if name != HEAD)
        settings = {name: value for name, value in vars(self).items() if name in shared}
        return EngineConfig(
            **settings | drafting,
            new_buckets=(self.max_new_tokens,),
            data_parallel_processes=True,
            generation_config="ignore",  # as papers decode
        )

    def plain(self) -> EngineConfig:
        """Return the target's plain decoding."""
        return self.engine(replace(self.rows[0], views=(), weights=None))

    def samples(
        self, dataset: str, turn: int = 1, follow_up: str | None = None
    ) -> Sequence[Sample]:
        """Return the first `limit` samples of a set, with turns up to this one.

        follow_up: Kind of all second turns; None lets the kinds of `follow_ups` take turns.
        """
        kinds = self.follow_ups if follow_up is None else (follow_up,)
        return evaluation_set(dataset, self.limit, turn, kinds, self.places, images=self.images)

    def turns_of(self, name: str) -> tuple[int, ...]:
        """Return the turns of a set that are asked."""
        return tuple(turn for turn in self.turns if turn == 1 or name not in self.one_turn)

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of `samples` for each part of the sets that is measured together.

        They are also fields of the part's records.
        """
        for name in self.sets:
            brings_turns = name == MMSPEC or name not in SETS
            for turn in self.turns_of(name):
                part = {"dataset": name, "turn": turn}
                if turn == 1 or not self.each_follow_up or brings_turns:
                    yield part
                else:
                    yield from (part | {"follow_up": kind} for kind in self.follow_ups)

    def __post_init__(self) -> None:
        self.check()
        self.check_decoding()
        for row in self.rows:
            self.engine(row)  # checks its options
        if not set(self.turns) <= {1, 2} or not self.turns:
            raise InputError(f"turns: {self.turns} must be 1, 2 or both")
        if 2 in self.turns and not self.follow_ups:
            raise InputError("follow_ups: none; give one or more kinds")
        if not any(map(self.turns_of, self.sets)):
            raise InputError(
                f"turns: only the first turn of {', '.join(self.sets)} is asked; give 1"
            )


def set_places(entries: Sequence[str]) -> dict[str, Path | None]:
    """Return the names in NAME or NAME=PATH, and their paths."""
    parts = [entry.partition("=") for entry in entries]
    return {name: local_path(path) if path else None for name, _, path in parts}

"""Describe an evaluation of collaborative decoding: models that write together, and sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from eval.lib.drafts.config import Data, Decoding, set_places
from eval.lib.drafts.published import Published
from eval.lib.questions.cos_release import released_samples
from eval.lib.questions.sets import check_names, evaluation_set
from jaxspec.data.samples import Sample
from jaxspec.engine.config import CollaborationConfig, Method
from jaxspec.errors import InputError, check_counts, nearest
from jaxspec.sharding import Placement

DIALS = ("lambda", "mu", "gamma")


class Point(NamedTuple):
    """Set one point of a sweep."""

    dial: str
    value: float
    combination: str
    gammas: tuple[int, ...]


@dataclass(frozen=True)
class Pairing:
    """Pair models that write together in one way: a part of the table."""

    name: str
    models: tuple[str, ...]
    """Directories or hub ids."""
    combination: str
    """As in `CollaborationConfig`, as are `gammas`, `default_proposer` and `views`."""
    temperature: float = 1.0
    gammas: tuple[int, ...] = (5, 1)
    default_proposer: int | Literal["auto"] = 0
    views: tuple[str, ...] | None = None
    sweep: str = ""
    """As in `Together`."""
    alone: int = 0
    """Draft length of methods with one proposer; 0 takes the proposer's length in `gammas`."""
    chat_template: bool = True
    """Whether the leading model's chat template writes the questions; base models get raw text."""

    def points(self, sweep: str = "") -> list[Point]:
        """Return the points of the given sweep, or of the pairing's own.

        Each value of `lambda` (the proposer's weight) and `mu` gives two points: the pairing's
        draft lengths, and lengths of 1. A value of `gamma` gives one, as the proposer's draft
        length. Where the proposer is chosen by the weights, both are the first model's.
        """
        dial, _, values = (sweep or self.sweep).partition(":")
        if not dial:
            return []
        if dial not in DIALS:
            raise InputError(f"sweep: unknown dial {dial!r}; {nearest(dial, DIALS)}")
        if dial != "gamma" and len(self.models) != 2:
            raise InputError(
                f"sweep: {dial} needs two models, but {self.name!r} has "
                f"{len(self.models)}; use gamma"
            )
        try:
            settings = [float(value) for value in values.split(",")]
        except ValueError:
            raise InputError(
                f"sweep: {values!r} is not a list of numbers; give {dial}:1,3,5"
            ) from None
        dialled = 0 if self.default_proposer == "auto" else self.default_proposer
        points = []
        for value in settings:
            if dial == "gamma" and (value < 1 or value % 1):
                raise InputError(f"sweep: gamma {value:g}; give whole numbers, 1 or more")
            # Weights are in the models' order, and lambda is the proposer's.
            first = 1 - value if dialled else value
            combination = {
                "gamma": self.combination,
                "mu": f"contrastive:mu={value:g}",
                "lambda": f"weighted:{first:g},{1 - first:g}",
            }[dial]
            runs = dict.fromkeys([(1,) * len(self.models), self.gammas])
            if dial == "gamma":
                gammas = list(self.gammas)
                gammas[dialled] = int(value)
                runs = [tuple(gammas)]
            points += [Point(dial, value, combination, gammas) for gammas in runs]
        return points


@dataclass(frozen=True, kw_only=True)
class Examples(Data):
    """Choose the questions."""

    shots: tuple[str, ...] = ()
    """Sets asked with the paper's number of worked examples: NAME, or NAME=PATH of a local copy of
    the examples."""
    released: Path | None = None
    """Clone of github.com/Kamichanw/CoS: ask as that code does, every model in raw text with the
    prompts, worked examples and order that are there; `shots` is then ignored."""
    held_out: int = 64
    """Number of samples whose reference answers' likelihood is measured."""


@dataclass(frozen=True, kw_only=True)
class Together(Decoding):
    """Choose how answers are decoded and timed."""

    repeats: int = 5
    timed: int = 4
    """Samples of each set that are decoded `repeats` times for speeds; standard decoding and CoS
    decode all samples once for quality."""
    sweep: str = ""
    """Dial and values to sweep: `lambda:0.1,0.5,0.9`, `mu:0.1,0.5` or `gamma:1,3,5`; the default is
    each pairing's own sweep."""


@dataclass(frozen=True, kw_only=True)
class CollaborativeEvalConfig(Examples, Together, Placement):
    """Describe an evaluation of collaborative decoding, one request at a time, as in the paper."""

    pairings: tuple[Pairing, ...]
    limit: int = 16
    published: tuple[Published, ...] = ()
    """Papers' speed-ups, by pairing and row: `Qwen 3B, CoS`."""

    def collaboration(
        self,
        pairing: Pairing,
        method: Method,
        gammas: tuple[int, ...],
        combination: str | None = None,
    ) -> CollaborationConfig:
        """Return the decoding of one row of the table."""
        return CollaborationConfig(
            combination=combination or pairing.combination,
            method=method,
            gammas=gammas,
            default_proposer=pairing.default_proposer,
            views=pairing.views,
            batch_size=1,
            prompt_buckets=self.prompt_buckets,
            image_buckets=self.image_buckets,
            new_buckets=(self.max_new_tokens,),
            data_parallel_processes=True,
            generation_config="ignore",  # as papers decode
        )

    @property
    def protocol(self) -> str:
        """Return how questions are asked, which decides which of the paper's lines show."""
        return "preset" if self.released is None else "released"

    def in_chat_form(self, pairing: Pairing) -> bool:
        """Return whether a pairing is asked in its leading model's chat template."""
        return pairing.chat_template and self.released is None

    def samples(self, name: str, limit: int) -> Sequence[Sample]:
        """Return the first samples of a set, with one turn."""
        if self.released is not None:
            return list(islice(released_samples(name, self.released, self.places.get(name)), limit))
        shots = set_places(self.shots)
        return evaluation_set(name, limit, data=self.places, shots=shots, images=self.images)

    def __post_init__(self) -> None:
        self.check()
        check_names(list(set_places(self.shots)))
        self.check_decoding()
        check_counts(held_out=self.held_out, timed=self.timed)
        for pairing in self.pairings:
            for *_, combination, gammas in pairing.points(self.sweep):
                way = self.collaboration(pairing, "alternating", gammas, combination)
                way.checked(len(pairing.models))  # here, and not after the methods' hours

"""Define what recipes of draft models and of heads share: stages, and the data of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxspec.data.prepared import Prepared, mixture
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError, check_numbers, nearest
from jaxspec.files import local_path
from jaxspec.loading.models import LoadedModel, prompt_encoder
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import GROUP, ConversationBatches
from jaxspec.training.loop.batches import process_share
from jaxspec.training.loop.signatures import data_signature
from jaxspec.typing import Int, Params

DataSets = Mapping[str, Path | Sequence[Sample]]
"""Data sets by name: the path of a prepared one, or samples."""

Run = Callable[..., Params]
"""What runs a stage, with the arguments of `fit`."""

PREPARED = Path("runs/data")
"""Folder of data sets without a path of their own."""
COUNTED = 10_000
"""Maximum samples in which the tokens of a draft vocabulary are counted."""


@dataclass(frozen=True)
class Stage:
    """Describe one run of the trainer."""

    name: str
    train: TrainConfig
    data: tuple[tuple[str, float], ...]
    """(data set, weight) pairs. A data set is a name under `runs/data`, or the caller passes it."""
    plain: bool = False
    """Leave out questions and roles, and keep images and captions."""

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError(f"stage {self.name}: no data; name a data set")
        weights = {f"stage {self.name}: weight of {name}": weight for name, weight in self.data}
        check_numbers(1e-6, **weights)


@dataclass(frozen=True, kw_only=True)
class StagedRecipe:
    """Hold the common part of a draft's and a KV head's recipe; presets are in `configs/train/`."""

    target: str
    """Directory or hub id of the model that the draft drafts for, and that teaches it."""
    stages: tuple[Stage, ...]
    buckets: tuple[int, ...]
    """Buckets of row lengths; longer rows are cut at the last."""
    tile_buckets: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    """Buckets of the most image tiles of a row."""
    unlearned: float = 0.02
    """Share of rows that may teach nothing, because no answer is within the buckets."""
    system: str = ""
    """System prompt before each conversation in Vicuna's form."""
    draft_vocabulary: int = 0
    """Tokens that the draft scores, the most frequent of the answers; 0 keeps `start`'s."""
    held_out: str = ""
    """Data set to evaluate on; may be empty. Tokens per pass are simulated on the target's greedy
    answers there, or those of a head decoded for its questions."""

    def __post_init__(self) -> None:
        check_numbers(0, 1, unlearned=self.unlearned)
        check_numbers(draft_vocabulary=self.draft_vocabulary)
        if min(self.buckets, default=0) < 1:
            raise InputError(f"buckets: {self.buckets}; give one whole number or more, from 1 up")
        evaluating = " ".join(
            f"--{stage.name}.evaluate-every {stage.train.evaluate_every}"
            for stage in self.stages
            if stage.train.evaluate_every
        )
        if self.held_out and not evaluating:
            names = " or ".join(f"--{stage.name}.evaluate-every" for stage in self.stages)
            raise InputError(f"held_out {self.held_out}: no stage evaluates; give {names}")
        if evaluating and not self.held_out:
            raise InputError(f"{evaluating}: no answers to evaluate on; give --held-out SET")

    @property
    def data_sets(self) -> list[str]:
        """Return the names of all data sets that are read, each once."""
        names = [name for stage in self.stages for name, _ in stage.data]
        return list(dict.fromkeys([*names, self.held_out] if self.held_out else names))


AnyRecipe = TypeVar("AnyRecipe", bound=StagedRecipe)


def draft_words(
    recipe: StagedRecipe, sources: Mapping[str, Any], target: LoadedModel
) -> tuple[int, ...]:
    """Return a recipe's draft vocabulary, counted in its last stage's data; empty without one.

    A target with fewer tokens gives all of them.
    """
    if not recipe.draft_vocabulary:
        return ()
    stage, text = recipe.stages[-1], target.model.text
    samples = mixture([(sources[name], weight) for name, weight in stage.data], stage.train.seed)
    count = min(COUNTED, sum(len(sources[name]) for name, _ in stage.data))
    ranked = frequent_tokens(prompt_encoder(target), samples, count, text.stop_tokens)
    return tuple(ranked[: recipe.draft_vocabulary].tolist())


def frequent_tokens(
    encoder: PromptEncoder, samples: Any, count: int, ends: Sequence[int]
) -> Int[np.ndarray, " V"]:
    """Return all tokens, the assistant's most frequent ones in `count` samples first, ties by id.

    Tokens that end its answers come before all others.
    """
    written = np.zeros(len(encoder.tokenizer), np.int64)
    for start in range(0, count, GROUP):
        chunk = [samples[i].messages for i in range(start, min(start + GROUP, count))]
        for tokens, mask in encoder.dialogues(chunk):
            counts = np.bincount(tokens[mask])
            written = np.pad(written, (0, max(len(counts) - len(written), 0)))
            written[: len(counts)] += counts
    written[[*ends]] = np.iinfo(np.int64).max
    return np.argsort(-written, kind="stable")


def stage_data(
    recipe: StagedRecipe,
    stage: Stage,
    sources: Mapping[str, Any],
    target: LoadedModel,
    draft: LoadedModel,
    **options: Any,
) -> tuple[ConversationBatches, dict[str, Any]]:
    """Return a stage's batches, and what decides them except the target, for `fit`.

    Args:
      sources: Data sets by their names.
      options: More fields of `ConversationBatches`.
    """
    train = stage.train
    mesh = train.make_mesh()
    batches = ConversationBatches(
        mixture([(sources[name], weight) for name, weight in stage.data], train.seed),
        replace(prompt_encoder(target), system=recipe.system),
        replace(draft, params={}),
        train.batch,
        recipe.buckets,
        recipe.tile_buckets,
        target_images=target.images,
        seed=train.seed,
        process=process_share(mesh),
        packing=train.packing,
        plain=stage.plain,
        **options,
    )
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    if batches.rows % (devices * train.accumulate):
        raise InputError(
            f"{stage.name}.packing: {train.batch} samples fill {batches.rows} rows, which do not "
            f"divide over {devices} devices in {train.accumulate} parts; give a larger batch, or "
            f"--{stage.name}.no-packing"
        )
    earlier = recipe.stages[: recipe.stages.index(stage)]
    system = {"system": recipe.system} if recipe.system else {}
    data = [(name, weight, sources[name]) for name, weight in stage.data]
    return batches, system | {
        "buckets": recipe.buckets,
        "units": recipe.tile_buckets,
        "data": [
            (name, weight, len(source), data_signature(source)) for name, weight, source in data
        ],
        "before": {stage.name: stage.train.steps for stage in earlier},
        "plain": stage.plain,
    }


def with_data(recipe: AnyRecipe, entries: Sequence[str]) -> tuple[AnyRecipe, dict[str, Path]]:
    """Return a recipe with the data of a command line's `--data`, and the paths of data sets.

    Args:
      entries: PATH of a prepared data set for all stages, several mixed equally; or NAME=PATH, the
        path of one that a stage names.

    Raises InputError for a NAME that no stage reads.
    """
    if unnamed := tuple((entry, 1.0) for entry in entries if "=" not in entry):
        stages = tuple(replace(stage, data=unnamed) for stage in recipe.stages)
        recipe = replace(recipe, stages=stages)
    paths = {
        name: local_path(path or name)
        for name, _, path in (entry.partition("=") for entry in entries)
    }
    for name in paths:
        if name not in recipe.data_sets:
            mend = nearest(name, recipe.data_sets)
            raise InputError(f"--data {name}: no stage reads it; {mend}")
    return recipe, paths


def open_sources(recipe: StagedRecipe, data: DataSets | None) -> dict[str, Sequence[Sample]]:
    """Return the data sets that a recipe reads, by name."""
    return {name: _open(name, data or {}) for name in recipe.data_sets}


def _open(name: str, data: DataSets) -> Sequence[Sample]:
    path = data.get(name, PREPARED / name)
    if not isinstance(path, Path):
        return path
    if name not in data and not path.is_dir():
        raise InputError(
            f"data {name}: not in {PREPARED}; make it by its command in docs/data.md "
            f"(Data of the recipes), or give --data {name}=PATH"
        )
    return Prepared(path)

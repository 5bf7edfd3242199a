"""Load an evaluation's models, and check which of its rows can be measured."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.questions.sets import MMSPEC
from eval.lib.standins.replay import PREFIX as REPLAY
from eval.lib.standins.replay import RecordedTarget, engine_of
from eval.lib.standins.synthetic import PREFIX as SYNTHETIC
from eval.lib.standins.synthetic import parse_synthetic, synthetic_model
from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.locating import locate
from jaxspec.cluster import process
from jaxspec.data.rows import local_rows
from jaxspec.decoding.drafting.rules import parse_weighting
from jaxspec.engine.captioners import check_captioner, load_captioner, parse_captioner
from jaxspec.engine.drafts import HEAD
from jaxspec.engine.engine import Engine, EngineConfig
from jaxspec.errors import InputError, collected
from jaxspec.files import local_path
from jaxspec.heads.loading import is_head, read_draft_config
from jaxspec.loading.models import LoadedDraft, LoadedModel, load_draft
from jaxspec.loading.pairs import check_drafts
from jaxspec.models.int8 import Weights, int8_params
from jaxspec.prompts.captions import Captioner
from jaxspec.sharding import shardings


def measurable(
    rows: tuple[Variant, ...],
    target: str,
    drafts: Sequence[str],
    captioner: str | None,
    width: int | None = None,
) -> tuple[tuple[Variant, ...], dict[str, str]]:
    """Return the rows that can be measured here, and the reason for each other row.

    Raises InputError if no row is left.
    """
    needed = captioner if any("C" in row.views for row in rows) else None
    lack: list[str] = []
    if needed is not None and parse_captioner(needed)[0] != "file":  # a file is checked later
        with collected(lack):
            check_captioner(needed)
    no_captions = "".join(lack)
    heads = _are_heads(drafts)
    lacks: dict[str, str] = {}
    for row in rows:
        why = (target.startswith(REPLAY) and _lacks_for(row)) or ("C" in row.views and no_captions)
        if not why and row.draft_views and False not in heads:
            why = "it needs a draft model; give one with --draft"
        if not why and HEAD in row.views and True not in heads:
            why = "it needs a head; give one with --draft"
        if row.tree and width:
            why = "passes over a tree have no fixed width; leave out --width"
        if why:
            lacks[row.name] = why
    if len(lacks) == len(rows):
        raise InputError(f"rows: none can be measured; {'; '.join(by_reason(lacks))}")
    for line in by_reason(lacks):
        print(f"rows left out: {line}", file=sys.stderr)
    return tuple(row for row in rows if row.name not in lacks), lacks


def _are_heads(drafts: Sequence[str]) -> set[bool]:
    """Return whether heads, models or both are among drafts; both where one cannot be read."""
    with suppress(InputError):  # `check_files` reports it
        return set(map(_is_head, drafts))
    return {False, True}


def _is_head(name: str) -> bool:
    return not name.startswith(SYNTHETIC) and is_head(locate(name, files=("config.json",)))


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason: its names, and the reason."""
    return [
        f"{', '.join(name for name in reasons if reasons[name] == why)}: {why}"
        for why in dict.fromkeys(reasons.values())
    ]


def _lacks_for(row: Variant) -> str | None:
    """Return why recorded answers cannot serve this row; None if they can."""
    if HEAD in row.views:
        return "recorded answers have no keys and values; give a model as target"
    if not parse_weighting(row.weighting).hard_labels:
        return "recorded answers have no probabilities to learn from; give a model as target"
    return None


class Loaded(NamedTuple):
    """Hold the models of an evaluation."""

    target: LoadedModel
    drafts: tuple[LoadedDraft, ...]
    captioner: Captioner | None

    @property
    def draft(self) -> LoadedModel | None:
        """Return the draft model, if there is one."""
        models = (draft for draft in self.drafts if isinstance(draft, LoadedModel))
        return next(models, None)

    def engine(self, row: Variant, config: EngineConfig) -> Engine:
        """Return an engine with the drafts of a row."""
        drafts = [
            draft
            for draft in self.drafts
            if (row.draft_views if isinstance(draft, LoadedModel) else HEAD in row.views)
        ]
        return engine_of(self.target, drafts, config, self.captioner)

    def engines(self, config: EvalConfig) -> dict[str, Engine]:
        """Return the engines of the config's rows, by name."""
        return {row.name: self.engine(row, config.engine(row)) for row in config.rows}


def load_model(
    name: str,
    dtype: str,
    tiles: bool = True,
    share_tower_with: LoadedModel | None = None,
    mesh: Mesh | None = None,
    weights: Weights | None = None,
    adapter: str | None = None,
) -> LoadedModel:
    """Load the model of a directory, hub id, or `synthetic:ROLE:SHARE`."""
    if name.startswith(SYNTHETIC):
        if adapter is not None:
            raise InputError(f"adapter {adapter}: {name} takes none; leave it out")
        model = synthetic_model(name, jnp.dtype(dtype))
        params = model.params if weights is None else int8_params(model.params)
        places = None if mesh is None else shardings(model.config, params, mesh)
        return replace(model, params=jax.device_put(params, places))
    return LoadedModel.load(
        name,
        jnp.dtype(dtype),
        tiles=tiles,
        share_tower_with=share_tower_with,
        mesh=mesh,
        weights=weights,
        adapter=adapter,
    )


def load_models(config: EvalConfig) -> Loaded:
    """Load the target, its drafts, and the captioner that the rows need, in the preset's dtype.

    Equal vision towers are held once. A target `replay:FILE` is a file of recorded answers.
    """
    rows = config.rows
    captioner = config.captioner if any("C" in row.views for row in rows) else None
    check_files(config, captioner)
    if config.target.startswith(REPLAY):
        if config.target_weights is not None:
            raise InputError("target_weights: recorded answers have none; leave it out")
        if config.adapter is not None:
            raise InputError("adapter: recorded answers take none; leave it out")
        models = [name for name in config.draft if not _is_head(name)]
        if len(models) != 1:
            raise InputError(f"draft: {len(models)} models for recorded answers; give one")
        draft = load_model(models[0], config.dtype, config.tiles)
        path = local_path(config.target.removeprefix(REPLAY))
        target: LoadedModel = RecordedTarget.read(path, draft)
        drafts: tuple[LoadedDraft, ...] = (draft,)
    else:
        if not config.target.startswith(SYNTHETIC):
            check_drafts(config.target, [x for x in config.draft if not x.startswith(SYNTHETIC)])
        target = load_model(
            config.target,
            config.dtype,
            config.tiles,
            mesh=config.mesh(config.batch_size),
            weights=config.target_weights,
            adapter=config.adapter,
        )
        drafts = tuple(
            load_model(name, config.dtype, config.tiles, target)
            if name.startswith(SYNTHETIC)
            else load_draft(name, target, jnp.dtype(config.dtype), tiles=config.tiles)
            for name in config.draft
        )
    if process()[0] == 0:
        print(f"target {config.target}\ndraft  {', '.join(config.draft)}", file=sys.stderr)
    if captioner is None:
        return Loaded(target, drafts, None)
    writer = load_captioner(captioner, jnp.dtype(config.dtype), share_tower_with=target)
    return Loaded(target, drafts, writer)


def check_files(config: EvalConfig, captioner: str | None = None) -> None:
    """Raise InputError for missing models, heads, captions and data, before anything is loaded."""
    for source in (config.target, *config.draft):
        if source.startswith(REPLAY):
            next(local_rows(local_path(source.removeprefix(REPLAY))), None)
        elif source.startswith(SYNTHETIC):
            parse_synthetic(source)
        elif source == config.target:
            read_config(locate(source))
        else:
            read_draft_config(locate(source))
    if captioner is not None:
        check_captioner(captioner)
    for name in config.sets:
        if name in config.places or name == MMSPEC:
            for turn in config.turns_of(name):
                config.samples(name, turn)


def split_view(entry: str) -> tuple[str, str]:
    """Split DIRECTORY:VIEW in two; without one, the view is empty."""
    path, _, view = entry.rpartition(":")
    return (path, view) if path and "/" not in view else (entry, "")


def named_places(option: str, entries: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Return the places in an option's NAME=PLACE, by name.

    taken: Names of other rows of the table.

    Raises InputError for another form, and for a name that is taken or given twice.
    """
    places: dict[str, str] = {}
    for entry in entries:
        name, _, place = entry.partition("=")
        if not (name and place):
            raise InputError(f"{option}: {entry!r} is not NAME=DIRECTORY")
        if name in taken or name in places:
            raise InputError(f"{option}: there is a row {name!r} already; give another name")
        places[name] = place
    return places

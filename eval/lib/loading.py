"""Loading of an evaluation's models, and the check which of its rows can be measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eval.lib.config import EvalConfig, Variant
from eval.lib.replay import PREFIX as REPLAY
from eval.lib.replay import RecordedTarget, engine_of
from eval.lib.sets import MMSPEC
from eval.lib.synthetic import PREFIX as SYNTHETIC
from eval.lib.synthetic import parse_synthetic, synthetic_model
from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.cluster import process
from jaxspec.data.rows import local_rows
from jaxspec.decoding.captioners import captioner_lack, check_captioner, load_captioner
from jaxspec.decoding.engine import Engine, EngineConfig
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError
from jaxspec.files import local_path
from jaxspec.loading import LoadedModel
from jaxspec.models.int8 import Weights, int8_params
from jaxspec.prompts.captions import Captioner
from jaxspec.prompts.views import parse_views, prompt_views
from jaxspec.sharding import shardings


def measurable(
    rows: tuple[Variant, ...],
    target: str,
    draft: str,
    captioner: str | None,
    width: int | None = None,
) -> tuple[tuple[Variant, ...], dict[str, str]]:
    """Return the rows that can be measured here, and the reason for each other row.

    Raises InputError if no row is left.
    """
    wanted = captioner if any("C" in row.views for row in rows) else None
    no_captions = None if wanted is None else captioner_lack(wanted)
    lacks: dict[str, str] = {}
    for row in rows:
        why = (target.startswith(REPLAY) and _lacks_for(row)) or ("C" in row.views and no_captions)
        if not (why or draft) and prompt_views(parse_views(row.views)):
            why = "it needs a draft; give --draft"
        if row.tree and width:
            why = "passes over a tree have no fixed width; leave out --width"
        if why:
            lacks[row.name] = why
    if len(lacks) == len(rows):
        raise InputError(f"rows: none can be measured; {'; '.join(by_reason(lacks))}")
    for line in by_reason(lacks):
        print(f"rows left out: {line}", file=sys.stderr)
    return tuple(row for row in rows if row.name not in lacks), lacks


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each reason: its names, and the reason."""
    return [
        f"{', '.join(name for name in reasons if reasons[name] == why)}: {why}"
        for why in dict.fromkeys(reasons.values())
    ]


def _lacks_for(row: Variant) -> str | None:
    """Return why recorded answers cannot serve this row; None if they can."""
    if "kv" in row.views:
        return "recorded answers have no keys and values; give a model as target"
    if not parse_weighting(row.weighting).hard_labels:
        return "recorded answers have no probabilities to learn from; give a model as target"
    return None


class Loaded(NamedTuple):
    """The models of an evaluation."""

    target: LoadedModel
    draft: LoadedModel | None
    captioner: Captioner | None

    def engine(self, config: EngineConfig) -> Engine:
        """Return an engine that drafts."""
        return engine_of(self.target, self.draft, config, self.captioner)

    def engines(self, config: EvalConfig) -> dict[str, Engine]:
        """Return the engines of the config's rows, by name."""
        return {row.name: self.engine(config.engine(row)) for row in config.rows}


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


def load_models(config: EvalConfig, views: Sequence[str] | None = None) -> Loaded:
    """Load the target, and the draft and captioner that the rows need, in the preset's dtype.

    Equal vision towers are held once. A target `replay:FILE` is a file of recorded answers. `views`
    replaces the views of the preset's rows.
    """
    shown = [name for row in config.rows for name in row.views] if views is None else views
    head = config.kv_head if "kv" in shown else None
    captioner = config.captioner if "C" in shown else None
    check_files(config, head, captioner)
    draft = None
    if config.target.startswith(REPLAY):
        if config.target_weights is not None:
            raise InputError("target_weights: recorded answers have none; leave it out")
        if config.adapter is not None:
            raise InputError("adapter: recorded answers take none; leave it out")
        draft = load_model(config.draft, config.dtype, config.tiles)
        target: LoadedModel = RecordedTarget.read(
            local_path(config.target.removeprefix(REPLAY)), draft
        )
    else:
        target = load_model(
            config.target,
            config.dtype,
            config.tiles,
            mesh=config.mesh(config.batch_size),
            weights=config.target_weights,
            adapter=config.adapter,
        )
        if config.draft:
            draft = load_model(config.draft, config.dtype, config.tiles, target)
    if head is not None:
        target = target.with_head(head)
    if process()[0] == 0:
        print(f"target {config.target}\ndraft  {config.draft or head}", file=sys.stderr)
    if captioner is None:
        return Loaded(target, draft, None)
    writer = load_captioner(captioner, jnp.dtype(config.dtype), share_tower_with=target)
    return Loaded(target, draft, writer)


def check_files(config: EvalConfig, head: str | None = None, captioner: str | None = None) -> None:
    """Raise InputError for missing models, heads, captions and data, before anything is loaded."""
    for place in filter(None, (config.target, config.draft)):
        if place.startswith(REPLAY):
            next(local_rows(local_path(place.removeprefix(REPLAY))), None)
        elif place.startswith(SYNTHETIC):
            parse_synthetic(place)
        else:
            read_config(locate(place))
    if head is not None and not is_kv_head(locate(head, wanted=("config.json",))):
        raise InputError(f"kv_head {head}: not a KV head; give the directory of one")
    if captioner is not None:
        kind, where, _ = check_captioner(captioner)
        if kind == "jax":
            read_config(locate(where))
        elif kind == "file" and not local_path(captioner.removeprefix("file:")).is_file():
            raise InputError(f"captioner {captioner}: no such file; check the path")
    for name in config.sets:
        if name in config.places or name == MMSPEC:
            for turn in config.turns_of(name):
                config.samples(name, turn)


def split_view(place: str) -> tuple[str, str]:
    """Split DIRECTORY:VIEW in two; without one, the view is empty."""
    path, _, view = place.rpartition(":")
    return (path, view) if path and "/" not in view else (place, "")


def split_name(entry: str) -> tuple[str, str]:
    """Split NAME=PLACE in two."""
    name, _, place = entry.partition("=")
    if not (name and place):
        raise InputError(f"{entry!r} is not NAME=DIRECTORY")
    return name, place

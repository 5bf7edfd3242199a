"""Recipes of heads: a head for a target, and the stages that train it."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.checkpoints.heads import load_head
from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.config import HeadConfig
from jaxspec.config.heads.head import check_rotary
from jaxspec.config.heads.kinds import new_head
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import text_params
from jaxspec.models.heads.kinds import init_head
from jaxspec.sharding import shardings
from jaxspec.training.heads.anchors import Anchoring, HeadBatches
from jaxspec.training.heads.loss import make_loss, read_target
from jaxspec.training.heads.readings import KeptReadings
from jaxspec.training.loop.signatures import model_signature
from jaxspec.training.loop.trainer import fit
from jaxspec.training.reading import iterate
from jaxspec.training.recipes import DataSets, StagedRecipe, draft_words, open_sources, stage_data
from jaxspec.typing import Params


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(StagedRecipe):
    """Describe a head, for any target but OPT, and its training."""

    head: dict[str, Any]
    """Options of `new_head`."""
    anchoring: Anchoring
    start: str = ""
    """Directory or hub id of a head of the same kind to train on; empty starts a fresh one."""
    chosen: tuple[str, ...] = ()
    """Names in `head` that a start must have; others that decide its parameters give way to it."""
    keep_readings: str = ""
    """Folder to keep the target's passes in, D + 2 K H numbers a token; empty keeps none."""


def train_head(
    recipe: HeadRecipe, directory: Path, data: DataSets | None = None
) -> tuple[HeadConfig, Params]:
    """Train the stages one after the other, and return the head's configuration and parameters.

    A stopped run goes on.

    Args:
      directory: Folder of the stages' folders; stage NAME writes to DIRECTORY/NAME.
      data: Paths or samples of the data sets that are not under `runs/data`.

    Raises InputError for targets and data that do not fit.
    """
    sources, first = open_sources(recipe.stages, data), recipe.stages[0].train
    target = LoadedModel.load(recipe.target, jnp.dtype(first.dtype), mesh=first.make_mesh())
    name = model_name(locate(recipe.target))
    config = new_head(target.config, target_name=name, **recipe.head)
    vocabulary = draft_words(recipe, sources, target)
    if config.orders_vocabulary:
        vocabulary = tuple(sorted(vocabulary))
    if recipe.start:
        trained, head = load_head(recipe.start, jnp.float32)
        try:
            config = config.started(trained, vocabulary, target.config)
            _check_chosen(recipe, config)
        except InputError as error:
            raise InputError(f"start {recipe.start}: {error}") from None
    else:
        text = replace(config.text_config, draft_vocabulary=vocabulary)
        config = replace(config, text_config=text)
        decoder = text_params(target.config, target.params)
        offset = check_rotary(target.model.text).norm_offset
        head = init_head(config, decoder, jax.random.key(first.seed), offset)

    def sharding_of(mesh: Mesh) -> Params:
        return {
            "head": shardings(config.text_config, head, mesh),
            "target": shardings(target.config, target.params, mesh),
        }

    readings = None
    if recipe.keep_readings:
        if jax.process_count() > 1:
            raise InputError("keep_readings: works only in one process; leave it out")
        read = jax.jit(partial(read_target, target.model), static_argnums=2)
        reads = config.reads, first.dtype
        name = hashlib.sha256(repr((model_signature(recipe.target), reads)).encode()).hexdigest()
        readings = KeptReadings(
            lambda batch: read(target.params, batch, config), Path(recipe.keep_readings, name[:16])
        )
    loss_fn = make_loss(target.model, config, recipe.anchoring)
    for stage in recipe.stages:
        conversations, inputs = stage_data(recipe, stage, sources, target, target)
        inputs |= {"head": config.options(), "anchoring": asdict(recipe.anchoring)}
        if recipe.start:
            inputs["start"] = model_signature(recipe.start)
        batches = HeadBatches(conversations, config, recipe.anchoring, stage.train.seed, readings)
        fixed = ("target", *(f"head/{name}" for name in config.fixed))
        train = replace(stage.train, frozen=(*stage.train.frozen, *fixed))
        params = {"head": head, "target": target.params}
        out = directory / stage.name
        ahead = iterate(conversations, train.steps, batches, recipe.unlearned)
        with closing(ahead):
            more: Any = {"sharding_of": sharding_of, "inputs": inputs}
            head = fit(train, params, loss_fn, ahead, out, **more)["head"]
    return config, head


def _check_chosen(recipe: HeadRecipe, started: HeadConfig) -> None:
    """Raise InputError for a chosen option of the head that its start decides otherwise."""
    kept = started.kept_options
    for name in recipe.chosen:
        if name in kept and kept[name] != recipe.head[name]:
            raise InputError(
                f"its {name} is {kept[name]!r:.60}, not {recipe.head[name]!r:.60}; "
                f"leave out --head.{name.replace('_', '-')}"
            )

"""Train heads by recipes: a head for a target, and the stages that train it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.locating import SMALL, locate, model_name
from jaxspec.config import ModelConfig
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig, check_rotary
from jaxspec.heads.loading import load_head
from jaxspec.heads.making import head_shardings, init_head, new_head
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import text_params
from jaxspec.sharding import shardings
from jaxspec.training.decoded import decoded
from jaxspec.training.head_batches import Anchoring, HeadBatches, KeptReadings
from jaxspec.training.head_loss import make_loss, read_target
from jaxspec.training.loop.dry import dry_run
from jaxspec.training.loop.reading import CountedBatches
from jaxspec.training.loop.signatures import model_signature
from jaxspec.training.loop.step import check_patterns
from jaxspec.training.loop.trainer import fit
from jaxspec.training.recipes import (
    DataSets,
    Run,
    StagedRecipe,
    draft_words,
    open_sources,
    stage_data,
)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_readings and any(stage.train.packing for stage in self.stages):
            names = " ".join(f"--{stage.name}.no-packing" for stage in self.stages)
            raise InputError(f"keep_readings: packed rows never come again; give {names}")


def train_heads(
    recipes: Mapping[str, HeadRecipe],
    directory: Path,
    data: DataSets | None = None,
    run: Run = fit,
) -> dict[str, tuple[HeadConfig, Params]]:
    """Train heads of one target by the same passes of it, each as it would learn by itself.

    The stages come one after the other. A stopped run goes on.

    Args:
      recipes: Recipes by the names of their heads, which differ in `OWN` only; one has `ALONE`.
      directory: Folder of the stages' folders; stage NAME writes to DIRECTORY/NAME.
      data: Paths or samples of the data sets that are not under `runs/data`.
      run: What runs a stage: `fit`, or `dry_run`.

    Raises InputError for recipes that differ, and for targets and data that do not fit.
    """
    recipe = _common_recipe(recipes)
    for option in ("keep_readings", "held_out"):
        if getattr(recipe, option) and jax.process_count() > 1:
            raise InputError(f"{option}: works only in one process; leave it out")
    sources, first = open_sources(recipe, data), recipe.stages[0].train
    for each in recipes.values():  # before gigabytes are read
        _fresh_config(each, read_config(locate(recipe.target, files=SMALL)))
    target = LoadedModel.load(recipe.target, jnp.dtype(first.dtype), mesh=first.make_mesh())
    vocabulary = draft_words(recipe, sources, target)
    configs: dict[str, HeadConfig] = {}
    params: Params = {"target": target.params}
    for name, each in recipes.items():
        configs[name], head = _started(each, target, vocabulary)
        params = {**params, name: head}

    def sharding_of(mesh: Mesh) -> Params:
        placed = {name: head_shardings(configs[name], params[name], mesh) for name in configs}
        return placed | {"target": shardings(target.config, target.params, mesh)}

    readings, signature = None, model_signature(recipe.target)
    only, *others = recipes
    if recipe.keep_readings and run is not dry_run:  # a dry run writes nothing
        read = jax.jit(partial(read_target, target.model), static_argnums=2)
        reads = configs[only].reads, first.dtype
        digest = hashlib.sha256(repr((signature, reads)).encode()).hexdigest()
        folder = Path(recipe.keep_readings, digest[:16])
        readings = KeptReadings(lambda batch: read(target.params, batch, configs[only])[0], folder)
    heads = {name: (configs[name], each.anchoring) for name, each in recipes.items()}
    loss = make_loss(target.model, heads)
    deciding = {name: _deciding_inputs(configs[name], each) for name, each in recipes.items()}
    fixed = [
        f"{re.escape(name)}/{part}" for name, config in configs.items() for part in config.fixed
    ]
    # Refuse what does not fit in a later stage before the first is trained for hours.
    stages = []
    for stage in recipe.stages:
        train = replace(stage.train, frozen=(*stage.train.frozen, "target", *fixed))
        check_patterns(train, params)
        stages.append((stage, train, *stage_data(recipe, stage, sources, target, target)))
    for stage, train, conversations, inputs in stages:
        inputs |= {"target": signature} | ({"heads": deciding} if others else deciding[only])
        make = HeadBatches(conversations, heads, stage.train.seed, readings)
        out = directory / stage.name
        evaluate = None
        if recipe.held_out and train.evaluate_every:
            lengths, held_out = (recipe.buckets, recipe.tile_buckets), sources[recipe.held_out]
            evaluate = decoded(target, only, configs[only], held_out, lengths, out)
        with closing(CountedBatches(conversations, train.steps, make, recipe.unlearned)) as batches:
            more: dict[str, Any] = {"sharding_of": sharding_of, "evaluate": evaluate}
            more |= {"inputs": inputs, "apart": tuple(heads)}
            params = run(train, params, loss, batches, out, **more)
    return {name: (config, params[name]) for name, config in configs.items()}


ALONE = "head"
"""Name of a single head among the parameters."""
OWN = ("head", "anchoring", "start", "chosen")
"""Fields in which recipes may differ whose heads learn by the same passes of the target."""


def _common_recipe(recipes: Mapping[str, HeadRecipe]) -> HeadRecipe:
    """Return what recipes have in common; several keep no passes of the target.

    Raises InputError where they differ, and for a name that begins with `target`.
    """
    (name, first), *others = recipes.items()
    # Patterns of `frozen` match the beginning of a path, so "target" would freeze such a head too.
    if clash := next((head for head in recipes if head.startswith("target")), None):
        raise InputError(f"{clash}: begins with 'target', whose parameters stay; rename the recipe")
    if others and first.held_out:
        raise InputError(f"held_out {first.held_out}: works only with one recipe; leave it out")
    for other, recipe in others:
        for field in fields(recipe):
            value, other_value = getattr(first, field.name), getattr(recipe, field.name)
            if field.name not in OWN and value != other_value:
                raise InputError(
                    f"{name} and {other}: differ in {field.name}, so they share no pass of a "
                    f"target: {value!r:.80} and {other_value!r:.80}; train each by itself"
                )
    return replace(first, keep_readings="") if others else first


def _started(
    recipe: HeadRecipe, target: LoadedModel, vocabulary: tuple[int, ...]
) -> tuple[HeadConfig, Params]:
    """Return the configuration and the parameters with which a head begins."""
    first, config = recipe.stages[0].train, _fresh_config(recipe, target.config)
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
    return config, head


def _fresh_config(recipe: HeadRecipe, target: ModelConfig) -> HeadConfig:
    """Return the configuration of a new head; InputError for options that do not fit."""
    name = model_name(locate(recipe.target, files=SMALL))
    config = new_head(target, target_name=name, **recipe.head)
    if not config.packs and any(stage.train.packing for stage in recipe.stages):
        raise InputError(f"packing: {config.title}s learn from rows of one sample; leave it out")
    return config


def _deciding_inputs(config: HeadConfig, recipe: HeadRecipe) -> dict[str, Any]:
    """Return what decides a head's result, except the data and the target."""
    inputs = {"head": config.options(), "anchoring": asdict(recipe.anchoring)}
    return inputs | ({"start": model_signature(recipe.start)} if recipe.start else {})


def _check_chosen(recipe: HeadRecipe, started: HeadConfig) -> None:
    """Raise InputError for a chosen option of the head that its start decides otherwise."""
    decided = started.kept_options
    for name in recipe.chosen:
        if name in decided and decided[name] != recipe.head[name]:
            raise InputError(
                f"its {name} is {decided[name]!r:.60}, not {recipe.head[name]!r:.60}; "
                f"leave out --head.{name.replace('_', '-')}"
            )

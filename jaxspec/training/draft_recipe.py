"""Train a draft model by a recipe: its start, and the stages that train it for its target.

| start | view | draft |
|---|---|---|
| an LVLM | any | the LVLM, trained on |
| a configuration of an LVLM | any | a fresh LVLM with the target's tower |
| a text model, or its configuration | M, P | it, with the target's tower and a fresh projector |
| a text model, or its configuration | T, C | the text model |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints import adapters
from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.huggingface import read_params
from jaxspec.checkpoints.locating import SMALL, locate
from jaxspec.checkpoints.tower import read_tower, tower_files
from jaxspec.config import (
    LlavaConfig,
    LvlmConfig,
    ModelConfig,
    RotaryConfig,
    text_config,
    with_text,
)
from jaxspec.data.prepared import mixture
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError, located
from jaxspec.loading.models import LoadedModel
from jaxspec.loading.pairs import check_tokens
from jaxspec.models.families import init_params, split_tower
from jaxspec.models.lora import LORA, Lora, init_lora
from jaxspec.models.vocabulary import narrowed
from jaxspec.prompts.views import parse_view
from jaxspec.publishing.export import with_vocabulary
from jaxspec.sharding import replicated, shardings
from jaxspec.training.conversations import ConversationBatches
from jaxspec.training.loop.reading import CountedBatches
from jaxspec.training.loop.signatures import model_signature
from jaxspec.training.loop.step import check_patterns
from jaxspec.training.loop.trainer import Evaluate, fit
from jaxspec.training.objectives import (
    TEACHER,
    Distillation,
    simulated,
    teacher_params,
    tuning_loss,
    without_teacher,
)
from jaxspec.training.recipes import (
    DataSets,
    Run,
    StagedRecipe,
    draft_words,
    open_sources,
    stage_data,
)
from jaxspec.typing import Params

HELD_OUT = 8
"""Batches on which tokens per pass are simulated."""


@dataclass(frozen=True, kw_only=True)
class Recipe(StagedRecipe):
    """Describe a draft for a target, and its training."""

    start: str | RotaryConfig | LlavaConfig
    """Directory or hub id of a model, or the configuration of a fresh one."""
    view: str = "M"
    """View of the prompts, the same as in drafting."""
    distillation: Distillation | None = None
    lora: Lora | None = None
    """Low-rank updates to train next to the parameters that are not frozen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora and self.draft_vocabulary:
            raise InputError(
                f"draft_vocabulary: {self.draft_vocabulary} with lora, whose adapter scores the "
                "tokens of its base; give 0"
            )


def train_draft(
    recipe: Recipe, directory: Path, data: DataSets | None = None, run: Run = fit
) -> LoadedModel:
    """Train the stages one after the other and return the draft. A stopped run goes on.

    With low-rank updates, the parameters hold these apart, as `merged` reads them.

    Args:
      directory: Folder of the stages' folders; stage NAME writes to DIRECTORY/NAME.
      data: Paths or samples of the data sets that are not under `runs/data`.
      run: What runs a stage: `fit`, or `dry_run`.

    Raises InputError for models and data that do not fit, and what `fit` raises.
    """
    sources = open_sources(recipe, data)
    target, draft = _loaded(recipe, sources)
    view, teacher = parse_view(recipe.view), target if recipe.distillation else None
    reader = teacher and replace(teacher, params={})
    stages = [
        (stage, *stage_data(recipe, stage, sources, target, draft, view=view, teacher=reader))
        for stage in recipe.stages
    ]
    for stage in recipe.stages[1:]:  # before the first is trained for hours
        check_patterns(stage.train, draft.params)
    deciding = _deciding_inputs(recipe, draft)
    teaching = teacher and teacher.model
    loss = tuning_loss(draft.model, view, teaching, recipe.distillation, recipe.lora)
    for stage, batches, inputs in stages:
        train, params = stage.train, draft.params
        if teacher is not None:
            params = {**params, TEACHER: teacher_params(teacher, draft, view, train.frozen)}
            train = replace(train, frozen=(*train.frozen, TEACHER))
        evaluate = None
        if recipe.held_out and train.evaluate_every:
            evaluate = _simulation(recipe, draft, batches, sources[recipe.held_out])
        more: dict[str, Any] = {
            "sharding_of": partial(_placement, draft.config, target.config, params),
            "evaluate": evaluate,
            "inputs": inputs | deciding,
        }
        with closing(CountedBatches(batches, train.steps, limit=recipe.unlearned)) as counted:
            params = run(train, params, loss, counted, directory / stage.name, **more)
        draft = replace(draft, params=without_teacher(params))
    return draft


def _loaded(recipe: Recipe, sources: Mapping[str, Any]) -> tuple[LoadedModel, LoadedModel]:
    """Return (target, draft) on the host; the target has no weights if it does not teach."""
    try:
        (host, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:
        mend = "add cpu to JAX_PLATFORMS, behind the accelerator"
        raise InputError(f"JAX_PLATFORMS: JAX has no CPU backend; {mend}") from None
    with jax.default_device(host):  # `fit` places it on the mesh
        teaches = recipe.distillation is not None  # else the draft takes the tower at most
        load = LoadedModel.load if teaches else LoadedModel.without_weights
        target = load(recipe.target)
        draft = start_draft(recipe, target)
        if vocabulary := draft_words(recipe, sources, target):
            config, params = narrowed(draft.config, draft.params, vocabulary)
            draft = replace(draft, config=config, params=params)
        top_k = recipe.distillation and recipe.distillation.top_k
        scored = min(draft.model.text.scored_tokens, target.model.text.vocab_size)
        if top_k and top_k > scored:
            raise InputError(f"distillation: top_k {top_k} of {scored} scored tokens; give fewer")
        if recipe.lora and LORA not in draft.params:
            key = jax.random.key(recipe.stages[0].train.seed)
            pairs = init_lora(recipe.lora, draft.params, key)
            draft = replace(draft, params={**draft.params, LORA: pairs})
    return target, draft


def start_draft(recipe: Recipe, target: LoadedModel) -> LoadedModel:
    """Return the model that the first stage trains, in float32 if it is fresh.

    Args:
      target: Target; without weights, a tower that the draft takes is read from its files.

    Raises InputError for a start whose token ids mean other words than the target's.
    """
    key = jax.random.key(recipe.stages[0].train.seed)

    def tower() -> Params:
        if target.params:
            return split_tower(target.params)[0]
        return read_tower(recipe.target, jnp.dtype("float32"))

    if recipe.lora and (folder := _adapter(recipe)):
        base = locate(adapters.base_of(folder))
        config, tensors, adapter = adapters.composed(folder, base)
        with located(f"start {recipe.start}"):
            pairs = adapters.read_pairs(adapter, recipe.lora)
        params = {**read_params(config, tensors), LORA: pairs}
        return replace(target, config=config, params=params)
    if isinstance(recipe.start, str):
        start = _learning_every_token(LoadedModel.load(recipe.start))
        grows = _takes_tower(recipe, start.config)  # it then gets the tokeniser, too
        names = f"start {recipe.start}:", "the target"
        check_tokens(target.tokenizer, start.tokenizer, *names, grows=grows)
    elif isinstance(recipe.start, LlavaConfig):
        params = {**init_params(recipe.start, key), **tower()}
        start = LoadedModel(recipe.start, params, target.tokenizer, target.image_processor)
    else:
        start = LoadedModel(recipe.start, init_params(recipe.start, key), target.tokenizer, None)
    if parse_view(recipe.view).counts_slots:
        return _with_placeholder(recipe, start, target.config)
    if not _takes_tower(recipe, start.config):
        return start
    if not isinstance(target.config, LlavaConfig) or not isinstance(start.config, RotaryConfig):
        kinds = f"a {start.config.model_type} cannot get the tower of a {target.config.model_type}"
        raise InputError(f"start {recipe.start}: {kinds}")
    vocab_size = text_config(target.config).vocab_size
    # Rotary positions have no parameters, so rows longer than the start's positions train them.
    positions = max(start.config.max_position_embeddings, *recipe.buckets)
    text = replace(start.config, vocab_size=vocab_size, max_position_embeddings=positions)
    config: ModelConfig = replace(target.config, text_config=text)
    params = {**init_params(config, key), **tower()}
    params["language_model"] = _padded_vocabulary(recipe, start, vocab_size)
    return LoadedModel(config, params, target.tokenizer, target.image_processor)


def adapter_base(recipe: Recipe) -> str:
    """Return the name of the model that a recipe's adapter is written for."""
    folder = _adapter(recipe)
    base = recipe.lora.base if recipe.lora else ""
    return base or (adapters.base_of(folder) if folder else str(recipe.start))


def _adapter(recipe: Recipe) -> Path | None:
    """Return the folder of the adapter that a recipe trains on; None for another start."""
    if not recipe.lora or not isinstance(recipe.start, str):
        return None
    folder = Path(recipe.start).expanduser()
    return folder if (folder / adapters.CONFIG).is_file() else None


def _start_signature(recipe: Recipe) -> dict[str, Any]:
    """Return the inputs of a run that identify the draft's start."""
    start = recipe.start
    if folder := _adapter(recipe):
        weights = [folder / name for name in (adapters.WEIGHTS, adapters.BIN)]
        base = model_signature(adapters.base_of(folder))
        return {"start": model_signature(str(recipe.start), weights), "base": base}
    return {"start": model_signature(start) if isinstance(start, str) else asdict(start)}


def _learning_every_token(start: LoadedModel) -> LoadedModel:
    """Return a draft that may learn every token."""
    config, text = start.config, text_config(start.config)
    if not isinstance(text, RotaryConfig) or not text.known_tokens:
        return start
    whole = with_text(config, known_tokens=0)
    return replace(start, config=whole)


def _with_placeholder(recipe: Recipe, start: LoadedModel, target: ModelConfig) -> LoadedModel:
    """Return a text model with the target's vocabulary, which has the images' placeholder."""
    vocab_size = text_config(target).vocab_size
    if isinstance(start.config, LvlmConfig) or start.config.vocab_size >= vocab_size:
        return start
    config = replace(start.config, vocab_size=vocab_size)
    return replace(start, config=config, params=_padded_vocabulary(recipe, start, vocab_size))


def _padded_vocabulary(recipe: Recipe, start: LoadedModel, count: int) -> Params:
    """Return a text model's parameters with this many tokens; InputError for an adapter's base."""
    size = text_config(start.config).vocab_size
    if recipe.lora and size != count:
        raise InputError(
            f"start {recipe.start}: {size} tokens, and an adapter adds none of the target's "
            f"{count}; export it with --vocab-of the target first"
        )
    return with_vocabulary(start.params, count)


def _takes_tower(recipe: Recipe, start: ModelConfig) -> bool:
    """Return whether a text model, the recipe's start, gets the target's tower."""
    return parse_view(recipe.view).reads_images and not isinstance(start, LvlmConfig)


def _target_signature(recipe: Recipe) -> str:
    """Return the signature of a target, over the files of its weights that the recipe reads."""
    if recipe.distillation is not None:
        return model_signature(recipe.target)
    start = recipe.start
    if isinstance(start, str):
        start = read_config(locate(start, files=SMALL))
    reads = isinstance(recipe.start, LlavaConfig) or _takes_tower(recipe, start)
    return model_signature(recipe.target, tower_files(recipe.target) if reads else ())


def _deciding_inputs(recipe: Recipe, draft: LoadedModel) -> dict[str, Any]:
    """Return what decides a draft's result, except the data."""
    inputs = _start_signature(recipe) | {
        "target": _target_signature(recipe),
        "sees": parse_view(recipe.view).reads_images,
        "view": recipe.view,
        "distillation": recipe.distillation and asdict(recipe.distillation),
    }
    if vocabulary := draft.model.text.draft_vocabulary:
        inputs["draft_vocabulary"] = list(vocabulary)
    if recipe.lora:
        inputs["lora"] = asdict(recipe.lora)
    return inputs


def _placement(draft: ModelConfig, teacher: ModelConfig, params: Params, mesh: Any) -> Params:
    """Return the shardings of a draft, of its low-rank updates and of its teacher."""
    weights = dict(params)
    pairs, taught = weights.pop(LORA, None), weights.pop(TEACHER, None)
    placement = shardings(draft, weights, mesh)
    if pairs is not None:
        placement |= {LORA: jax.tree.map(lambda _: replicated(mesh), pairs)}
    if taught is not None:
        placement |= {TEACHER: shardings(teacher, taught, mesh)}
    return placement


def _simulation(
    recipe: Recipe, draft: LoadedModel, batches: ConversationBatches, samples: Sequence[Sample]
) -> Evaluate:
    """Return the evaluation of a draft on the answers of held-out samples."""
    alone = replace(batches, teacher=None, process=(0, 1), packing=False, plain=False, batch=8)
    answered = replace(alone, samples=mixture([(samples, 1.0)], 0))
    held_out = [answered(step) for step in range(HELD_OUT)]
    return simulated(draft.model, held_out, batches.view, recipe.lora)

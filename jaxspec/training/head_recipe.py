"""The loss of a head on blocks at anchors.

Recipes of heads: a head for a target, and the stages that train it.
"""

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

from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.errors import InputError
from jaxspec.heads.blocks import (
    TargetPass,
    borrowed_tokens,
    corrected,
    embedder,
    joined,
    pick,
    read_blocks,
    read_whole,
)
from jaxspec.heads.config import HeadConfig, check_rotary
from jaxspec.heads.loading import load_head
from jaxspec.heads.making import head_shardings, init_head, new_head
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import text_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import draft_indices
from jaxspec.sharding import shardings
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.decoded import decoded
from jaxspec.training.head_batches import Anchoring, HeadBatch, HeadBatches, KeptReadings
from jaxspec.training.loop.signatures import model_signature
from jaxspec.training.loop.trainer import fit
from jaxspec.training.losses import Loss, Sums, count_places, draft_loss
from jaxspec.training.objectives import encode
from jaxspec.training.reading import iterate
from jaxspec.training.recipes import (
    DataSets,
    Run,
    StagedRecipe,
    draft_words,
    open_sources,
    stage_data,
)
from jaxspec.typing import Array, Params


def make_loss(target: LanguageModel, config: HeadConfig, anchoring: Anchoring) -> Loss:
    """Return the loss of {"target": frozen, "head": trainable} on batches of `HeadBatches`."""
    steps, drafts = config.gamma, LanguageModel(config.text_config)
    weights = anchoring.of_places(steps)
    words = config.text_config.draft_vocabulary
    teacher = LanguageModel(replace(check_rotary(target.text), draft_vocabulary=words))

    def learned(batch: HeadBatch) -> tuple[Array, Array, Array]:
        """Return the slots of blocks, the tokens after them, and which of these count."""
        tokens, anchors = batch.tokens, batch.anchors
        at = anchors[..., None] + jnp.arange(steps + 1)
        inside = (anchors >= 0)[..., None] & (at < tokens.shape[1])
        at = jnp.clip(at, 0, tokens.shape[1] - 1)
        wrote = jnp.cumprod(pick(batch.conversations.mask, at) & inside, axis=-1)
        labels = draft_indices(drafts.text, pick(tokens, at[..., 1:]))
        return at[..., :-1], labels, wrote[..., 1:]

    def share(params: Params, batch: HeadBatch, count: Array) -> tuple[Array, Sums]:
        frozen = jax.lax.stop_gradient(params["target"])
        reading = batch.reading or read_target(target, frozen, batch.conversations, config)
        block, labels, mask = learned(batch)
        # An assistant holds a whole decoder; other heads are parts of one.
        decoder = params["head"].get("model", params["head"])
        drafting = joined(decoder, frozen, borrowed_tokens(drafts.text, target.text))
        teaching = joined({}, frozen, teacher.text.draft_vocabulary)
        embed = embedder(config, params["head"], frozen)

        @jax.checkpoint
        def drafted(head: Params) -> Array:
            rows = batch.conversations.rows
            return read_blocks(config, head, frozen, reading, rows, block, batch.spans)

        loss, sums = draft_loss(
            lambda x: corrected(config, params["head"], drafts.scores(drafting, x[0]), x[1], embed),
            (drafted(params["head"]), pick(batch.tokens, block)),
            pick(reading.hidden, block),
            labels,
            mask,
            anchoring.loss,
            weights,
            lambda x: teacher.scores(teaching, x),
            count,
        )
        return loss, sums | {"filled": batch.conversations.filled}

    return Loss(share, lambda batch: count_places(*learned(batch)[1:]))


def read_target(
    target: LanguageModel, params: Params, batch: ConversationBatch, config: HeadConfig
) -> TargetPass:
    """Return the target's reading of whole conversations, for a head."""
    return read_whole(target, params, batch.rows, encode(target, params, batch.images), config)


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


def train_head(
    recipe: HeadRecipe, directory: Path, data: DataSets | None = None, run: Run = fit
) -> tuple[HeadConfig, Params]:
    """Train the stages one after the other, and return the head's configuration and parameters.

    A stopped run goes on.

    Args:
      directory: Folder of the stages' folders; stage NAME writes to DIRECTORY/NAME.
      data: Paths or samples of the data sets that are not under `runs/data`.

    Raises InputError for targets and data that do not fit.
    """
    sources, first = open_sources(recipe.stages, data, recipe.held_out), recipe.stages[0].train
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

    if not config.packs and any(stage.train.packing for stage in recipe.stages):
        raise InputError(f"packing: {config.title}s learn from rows of one sample; leave it out")

    def sharding_of(mesh: Mesh) -> Params:
        return {
            "head": head_shardings(config, head, mesh),
            "target": shardings(target.config, target.params, mesh),
        }

    readings = None
    for option in ("keep_readings", "held_out"):
        if getattr(recipe, option) and jax.process_count() > 1:
            raise InputError(f"{option}: works only in one process; leave it out")
    if recipe.keep_readings:
        read = jax.jit(partial(read_target, target.model), static_argnums=2)
        reads = config.reads, first.dtype
        digest = hashlib.sha256(repr((model_signature(recipe.target), reads)).encode()).hexdigest()
        folder = Path(recipe.keep_readings, digest[:16])
        readings = KeptReadings(lambda batch: read(target.params, batch, config), folder)
    loss = make_loss(target.model, config, recipe.anchoring)
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
            if recipe.held_out:
                lengths = recipe.buckets, recipe.tile_buckets
                more["evaluate"] = decoded(target, config, sources[recipe.held_out], lengths, out)
            head = run(train, params, loss, ahead, out, **more)["head"]
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

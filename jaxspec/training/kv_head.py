"""Target-Draft attention training of a KV head (AASD, section 3.3): blocks of J tokens from sampled anchors.

The frozen target runs in the same program, one pass over the dialogues: its last layer's keys and values are what the
head reads, and its distributions at the blocks' own tokens are what the head learns. Nothing of it is kept, unless
`keep_readings` asks for it.
Given that the tokens before were accepted, step s of a draft that starts at anchor a sees in training exactly what
it sees in decoding.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxspec.checkpoints.kv_head import load_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.model_card import model_name
from jaxspec.config import KVHeadConfig
from jaxspec.errors import InputError
from jaxspec.loading import LoadedModel
from jaxspec.models import LanguageModel, text_params
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import HeadRows, KVHead, head_rows, init_head, joined, states_before
from jaxspec.models.layers import apply
from jaxspec.models.vocabulary import places
from jaxspec.sharding import shardings
from jaxspec.training.conversations import ConversationBatch, ConversationBatches
from jaxspec.training.losses import draft_loss
from jaxspec.training.objectives import encode
from jaxspec.training.reading import iterate
from jaxspec.training.recipes import DataSets, StagedRecipe, draft_words, open_sources, stage_data
from jaxspec.training.signatures import model_signature
from jaxspec.training.step import LossFn
from jaxspec.training.trainer import fit
from jaxspec.typing import Array, Bool, Float, Int, Params

Loss = Literal["kl", "ce"]
"""KL(target || head) at each token of a block, or cross entropy of the tokens themselves."""


@dataclass(frozen=True)
class Anchoring:
    """How blocks are laid over dialogues, and what they are trained on."""

    anchors: int
    """A: blocks of a row, drawn from all places where one can begin. Memory grows with it."""
    loss: Loss = "kl"
    """kl, to the target's distributions, or ce, cross entropy of the answers."""
    decay: float = 0.8
    """Weight of step s is decay^s (EAGLE-3's)."""


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(StagedRecipe):
    """A head of a LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision, Llama, Mistral or Qwen2, and how it is trained."""

    head: dict[str, Any]
    """Options of `KVHeadConfig.of_target`."""
    anchoring: Anchoring
    start: str = ""
    """Directory of a head of the same kind to go on from; empty: a fresh one."""
    keep_readings: bool = False
    """Keep in memory what the target reads of each row, D + 2 K H numbers a token, so that later epochs are spared its
    pass: for few rows and a small target."""


class Reading(struct.PyTreeNode):
    """What a head reads of, and learns from, a target's pass over whole conversations."""

    hidden: Float[Any, "B L D"]
    k: Float[Any, "B K L H"]
    """The last layer's keys."""
    v: Float[Any, "B K L H"]


class HeadBatch(struct.PyTreeNode):
    """Conversations with the anchors of their blocks."""

    conversations: ConversationBatch
    anchors: Int[Any, "B A"]
    """Tokens that the assistant wrote and whose follower it wrote too; -1 fills rows that have fewer. The target's key
    of an anchor does not exist yet when a block begins there."""
    slots: HeadRows
    """What the head reads of the target's rows."""
    reading: Reading | None = None
    """None: the step's program makes it."""

    @property
    def tokens(self) -> Int[Any, "B L"]:
        return self.conversations.tokens


@dataclass(frozen=True)
class HeadBatches:
    """Calling it with a step gives this process's rows of it, with anchors that depend on a row's number and the seed
    alone, not on which process reads it."""

    batches: ConversationBatches
    config: KVHeadConfig
    anchoring: Anchoring
    seed: int = 0
    readings: KeptReadings | None = None

    def __call__(self, step: int) -> HeadBatch:
        batch = self.batches(step)
        room = batch.images["pixels"].shape[1] if batch.images else 0
        shown = [
            np.where(row < room, row, -1) for row in self.batches.shown(step)
        ]  # a row of more counts nothing
        slots = head_rows(self.config, shown, batch.tokens.shape[1], room)
        draws = (np.random.default_rng((self.seed, int(number))) for number in batch.numbers)
        anchors = draw_anchors(batch.mask, self.anchoring.anchors, draws)
        return HeadBatch(batch, anchors, slots, self.readings and self.readings(batch))


@dataclass(frozen=True, eq=False)
class KeptReadings:
    """Calling it with a batch gives the target's reading of it, of which each row is made once, alone."""

    read: Callable[[ConversationBatch], Reading]
    kept: dict[bytes, Reading] = field(default_factory=dict)
    """By the digest of a row's tokens and images: its reading [1, ...] up to its end, on the host."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, batch: ConversationBatch) -> Reading:
        width, alone = (
            batch.tokens.shape[1],
            [itemgetter(slice(i, i + 1)) for i in range(len(batch.tokens))],
        )
        each = [self._row(jax.tree.map(row, batch)) for row in alone]
        return jax.tree.map(
            lambda *rows: np.concatenate([_widened(row, width) for row in rows]), *each
        )

    def _row(self, row: ConversationBatch) -> Reading:
        length, digest = int(row.rows.length[0]), hashlib.blake2b(digest_size=16)
        for leaf in (row.tokens[:, :length], *jax.tree.leaves(row.images)):
            digest.update(leaf.tobytes())
        with self.lock:
            if (name := digest.digest()) not in self.kept:
                made = jax.device_get(self.read(row))
                self.kept[name] = jax.tree.map(lambda leaf: leaf[..., :length, :].copy(), made)
        return self.kept[name]


def _widened(leaf: np.ndarray, width: int) -> np.ndarray:
    """Return the slots with zeros behind them; nothing learned lies there."""
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 2) + [(0, width - leaf.shape[-2]), (0, 0)])


def draw_anchors(
    mask: Bool[np.ndarray, "B L"], count: int, draws: Iterable[np.random.Generator]
) -> Int[np.ndarray, "B A"]:
    """`count` places of each row where a block can begin, drawn without replacement by the row's own generator, in
    order; -1 fills up."""
    anchors = np.full((len(mask), count), -1, np.int32)
    for row, (starts, rng) in enumerate(zip(mask[:, :-1] & mask[:, 1:], draws, strict=True)):
        (places,) = np.nonzero(starts)
        chosen = np.sort(rng.permutation(places)[:count])
        anchors[row, : len(chosen)] = chosen
    return anchors


def make_loss(target: LanguageModel, config: KVHeadConfig, anchoring: Anchoring) -> LossFn:
    """Return the loss of {"target": frozen, "head": trainable} on a batch of `HeadBatches`, and its metrics."""
    head, steps, drafts = KVHead(config), config.gamma, LanguageModel(config.text_config)

    def loss_fn(params: Params, batch: HeadBatch) -> tuple[Array, dict[str, Array]]:
        frozen, tokens, anchors = (
            jax.lax.stop_gradient(params["target"]),
            batch.tokens,
            batch.anchors,
        )
        reading = batch.reading or read_target(target, frozen, batch.conversations)
        hidden, k, v = reading.hidden, reading.k, reading.v
        at = anchors[..., None] + jnp.arange(steps + 1)
        inside = (anchors >= 0)[..., None] & (at < tokens.shape[1])
        at = jnp.clip(at, 0, tokens.shape[1] - 1)
        wrote = jnp.cumprod(_pick(batch.conversations.mask, at) & inside, axis=-1)
        block = at[..., :-1]
        written = PromptRows(_pick(tokens, block).reshape(len(tokens), -1), anchors)
        embeds = target.embed(frozen, written, None).reshape(*block.shape, -1)
        before = states_before(config, hidden, anchors)
        drafted: Any = jax.checkpoint(
            lambda own: apply(head, own, embeds, anchors, block, k, v, batch.slots, before)
        )(params["head"])
        own = joined({}, frozen, drafts.text.draft_vocabulary)
        return draft_loss(
            lambda x: drafts.scores(own, x),
            drafted,
            _pick(hidden, block),
            places(drafts.text, _pick(tokens, at[..., 1:])),
            wrote[..., 1:],
            anchoring.loss == "kl",
            anchoring.decay,
        )

    return loss_fn


def read_target(target: LanguageModel, params: Params, batch: ConversationBatch) -> Reading:
    """Return what the target reads of whole conversations."""
    rows, length = batch.tokens.shape
    prompt = batch.rows.replace(length=jnp.full(rows, length))
    embeds = target.embed(params, prompt, encode(target, params, batch.images))
    hidden, cache = target.read(params, embeds, prompt, length)
    return Reading(hidden, cache.k[-1], cache.v[-1])


def train_kv_head(
    recipe: HeadRecipe, directory: Path, data: DataSets | None = None
) -> tuple[KVHeadConfig, Params]:
    """Trains all stages, each from the end of the one before; goes on where it was stopped.

    Args:
      directory: stage NAME keeps checkpoints and metrics in DIRECTORY/NAME.
      data: Paths or samples of the data sets that are not under `runs/data`.

    Returns the head's configuration and its own parameters. Raises InputError for targets and data that do not fit.
    """
    sources, first = open_sources(recipe.stages, data), recipe.stages[0].train
    target = LoadedModel.load(
        recipe.target, jnp.dtype(first.dtype), mesh=first.mesh.make(first.batch)
    )
    if target.model.mrope:
        raise InputError(
            f"target {recipe.target}: a {target.config.model_type}, whose images take other positions than slots, and "
            "no KV head is trained for such; give a LLaVA or a text model"
        )
    config = KVHeadConfig.of_target(
        target.config, target_name=model_name(locate(recipe.target)), **recipe.head
    )
    words = draft_words(recipe, sources, target)
    if recipe.start:
        config, head = _started(recipe.start, config, words)
    else:
        config = replace(config, text_config=replace(config.text_config, draft_vocabulary=words))
        head = init_head(
            config, text_params(target.config, target.params), jax.random.key(first.seed)
        )

    def places(mesh: Mesh) -> Params:
        parts = {"head": head, "target": target.params}
        return {name: shardings(target.config, part, mesh) for name, part in parts.items()}

    readings = None
    if recipe.keep_readings:
        if jax.process_count() > 1:
            raise InputError(
                "keep_readings: a process cannot run a target of several hosts alone; leave it out"
            )
        readings = KeptReadings(partial(jax.jit(partial(read_target, target.model)), target.params))
    loss_fn = make_loss(target.model, config, recipe.anchoring)
    for stage in recipe.stages:
        conversations, inputs = stage_data(recipe, stage, sources, target, target)
        inputs |= {"head": asdict(config), "anchoring": asdict(recipe.anchoring)}
        if recipe.start:
            inputs["start"] = model_signature(recipe.start)
        batches = HeadBatches(conversations, config, recipe.anchoring, stage.train.seed, readings)
        train = replace(stage.train, frozen=(*stage.train.frozen, "target"))
        params = {"head": head, "target": target.params}
        with closing(
            iterate(conversations, train.steps, read=batches, limit=recipe.unlearned)
        ) as made:
            head = fit(
                train, params, loss_fn, made, directory / stage.name, places=places, inputs=inputs
            )["head"]
    return config, head


def _started(
    path: str, wanted: KVHeadConfig, words: tuple[int, ...]
) -> tuple[KVHeadConfig, Params]:
    """Return a head that was trained before, with the draft vocabulary `words`, or its own; it holds none of its rows.

    Raises InputError where it is not of the kind that is wanted, but for J.
    """
    found, head = load_kv_head(path, jnp.float32)
    text = replace(wanted.text_config, draft_vocabulary=words or found.text_config.draft_vocabulary)
    config = replace(wanted, text_config=text)
    theirs = replace(
        found, text_config=replace(found.text_config, draft_vocabulary=text.draft_vocabulary)
    )
    for name in (each.name for each in fields(config) if each.name not in ("gamma", "target_name")):
        if (own := getattr(config, name)) != (there := getattr(theirs, name)):
            raise InputError(
                f"start {path}: its {name} is {there!r:.60}, and the recipe's {own!r:.60}; give that"
            )
    return config, head


def _pick(values: Array, at: Int[Array, "B A J"]) -> Array:
    """values[b, at[b, a, j]]"""
    return values[jnp.arange(values.shape[0])[:, None, None], at]

"""Training of draft heads: blocks at sampled anchors, as a draft that begins there reads them.

The frozen target runs in the same program, one pass over the dialogues. A KV head reads its last
layer's keys and values (AASD's Target-Draft attention, section 3.3). An EAGLE-3 head reads hidden
states of three layers, and then its own: EAGLE-3's training-time test, at A anchors of a row in
the place of all its tokens. Both learn the target's distributions at the blocks' tokens.
`keep_readings` keeps the target's passes in files, so that the target reads each row once, over all
epochs and all heads that read the same of it. Step s of a block at anchor a reads the same slots in
training as in decoding once the tokens before are accepted.
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
from safetensors.flax import load_file, save_file

from jaxspec.checkpoints.kv_head import load_kv_head
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.model_card import model_name
from jaxspec.config import KVHeadConfig, ModelConfig
from jaxspec.errors import InputError, check_counts, check_numbers
from jaxspec.files import whole
from jaxspec.loading import LoadedModel
from jaxspec.models import LanguageModel, text_params
from jaxspec.models.blocks import Reading, pick, read_blocks, read_whole
from jaxspec.models.head_slots import HeadRows, head_rows
from jaxspec.models.kv_head import corrected, init_head, joined
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
from jaxspec.typing import Array, Bool, Int, Params

Loss = Literal["kl", "ce"]
"""KL(target || head) at each token of a block, or cross entropy of the tokens themselves."""


@dataclass(frozen=True)
class Anchoring:
    """Set the places of blocks in dialogues, and their loss."""

    anchors: int
    """A: sampled blocks of a row. Memory grows with it."""
    loss: Loss = "kl"
    """kl, to the target's distributions, or ce, cross entropy of the answers."""
    decay: float = 0.8
    """Step s has the weight decay^s (EAGLE-3's)."""

    def __post_init__(self) -> None:
        check_counts(anchors=self.anchors)
        check_numbers(decay=self.decay)


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(StagedRecipe):
    """Describe a head, for any target but OPT, and its training."""

    head: dict[str, Any]
    """Options of `KVHeadConfig.of_target`."""
    anchoring: Anchoring
    start: str = ""
    """Directory of a head of the same kind to train on; empty starts a fresh one."""
    keep_readings: str = ""
    """Folder to keep the target's passes in, D + 2 K H numbers a token; empty keeps none."""


class HeadBatch(struct.PyTreeNode):
    """Hold conversations with the anchors of their blocks."""

    conversations: ConversationBatch
    anchors: Int[Any, "B A"]
    """Assistant tokens that another one follows; -1 fills rows with fewer. When a block begins at
    an anchor, the target has not yet computed its key."""
    slots: HeadRows
    """Slots of the target's rows that the head reads."""
    reading: Reading | None = None
    """The target's pass; None makes it in the step's program."""

    @property
    def tokens(self) -> Int[Any, "B L"]:
        return self.conversations.tokens


@dataclass(frozen=True)
class HeadBatches:
    """Make this process's rows of a step, with anchors drawn by row number and seed."""

    batches: ConversationBatches
    config: KVHeadConfig
    anchoring: Anchoring
    seed: int = 0
    readings: KeptReadings | None = None

    def __call__(self, step: int) -> HeadBatch:
        batch = self.batches(step)
        room = next(iter(batch.images.values())).shape[1] if batch.images else 0
        # Rows with more images than the bucket teach nothing.
        shown = [np.where(row < room, row, -1) for row in self.batches.shown(step)]
        slots = head_rows(self.config, shown, batch.tokens.shape[1], room)
        draws = (np.random.default_rng((self.seed, int(number))) for number in batch.numbers)
        anchors = draw_anchors(batch.mask, self.anchoring.anchors, draws)
        return HeadBatch(batch, anchors, slots, self.readings and self.readings(batch))


@dataclass(frozen=True, eq=False)
class KeptReadings:
    """Return the target's reading of a batch; each row is read once, and kept in a file."""

    read: Callable[[ConversationBatch], Reading]
    folder: Path
    """Holds a row's reading [1, ...], unpadded, under the digest of its tokens and images."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, batch: ConversationBatch) -> Reading:
        rows, width = batch.tokens.shape
        each = [self._row(jax.tree.map(itemgetter(slice(i, i + 1)), batch)) for i in range(rows)]
        return jax.tree.map(
            lambda *parts: np.concatenate([_widened(part, width) for part in parts]), *each
        )

    def _row(self, row: ConversationBatch) -> Reading:
        length, digest = int(row.rows.length[0]), hashlib.blake2b(digest_size=16)
        for leaf in (row.tokens[:, :length], *jax.tree.leaves(row.images)):
            digest.update(leaf.tobytes())
        file = self.folder / f"{digest.hexdigest()}.safetensors"
        with self.lock:
            if not file.exists():
                made = {
                    name: leaf for name, leaf in vars(self.read(row)).items() if leaf is not None
                }
                with whole(file) as fresh:
                    save_file({name: leaf[..., :length, :] for name, leaf in made.items()}, fresh)
        return Reading(**{name: np.asarray(leaf) for name, leaf in load_file(file).items()})


def _widened(leaf: np.ndarray, width: int) -> np.ndarray:
    """Return the slots padded with zeros, which the loss never reads."""
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 2) + [(0, width - leaf.shape[-2]), (0, 0)])


def draw_anchors(
    mask: Bool[np.ndarray, "B L"], count: int, draws: Iterable[np.random.Generator]
) -> Int[np.ndarray, "B A"]:
    """Return `count` places of each row where a block can begin, drawn without replacement, sorted.

    -1 fills rows with fewer places.
    """
    anchors = np.full((len(mask), count), -1, np.int32)
    for row, (starts, rng) in enumerate(zip(mask[:, :-1] & mask[:, 1:], draws, strict=True)):
        (places,) = np.nonzero(starts)
        chosen = np.sort(rng.permutation(places)[:count])
        anchors[row, : len(chosen)] = chosen
    return anchors


def make_loss(target: LanguageModel, config: KVHeadConfig, anchoring: Anchoring) -> LossFn:
    """Return the loss of {"target": frozen, "head": trainable} on batches of `HeadBatches`."""
    steps, drafts = config.gamma, LanguageModel(config.text_config)

    def loss_fn(params: Params, batch: HeadBatch) -> tuple[Array, dict[str, Array]]:
        frozen = jax.lax.stop_gradient(params["target"])
        tokens, anchors = batch.tokens, batch.anchors
        reading = batch.reading or read_target(target, frozen, batch.conversations, config)
        at = anchors[..., None] + jnp.arange(steps + 1)
        inside = (anchors >= 0)[..., None] & (at < tokens.shape[1])
        at = jnp.clip(at, 0, tokens.shape[1] - 1)
        wrote = jnp.cumprod(pick(batch.conversations.mask, at) & inside, axis=-1)
        block, words = at[..., :-1], drafts.text.draft_vocabulary
        theirs = joined({}, frozen, words)
        own = joined(params["head"], frozen, words) if config.fused else theirs

        @jax.checkpoint
        def drafted(head: Params) -> tuple[Array, Array]:
            rows = batch.conversations.rows
            return read_blocks(config, head, frozen, reading, rows, block, batch.slots)

        return draft_loss(
            lambda x: corrected(config, params["head"], drafts.scores(own, x[0]), x[1]),
            drafted(params["head"]),
            pick(reading.hidden, block),
            places(drafts.text, pick(tokens, at[..., 1:])),
            wrote[..., 1:],
            anchoring.loss == "kl",
            anchoring.decay,
            lambda x: drafts.scores(theirs, x),
        )

    return loss_fn


def read_target(
    target: LanguageModel, params: Params, batch: ConversationBatch, config: KVHeadConfig
) -> Reading:
    """Return the target's reading of whole conversations, for a head."""
    return read_whole(target, params, batch.rows, encode(target, params, batch.images), config)


def train_kv_head(
    recipe: HeadRecipe, directory: Path, data: DataSets | None = None
) -> tuple[KVHeadConfig, Params]:
    """Train the stages one after the other, and return the head's configuration and parameters.

    A stopped run goes on.

    Args:
      directory: Folder of the stages' folders; stage NAME writes to DIRECTORY/NAME.
      data: Paths or samples of the data sets that are not under `runs/data`.

    Raises InputError for targets and data that do not fit.
    """
    sources, first = open_sources(recipe.stages, data), recipe.stages[0].train
    target = LoadedModel.load(
        recipe.target, jnp.dtype(first.dtype), mesh=first.mesh.make(first.batch)
    )
    fused = recipe.head.get("feature") == "fused"
    config = KVHeadConfig.of_target(
        target.config, target_name=model_name(locate(recipe.target)), **recipe.head
    )
    words = draft_words(recipe, sources, target)
    if fused:  # whose files have the words in this order
        words = tuple(sorted(words))
    if recipe.start:
        config, head = _started(recipe.start, config, words, target.config)
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
            raise InputError("keep_readings: works in one process alone; leave it out")
        read = jax.jit(partial(read_target, target.model), static_argnums=2)
        reads = config.fused and config.target_states, config.key_layers, first.dtype
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
        train = replace(stage.train, frozen=(*stage.train.frozen, "target"))
        params = {"head": head, "target": target.params}
        out = directory / stage.name
        made = iterate(conversations, train.steps, batches, recipe.unlearned)
        with closing(made):
            head = fit(train, params, loss_fn, made, out, places=places, inputs=inputs)["head"]
    return config, head


def _started(
    path: str, wanted: KVHeadConfig, words: tuple[int, ...], target: ModelConfig
) -> tuple[KVHeadConfig, Params]:
    """Return a trained head, with the draft vocabulary `words` or its own.

    Raises InputError where it differs from `wanted` in more than J, or in J if one pass drafts
    them. An EAGLE-3 head keeps its decoder and its draft vocabulary, and a head with a correction
    its draft vocabulary.
    """
    found, head = load_kv_head(path, jnp.float32)
    kept = found.text_config.draft_vocabulary
    if words not in ((), kept) and (found.fused or found.markov):
        raise InputError(f"start {path}: has its own draft vocabulary; give --draft-vocabulary 0")
    if found.fused and wanted.fused:
        if "lm_head" not in head:
            raise InputError(f"start {path}: has no output matrix of its own; give another head")
        return replace(wanted, text_config=found.for_target(target).text_config), head
    config, theirs = (
        replace(one, text_config=replace(one.text_config, draft_vocabulary=words or kept))
        for one in (wanted, found)
    )
    free = ("target_name",) if config.parallel else ("gamma", "target_name")
    for name in (each.name for each in fields(config) if each.name not in free):
        if (own := getattr(config, name)) != (there := getattr(theirs, name)):
            raise InputError(f"start {path}: its {name} is {there!r:.60}, the recipe's {own!r:.60}")
    return config, head

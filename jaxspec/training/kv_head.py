"""Target-Draft attention training of a KV head (AASD, section 3.3): blocks of J tokens from sampled anchors.

The frozen target runs in the same program, one pass over the dialogues, and nothing of it is kept: its last layer's
keys and values are what the head reads, and its distributions at the blocks' own tokens are what the head learns.
Given that the tokens before were accepted, step s of a draft that starts at anchor a sees in training exactly what
it sees in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import KVHeadConfig, LlavaConfig
from jaxspec.models import LanguageModel, text_params
from jaxspec.models.inputs import PromptRows, in_order
from jaxspec.models.kv_head import HeadRows, KVHead, head_rows, init_head
from jaxspec.sharding import shardings
from jaxspec.training.batches import Batch
from jaxspec.training.config import TrainConfig
from jaxspec.training.losses import draft_loss
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
    decay: float = 0.8
    """Weight of step s is decay^s (EAGLE-3's)."""


@dataclass(frozen=True)
class HeadPreset:
    """A head, its target, and how it is trained."""

    target: str
    """Directory or hub id."""
    head: Mapping[str, Any]
    """Options of `KVHeadConfig.of_target`."""
    train: TrainConfig
    anchoring: Anchoring
    buckets: tuple[int, ...]
    """Lengths of dialogues."""
    images: tuple[int, ...]
    """Most images of a dialogue, buckets too."""
    kinds: tuple[str, ...] | None = None
    """Of picturebook's dialogues; None is all."""


@dataclass(frozen=True)
class HeadBatches:
    """Dialogues with anchors: what `batches` gives, and `anchors` [B, A], `text` [B, E] and `images` [B, I, n].

    An anchor is a token that the assistant wrote and whose follower it wrote too; -1 fills rows that have fewer. The
    target's key of an anchor does not exist yet when a block begins there.
    """

    batches: Callable[[int], Batch]
    config: KVHeadConfig
    target: LlavaConfig
    anchoring: Anchoring
    seed: int = 0

    def __call__(self, step: int) -> Batch:
        batch = self.batches(step)
        tokens, mask = batch["tokens"], batch["mask"]
        shows = tokens == self.target.image_token_index
        shown = np.where(shows, (np.cumsum(shows, axis=1) - 1) // self.target.image_tokens, -1)
        rows = head_rows(self.config, list(shown), tokens.shape[1], batch["pixels"].shape[1])
        anchors = draw_anchors(mask, self.anchoring.anchors, np.random.default_rng((self.seed, step)))
        return batch | {"anchors": anchors, "text": rows.text, "images": rows.images}


def draw_anchors(mask: Bool[np.ndarray, "B L"], count: int, rng: np.random.Generator) -> Int[np.ndarray, "B A"]:
    """`count` places of each row where a block can begin, drawn without replacement, in order; -1 fills up."""
    anchors = np.full((len(mask), count), -1, np.int32)
    for row, starts in enumerate(mask[:, :-1] & mask[:, 1:]):
        (places,) = np.nonzero(starts)
        chosen = np.sort(rng.permutation(places)[:count])
        anchors[row, : len(chosen)] = chosen
    return anchors


def make_loss(target: LanguageModel, config: KVHeadConfig, anchoring: Anchoring) -> LossFn:
    """The loss of {"target": frozen, "head": trainable} on a batch of `HeadBatches`, and its metrics."""
    head, steps = KVHead(config), config.gamma

    def loss_fn(params: Params, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        frozen, tokens = jax.lax.stop_gradient(params["target"]), batch["tokens"]
        hidden, k, v = read_target(target, frozen, tokens, batch["pixels"])
        at = batch["anchors"][..., None] + jnp.arange(steps + 1)
        inside = (batch["anchors"] >= 0)[..., None] & (at < tokens.shape[1])
        at = jnp.clip(at, 0, tokens.shape[1] - 1)
        wrote = jnp.cumprod(_pick(batch["mask"], at) & inside, axis=-1)
        block = at[..., :-1]
        written = PromptRows(_pick(tokens, block).reshape(len(tokens), -1), batch["anchors"])
        embeds = target.embed(frozen, written, None).reshape(*block.shape, -1)
        rows = HeadRows(batch["text"], batch["images"])
        drafted: Any = jax.checkpoint(
            lambda own: head.apply({"params": own}, embeds, batch["anchors"], block, k, v, rows)
        )(params["head"])
        seen = _pick(hidden, block)
        return draft_loss(
            lambda x: target.logits(frozen, x),
            drafted,
            seen,
            _pick(tokens, at[..., 1:]),
            wrote[..., 1:],
            anchoring.loss == "kl",
            anchoring.decay,
        )

    return loss_fn


def read_target(
    target: LanguageModel, params: Params, tokens: Int[Array, "B L"], pixels: Float[Array, "B I Y X 3"]
) -> tuple[Float[Array, "B L D"], Float[Array, "B L K H"], Float[Array, "B L K H"]]:
    """Hidden states, and last-layer keys and values, of whole dialogues of a LLaVA; images show their rows in order."""
    batch, length = tokens.shape
    assert isinstance(target.config, LlavaConfig)
    sources = in_order(tokens == target.config.image_token_index)
    rows = PromptRows(tokens, jnp.full(batch, length), sources)
    embeds = target.embed(params, rows, target.encode(params, {"pixels": pixels}))
    hidden, cache = target.read(params, embeds, rows, length)
    return hidden, cache.k[-1], cache.v[-1]


def train_kv_head(
    config: KVHeadConfig,
    target: LanguageModel,
    target_params: Params,
    stage: TrainConfig,
    anchoring: Anchoring,
    batches: Callable[[int], Batch],
    directory: Path,
    start: Params | None = None,
) -> Params:
    """Trains a head from the target's last layer, or from `start`; resumes from `directory`. Returns the head's own
    parameters."""
    assert isinstance(target.config, LlavaConfig)
    head = start or init_head(config, text_params(target.config, target_params), jax.random.key(stage.seed))
    data = HeadBatches(batches, config, target.config, anchoring, stage.seed)
    params = {"head": head, "target": target_params}

    def places(mesh: Mesh) -> Params:
        return {name: shardings(target.config, part, mesh) for name, part in params.items()}

    return fit(stage, params, make_loss(target, config, anchoring), data, directory, places=places)["head"]


def _pick(values: Array, at: Int[Array, "B A J"]) -> Array:
    """values[b, at[b, a, j]]"""
    return values[jnp.arange(values.shape[0])[:, None, None], at]

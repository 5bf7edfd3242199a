"""The options of an engine, checked when they are written down."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, get_args

from jaxspec.decoding.combination import Combination, parse_combination
from jaxspec.decoding.drafters import ContextPolicy
from jaxspec.decoding.tree import parse_tree
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError, check_counts
from jaxspec.prompts.views import parse_views, parse_weights

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
PROMPT_BUCKETS = (64, 128, 256, 512, *(step * 2**n for n in range(7, 15) for step in (5, 6, 8)))
"""From 640 on three an octave, so that an image and a question, 640 tokens in LLaVA-1.5, are not
padded to 1,024."""
IMAGE_BUCKETS = (
    0,
    1,
    2,
    3,
    5,
    8,
    10,
    16,
    24,
    32,
    48,
    64,
    128,
    256,
    512,
    768,
    1024,
    1536,
    2048,
    3072,
    4096,
    8192,
)
NEW_BUCKETS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

Method = Literal["alternating", "naive", "speculative", "standard"]


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How requests run together. Each bucket is a compiled program, and requests are padded to the
    next, or to that of a longer one in their batch."""

    batch_size: int = 8
    """Most requests in one program."""
    refill: bool = False
    """Where rows are done, the next requests of their bucket take their places, see
    `jaxspec.decoding.running`. It pays where a block takes long against the milliseconds that the
    host needs for it."""
    grow: bool = True
    """Begin with caches for few new tokens, and enlarge them where answers get longer, see
    `jaxspec.decoding.running`. Then requests run together whatever their `max_new_tokens`. With
    `refill` or recorded answers they are as large as they may have to be from the start."""
    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    image_buckets: tuple[int, ...] = IMAGE_BUCKETS
    """Buckets of image tiles: the whole images, tiles or attention windows that a tower reads a
    prompt's images in."""
    new_buckets: tuple[int, ...] = NEW_BUCKETS
    keep_going: bool = False
    """Give a request that cannot be read, such as one with a broken image, a result with an
    `error`, and decode the others."""
    spread: bool = False
    """Each of several processes decodes its share of the requests of a `generate`, and all return
    all results. They must call it alike, each with models on devices of its own."""

    def __post_init__(self) -> None:
        if self.batch_size not in range(1, BATCH_BUCKETS[-1] + 1):
            raise InputError(f"batch_size: {self.batch_size}; give 1 to {BATCH_BUCKETS[-1]}")
        for name in ("prompt_buckets", "image_buckets", "new_buckets"):
            if not getattr(self, name):
                raise InputError(f"{name}: there are none; give one or more")


@dataclass(frozen=True)
class EngineConfig(Batching):
    """How a target decodes; the views and what follows matter only with a draft or a KV head."""

    views: tuple[str, ...] | None = None
    """Views of the prompt that the draft reads, and kv for a KV head. None takes M with a draft and
    kv with a KV head; () decodes without drafts."""
    weights: tuple[float, ...] | None = None
    """One a view; uniform when None."""
    weighting: str = "static"
    """How the weights learn, as `parse_weighting` reads it; the above are the first block's."""
    gamma: int = 5
    """Drafted tokens a block; of a tree, on its longest path."""
    tree: str | None = None
    """A token tree instead of a chain: `2` or `2:32` (every node has 2 children, cut to 32 nodes),
    `chains:2`, or `dynamic:4:24`; see `jaxspec.decoding.tree`."""
    context: ContextPolicy = "extrapolate"
    """For views past the draft's trained positions: `extrapolate`, `drop_view` or `error`."""
    trace: bool = False
    """Tell of each token where it came from, in `Result.trace`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(gamma=self.gamma)
        if self.context not in get_args(ContextPolicy):
            raise InputError(
                f"context: {self.context!r} is unknown; use {', '.join(get_args(ContextPolicy))}"
            )
        if self.tree is not None:
            parse_tree(self.tree, self.gamma)
        if isinstance(self.views, str):
            raise InputError(f"views: {self.views!r}; give a tuple of names, as ('M', 'T')")
        if self.views:
            parse_weights(self.weights, len(parse_views(self.views)))
        parse_weighting(self.weighting)


@dataclass(frozen=True)
class CollaborationConfig(Batching):
    """How models write together (CoS)."""

    combine: str | Combination = "weighted"
    """What they draw from: `weighted:0.6,0.4`, `contrastive:mu=0.1`, `logits:1.5,-0.5`, as
    `parse_combination` reads it, or a combination of one's own."""
    method: Method = "alternating"
    """`alternating` is CoS. `naive`: one model proposes; `speculative`: likewise with a bonus
    token; `standard`: no proposals. All write the same, at another pace."""
    gammas: tuple[int, ...] | None = None
    """Draft length of each model; of one proposer, its own alone counts. None: 1 each, which is
    never slower than `standard` where a pass over a few tokens takes as long as one over one
    (Corollary 3.7)."""
    proposer: int = 0
    """The default proposer, or the only one."""
    views: tuple[str, ...] | None = None
    """How each model is shown images; None shows them to all that see. See `jaxspec.prompts.views`,
    but for C."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in get_args(Method):
            raise InputError(
                f"method: {self.method!r} is unknown; use {', '.join(get_args(Method))}"
            )
        if self.gammas is not None and (not self.gammas or min(self.gammas) < 1):
            raise InputError(f"gammas: {self.gammas} drafted tokens; give each model 1 or more")

    def checked(self, models: int) -> tuple[Combination, tuple[int, ...]]:
        """Return the combination and the draft lengths of so many models; InputError where
        something does not fit them."""
        if models < 2:
            raise InputError(
                f"collaboration: {models} model; give 2 or more, the same one twice if need be"
            )
        if not 0 <= self.proposer < models:
            raise InputError(
                f"proposer: {self.proposer} of {models} models; give 0 to {models - 1}"
            )
        for name, given in (("gammas", self.gammas), ("views", self.views)):
            if given is not None and len(given) != models:
                shown = ",".join(map(str, given))
                raise InputError(
                    f"{name}: {shown} are {len(given)} for {models} models; give one a model"
                )
        combine = self.combine
        return parse_combination(combine, models) if isinstance(
            combine, str
        ) else combine, self.gammas or (1,) * models


def capped_gamma(option: str, gamma: int, max_new_tokens: int) -> int:
    """Return the draft length, or the most tokens that an answer may have where that is less; a
    line says so then."""
    if not 1 <= max_new_tokens < gamma:
        return gamma
    print(
        f"{option}: {gamma} is over the {max_new_tokens} new tokens; drafting {max_new_tokens} a "
        f"block",
        file=sys.stderr,
    )
    return max_new_tokens

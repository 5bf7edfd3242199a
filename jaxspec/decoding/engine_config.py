"""The options of an engine, checked when they are written down."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import get_args

from jaxspec.decoding.drafters import ContextPolicy
from jaxspec.decoding.requests import IMAGE_BUCKETS, NEW_BUCKETS, PROMPT_BUCKETS, check_batch_size
from jaxspec.decoding.tree import parse_tree
from jaxspec.decoding.views import parse_views, parse_weights
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError, check_counts


@dataclass(frozen=True)
class EngineConfig:
    """How an engine decodes; the views and what follows matter only with a draft."""

    views: tuple[str, ...] = ("M",)
    weights: tuple[float, ...] | None = None
    """One a view; uniform when None."""
    weighting: str = "static"
    """How the weights learn, as `parse_weighting` reads it; the above are the first block's."""
    gamma: int = 5
    """Drafted tokens a block; of a tree, on its longest path."""
    tree: str | None = None
    """A token tree instead of a chain: `2` or `2:32` (every node has 2 children, cut to 32 nodes), `chains:2`, or
    `dynamic:4:24`; see `jaxspec.decoding.tree`."""
    adaptive_gamma: bool = False
    """Choose the length of each block, up to `gamma`, from times measured at a bucket's first use, what earlier answers
    accepted and the running acceptance; and decode plainly where drafts do not pay. Which drafts are made then depends
    on the clock and on those answers: greedy answers do not change, sampled ones differ from run to run."""
    context: ContextPolicy = "extrapolate"
    """For views past the draft's trained positions: `extrapolate`, `drop_view` or `error`."""
    batch_size: int = 8
    """Most requests in one program."""
    refill: bool = False
    """Where rows are done, the next requests of their bucket take their places, see `jaxspec.decoding.refill`. It pays
    where a block takes long against the milliseconds that the host needs for it."""
    grow: bool = True
    """Begin with caches for few new tokens, and enlarge them where answers get longer, see `jaxspec.decoding.growth`.
    With `refill`, `adaptive_gamma` or recorded answers they are as large as they may have to be from the start."""
    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    image_buckets: tuple[int, ...] = IMAGE_BUCKETS
    """Buckets of image units: the pages, tiles or attention windows that a tower reads a prompt's images in."""
    new_buckets: tuple[int, ...] = NEW_BUCKETS
    trace: bool = False
    """Tell of each token where it came from, in `Result.trace`."""

    def __post_init__(self) -> None:
        check_counts(gamma=self.gamma)
        check_batch_size(self.batch_size)
        for name in ("prompt_buckets", "image_buckets", "new_buckets"):
            if not getattr(self, name):
                raise InputError(f"{name}: there are none; give one or more")
        if self.context not in get_args(ContextPolicy):
            raise InputError(f"context: {self.context!r} is unknown; use {', '.join(get_args(ContextPolicy))}")
        if self.tree is not None:
            parse_tree(self.tree, self.gamma)
            if self.adaptive_gamma:
                raise InputError(f"adaptive_gamma: chooses the length of chains, and tree is {self.tree!r}; give one")
        if self.refill and self.adaptive_gamma:
            raise InputError("refill: lengths of blocks are chosen for a whole batch; give refill or adaptive_gamma")
        parse_weights(self.weights, len(parse_views(self.views)))
        parse_weighting(self.weighting)


def capped_gamma(option: str, gamma: int, max_new_tokens: int) -> int:
    """Return the draft length, or the most tokens that an answer may have where that is less; a line says so then."""
    if not 1 <= max_new_tokens < gamma:
        return gamma
    print(
        f"{option}: {gamma} is over the {max_new_tokens} new tokens; drafting {max_new_tokens} a block", file=sys.stderr
    )
    return max_new_tokens

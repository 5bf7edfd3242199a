"""Hold the options of an engine, which are checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, Self, get_args

from jaxspec.decoding.collaboration.combination import Combination, parse_combination
from jaxspec.decoding.drafting.rules import parse_weighting
from jaxspec.decoding.drafting.shapes import TreeSpec, parse_tree
from jaxspec.decoding.drafting.weighting import Weighting
from jaxspec.decoding.settings import LARGEST, count_within
from jaxspec.engine.drafts import read_views
from jaxspec.errors import InputError, check_counts
from jaxspec.runtime import say

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
WIDEST = 256
"""Largest `width`: programs of far wider passes compile for minutes."""
# Prefill costs as much as its bucket. From 640 on three an octave: an image and a question, 640
# tokens in LLaVA-1.5, need no 1,024.
_SHORT = (64, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (*_SHORT, *(step * 2**n for n in range(7, 15) for step in (5, 6, 8)))
_FEW_IMAGES = (0, 1, 2, 3, 5, 8, 10, 16, 24, 32, 48, 64, 128, 256)
IMAGE_BUCKETS = (*_FEW_IMAGES, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
NEW_BUCKETS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

LENGTH = 5
"""Draft length where none is given, of a tree."""

GONE = {
    "continuous_batching": "waiting requests always take the rows of finished ones",
    "growing_cache": "caches always begin small and grow, except at one width",
}
"""Options of earlier versions, and what holds now."""

Method = Literal["alternating", "naive", "speculative", "standard"]
GenerationConfig = Literal["auto", "ignore"]


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Choose how requests run together. Each bucket is one compiled program.

    Requests that wait take the rows of finished ones. Caches start small and grow.

    Attributes:
      batch_size: Maximum requests that decode together, 1 to 64.
      prompt_buckets: Prompt lengths to compile for; each prompt is padded to the next.
      image_buckets: Numbers of image tiles, or attention windows, to compile for.
      new_buckets: Numbers of new tokens to compile for.
      keep_going: Whether a request that `check` refuses gets a result with an `error`.
      data_parallel_processes: Whether JAX processes, each with own models, share a call's requests.
      generation_config: "auto" takes the defaults of requests from the (first) target's
        generation_config.json; "ignore" leaves the file out, except for its EOS.
    """

    batch_size: int = 8
    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    image_buckets: tuple[int, ...] = IMAGE_BUCKETS
    new_buckets: tuple[int, ...] = NEW_BUCKETS
    keep_going: bool = False
    data_parallel_processes: bool = False
    generation_config: GenerationConfig = "auto"

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Raise InputError for an option of earlier versions."""
        for name in options.keys() & GONE.keys():
            raise InputError(f"{name}: {GONE[name]}; leave it out")
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        """Append these attributes to the subclass's docstring, so that `help` shows all."""
        shared = (Batching.__doc__ or "").partition("Attributes:\n")[2]
        cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n{shared}"

    def __post_init__(self) -> None:
        if self.generation_config not in get_args(GenerationConfig):
            raise InputError(f"generation_config: {self.generation_config!r}; give auto or ignore")
        if not count_within(1, BATCH_BUCKETS[-1])(self.batch_size):
            raise InputError(f"batch_size: {self.batch_size!r:.60}; give 1 to {BATCH_BUCKETS[-1]}")
        for name in ("prompt_buckets", "image_buckets", "new_buckets"):
            buckets, least = getattr(self, name), 0 if name == "image_buckets" else 1
            if not isinstance(buckets, list | tuple) or not buckets:
                raise InputError(f"{name}: {buckets!r}; give one or more numbers, as (128, 512)")
            wrong = [size for size in buckets if not isinstance(size, Integral) or size < least]
            if wrong or list(buckets) != sorted(buckets):
                raise InputError(f"{name}: {buckets}; give whole numbers from {least} up, sorted")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Batching):
    """Choose how a target decodes: with which views and draft blocks, and in which batches.

    Attributes:
      views: Views of a draft model, then `lookup` if it drafts too; None: M, and
        T for a text model.
      weights: First block's weights: of each view, then a head's, then lookup's; None: uniform.
      weighting: Rule by which weights are learned, as `parse_weighting` reads it: `grid:window=16`.
      gamma: Draft length: drafted tokens in each block, or on a tree's longest path. "auto"
        chooses the draft and its length, or plain decoding, by measured times as it goes, and
        without `views` adds lookup to the draft. It is 5 with a tree, and on a mesh of several
        processes, whose clocks would choose differently.
      tree: Token tree instead of a chain: `2`, `2:32` (32 nodes) or `dynamic:4:24`.
      width: Tokens that each target pass reads, padding included: gamma + 1 or more. At one width,
        and without a tree, answers equal plain decoding's in 16 bits too; caches do not grow.
        None: no padding.
      trace: Whether `Result.trace` records the origin of each token.
    """

    views: tuple[str, ...] | None = None
    weights: tuple[float, ...] | None = None
    weighting: str = "static"
    gamma: int | Literal["auto"] = "auto"
    tree: str | None = None
    width: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma != "auto":
            check_counts(gamma=self.gamma)
        if self.width is not None and not count_within(1, WIDEST)(self.width):
            raise InputError(f"width: {self.width!r:.60}; give 1 to {WIDEST}")
        for name, example in {"tree": "2:32", "weighting": "mt-paper"}.items():
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "weighting"):
                raise InputError(f"{name}: {value!r}; give a string, as {example!r}")
        _check_views(self.views)
        read_views(self.views or ())
        _ = self.shape, self.rule

    @cached_property
    def shape(self) -> TreeSpec | None:
        """Return the shape of a block that is a tree."""
        return None if self.tree is None else parse_tree(self.tree, self.length)

    @property
    def auto(self) -> bool:
        """Return whether the engine chooses among plans."""
        return self.gamma == "auto" and self.tree is None

    @property
    def length(self) -> int:
        """Return the draft length, where there is one."""
        return LENGTH if self.gamma == "auto" else self.gamma

    def padded(self, block: int) -> int:
        """Return how many tokens a pass reads for a block of `block` tokens.

        Raises InputError for a width that does not hold the block, or that is given with a tree.
        """
        # Nodes of a tree are in other cache slots than a chain's tokens, so sums round differently.
        if self.width is not None and self.tree is not None:
            raise InputError(f"width: {self.width} with a tree; leave out width or tree")
        width = self.width or block
        if width < block:
            raise InputError(
                f"width: {width}, but a block has {block} tokens; give {block} or more"
            )
        return width

    @cached_property
    def rule(self) -> Weighting:
        """Return the rule by which weights are learned."""
        return parse_weighting(self.weighting)


@dataclass(frozen=True, kw_only=True)
class CollaborationConfig(Batching):
    """Choose how several models decode together (CoS). All methods draw from the same law.

    Attributes:
      combination: Distribution to draw from: `weighted:0.6,0.4`, `contrastive:mu=0.1`, or your own.
      method: `alternating` (CoS), `naive` (one proposer), `speculative` (bonus), or `standard`.
      gammas: Draft length of each model; None: 1 each, which costs no extra passes (Cor. 3.7).
      default_proposer: Index of the model that proposes first and after rejections, or always.
        "auto" takes the largest weight for a model's size, see
        `jaxspec.decoding.collaboration.combination.default_proposer`. That model then has the
        longest of `gammas`, and gives its own in exchange.
      views: View of the images for each model, any but C; None: M for all that see.
    """

    combination: str | Combination = "weighted"
    method: Method = "alternating"
    gammas: tuple[int, ...] | None = None
    default_proposer: int | Literal["auto"] = 0
    views: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in get_args(Method):
            raise InputError(
                f"method: {self.method!r} is unknown; use {', '.join(get_args(Method))}"
            )
        _check_views(self.views)
        gammas, is_length = self.gammas, count_within(1, LARGEST)
        if gammas is not None and not (
            isinstance(gammas, list | tuple) and gammas and all(map(is_length, gammas))
        ):
            raise InputError(f"gammas: {gammas!r:.60}; give each model 1 or more, as (5, 1)")

    def checked(self, models: int) -> tuple[Combination, tuple[int, ...]]:
        """Return the combination and draft lengths; raise InputError if they do not fit."""
        if models < 2:
            raise InputError(f"collaboration: {models} model; give at least 2, repeats are allowed")
        first = self.default_proposer
        if first != "auto" and not count_within(0, models - 1)(first):
            raise InputError(
                f"default_proposer: {first!r:.60} of {models} models; "
                f"give 0 to {models - 1}, or auto"
            )
        for name, entries in (("gammas", self.gammas), ("views", self.views)):
            if entries is not None and len(entries) != models:
                listing = ",".join(map(str, entries))
                raise InputError(
                    f"{name}: {listing} are {len(entries)} for {models} models; give one a model"
                )
        combination = self.combination
        if isinstance(combination, str):
            combination = parse_combination(combination, models)
        if not all(hasattr(combination, name) for name in ("soft", "best")):
            raise InputError(
                f"combination: {combination!r:.60}; give a text, as 'weighted:0.6,0.4'"
            )
        return combination, tuple(self.gammas or (1,) * models)


def _check_views(views: object) -> None:
    """Raise InputError for views that are no list of names."""
    names = () if views is None else views
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"views: {views!r:.60}; give a tuple of names, as ('M', 'T')")


def capped_gamma(option: str, gamma: int, max_new_tokens: int) -> int:
    """Return the draft length, at most `max_new_tokens`; print a line if that cuts it."""
    if not 1 <= max_new_tokens < gamma:
        return gamma
    say(
        f"{option}: {gamma} is over the {max_new_tokens} new tokens; "
        f"drafting {max_new_tokens} a block"
    )
    return max_new_tokens

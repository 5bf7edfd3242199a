"""Turn the drafts that a user gives into sources, or into one clear error.

Drafts are models and heads, found by their files (`loading.load_draft`). `EngineConfig.views` says
how a draft model is shown the prompt, and may add lookup, which needs no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.config import KVHeadConfig
from jaxspec.decoding.inputs import Member
from jaxspec.decoding.sources.draft_model import DraftModel
from jaxspec.decoding.sources.eagle3 import Eagle3
from jaxspec.decoding.sources.head import HeadSource
from jaxspec.decoding.sources.kv_head import KVHeadSource
from jaxspec.decoding.sources.lookup import LOOKUP, Lookup
from jaxspec.decoding.sources.one_pass import OnePassHead
from jaxspec.decoding.sources.source import Source
from jaxspec.errors import InputError
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.views import View, parse_views

HEAD = "head"
"""Name of a head among the parts of a mixture, for tables and records."""


class Mixture(NamedTuple):
    """Name the parts of a mixture, in order: a draft model's views, a head, lookup."""

    views: tuple[View, ...]
    head: bool
    lookup: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Return a name for each distribution of the mixture."""
        parts = [view.name for view in self.views]
        return (*parts, *[HEAD] * self.head, *[LOOKUP] * self.lookup)


def mixture(views: Sequence[str] | None, models: int, heads: int) -> Mixture:
    """Return the mixture of so many draft models and heads; `views` None shows a model view M.

    Raises InputError for views without a model, a model without a view, and several of a kind.
    """
    if models > 1 or heads > 1:
        raise InputError(f"draft: {models} models and {heads} heads; give at most one of each")
    if views is None:
        views = ("M",) * models
    lookup, shown = LOOKUP in views, tuple(name for name in views if name != LOOKUP)
    if list(views) != [*shown, *[LOOKUP] * lookup]:
        raise InputError(f"views: {','.join(views)!r}; name lookup once, behind all others")
    if HEAD in shown:
        raise InputError(f"views: {','.join(views)!r}; a head reads no view, give it as a draft")
    if shown and not models:
        raise InputError(
            f"views: {','.join(shown)} need a draft model; give one, or leave them out"
        )
    if models and not shown:
        raise InputError("draft: no view shows the model a prompt; add M to the views")
    return Mixture(parse_views(shown) if shown else (), heads > 0, lookup)


def sources_of(
    parts: Mixture,
    target: LanguageModel,
    model: LanguageModel | None,
    head: KVHeadConfig | None,
    gamma: int,
    shares_tower: bool,
) -> tuple[Source, ...]:
    """Return the sources of a mixture.

    shares_tower: Whether the draft model reads the target's image features.
    """
    sources: list[Source] = []
    if model is not None and parts.views:
        views = tuple(Member(model, view.pool, view.reads_images) for view in parts.views)
        sources.append(DraftModel(views, shares_tower))
    if head is not None and parts.head:
        sources.append(_head_source(head)(head, gamma))
    if parts.lookup:
        sources.append(Lookup(target.text.vocab_size))
    return tuple(sources)


def _head_source(config: KVHeadConfig) -> type[HeadSource]:
    return Eagle3 if config.fused else OnePassHead if config.parallel else KVHeadSource

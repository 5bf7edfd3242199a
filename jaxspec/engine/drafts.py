"""Turn the drafts that a user gives into sources, or into one clear error.

Drafts are models and heads, known by their configurations. `EngineConfig.views` says how a draft
model is shown the prompt, and may add lookup, which needs no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.config import LvlmConfig, ModelConfig
from jaxspec.decoding.inputs import Member
from jaxspec.decoding.sources.draft_model import DraftModel
from jaxspec.decoding.sources.head import HeadSource
from jaxspec.decoding.sources.lookup import LOOKUP, Lookup
from jaxspec.decoding.sources.source import Source
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.views import View, parse_views

HEAD = "head"
"""Name of a head among the parts of a mixture, for tables and records."""
DraftConfig = ModelConfig | HeadConfig


class Mixture(NamedTuple):
    """Say what drafts, in order: a model in its views, a head, lookup."""

    views: tuple[View, ...] = ()
    model: ModelConfig | None = None
    head: HeadConfig | None = None
    lookup: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return a name for each distribution of the mixture."""
        parts = {HEAD: self.head is not None, LOOKUP: self.lookup}
        return (*(view.name for view in self.views), *(name for name in parts if parts[name]))


NOTHING = Mixture()
"""The mixture of a program that drafts nothing."""


def mixture(views: Sequence[str] | None, drafts: Sequence[DraftConfig]) -> Mixture:
    """Return the mixture of these drafts; `views` None shows a model M, a text model T.

    Raises InputError for views without a model, a model without a view, and several of a kind.
    """
    heads = [draft for draft in drafts if isinstance(draft, HeadConfig)]
    models = [draft for draft in drafts if isinstance(draft, ModelConfig)]
    if len(models) > 1 or len(heads) > 1:
        counts = f"{len(models)} models and {len(heads)} heads"
        raise InputError(f"draft: {counts}; give at most one of each")
    if views is None:
        views = ["M" if isinstance(model, LvlmConfig) else "T" for model in models]
    model_views, lookup = read_views(views)
    names = ",".join(view.name for view in model_views)
    if model_views and not models:
        raise InputError(f"views: {names} need a draft model; give one, or leave them out")
    if models and not model_views:
        raise InputError("draft: no view shows the model a prompt; add M to the views")
    return Mixture(model_views, next(iter(models), None), next(iter(heads), None), lookup)


def read_views(names: Sequence[str]) -> tuple[tuple[View, ...], bool]:
    """Return the views of a draft model, and whether lookup drafts with it."""
    model_views, lookup = tuple(name for name in names if name != LOOKUP), LOOKUP in names
    if tuple(names) != (*model_views, *[LOOKUP] * lookup):
        raise InputError(f"views: {','.join(names)!r}; name lookup once, behind all others")
    if HEAD in model_views:
        raise InputError(f"views: {','.join(names)!r}; a head reads no view, give it as a draft")
    return parse_views(model_views) if model_views else (), lookup


def sources_of(
    parts: Mixture, target: LanguageModel, gamma: int, shares_tower: bool = False
) -> tuple[Source, ...]:
    """Return the sources of a mixture, those with parameters first.

    Raises InputError for a head that was made for another target.

    shares_tower: Whether the draft model reads the target's image features.
    """
    sources: list[Source] = []
    if parts.model is not None:
        model = LanguageModel(parts.model)
        views = tuple(Member(model, view.pool, view.reads_images) for view in parts.views)
        sources.append(DraftModel(views, shares_tower))
    if parts.head is not None:
        head = parts.head.for_target(target.config)
        sources.append(HeadSource(head, gamma, target))
    if parts.lookup:
        sources.append(Lookup(target.text.vocab_size, alone=not sources))
    return tuple(sources)

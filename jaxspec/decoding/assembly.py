"""Assemble what an engine runs: a program, its parameters, and the forms of its prompts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxspec.config import KVHeadConfig, LvlmConfig, text_config
from jaxspec.decoding.alternating import Alternating
from jaxspec.decoding.compile_cache import Held
from jaxspec.decoding.drafters import make_drafter
from jaxspec.decoding.engine_config import CollaborationConfig, EngineConfig
from jaxspec.decoding.inputs import Member
from jaxspec.decoding.one_proposer import OneProposer
from jaxspec.decoding.program import Program
from jaxspec.decoding.requests import EncodedRequest
from jaxspec.decoding.sources.draft_model import DraftModel
from jaxspec.decoding.sources.eagle3 import Eagle3
from jaxspec.decoding.sources.head import HeadSource
from jaxspec.decoding.sources.kv_head import KVHeadSource
from jaxspec.decoding.sources.lookup import Lookup
from jaxspec.decoding.sources.one_pass import OnePassHead
from jaxspec.decoding.sources.source import Source
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.tree import parse_tree
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError
from jaxspec.loading import LoadedModel, check_pair, check_vocabulary, check_words, same_tower
from jaxspec.models import LanguageModel, split_tower
from jaxspec.prompts.rows import PromptRow
from jaxspec.prompts.views import VIEWS, View, parse_view, parse_views, prompt_views
from jaxspec.sharding import mesh_of, put, small_sharding
from jaxspec.typing import Params


@dataclass(frozen=True)
class Form:
    """Pair a model of the program with the view in which it reads prompts."""

    model: LoadedModel
    view: View
    name: str
    """Name of the model in error messages."""
    drafts: bool = False
    """Whether it only drafts: past its trained positions it drafts on, perhaps worse."""

    def check_context(self, request: EncodedRequest, row: PromptRow) -> None:
        """Raise InputError if prompt and answer exceed the model's context."""
        limit = text_config(self.model.config).max_position_embeddings
        if len(row) + request.max_new_tokens <= limit:
            return
        if self.drafts:
            warnings.warn(
                f"{self.name}: prompts and answers pass its {limit} trained positions, so that "
                "it may draft worse there; answers stay the target's",
                stacklevel=2,
            )
            return
        raise InputError(
            f"prompt: {len(row)} tokens and {request.max_new_tokens} new ones are over "
            f"{self.name}'s context of {limit}; shorten the prompt or lower max_new_tokens"
        )


@dataclass(frozen=True)
class Assembly:
    """Hold a program with its parameters and the models that read its inputs."""

    program: Program
    params: Params
    forms: tuple[Form, ...]
    """Target's form, then the draft's for each view; or one for each collaborating model."""
    towers: tuple[LoadedModel | None, ...]
    """Models of the program's towers."""
    lead: LoadedModel
    """Model whose tokeniser and chat template write the prompts."""

    @cached_property
    def held(self) -> Held:
        """Return the program with its parameters and their mesh, as compiled steps take them."""
        return Held(self.program, mesh_of(self.lead.params), self.params)


def chosen_views(
    target: LoadedModel, draft: LoadedModel | None, views: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Return the views to draft from; None: M for a draft, and kv for a KV head.

    Raises InputError for views without a draft or a KV head to read them.
    """
    if views is None:
        return ("M",) * (draft is not None) + ("kv",) * (target.head is not None)
    shown = prompt_views(parse_views(views)) if views else ()
    if shown and draft is None:
        raise InputError(f"views: {','.join(views)} need a draft; give one, or leave them out")
    return views


def speculation(target: LoadedModel, draft: LoadedModel | None, config: EngineConfig) -> Assembly:
    """Assemble a target with the draft and KV head that the views need, or alone.

    Raises InputError if draft and target do not share a tokeniser, or a view needs what the draft
    lacks.
    """
    check_vocabulary("target", target, spare=0)
    views = parse_views(config.views) if config.views else ()
    shown = prompt_views(views)
    params: dict[str, Any] = {"target": target.params}
    form = Form(target, VIEWS["M" if target.images else "T"], "the target")
    head = target.head if any(view.reads_target for view in views) else None
    if head is None and any(view.reads_target for view in views):
        raise InputError("view kv: the target has no KV head; give one, or leave the view out")
    shares, forms = False, [form]
    draft = draft if shown else None
    if draft is not None:
        check_pair(target, draft, shown)
        draft = replace(
            draft, params=put(draft.params, small_sharding(target.params))
        ).sharing_tower(target)
        shares = same_tower(target, draft)
        # With a shared tower the features come from the target's.
        own = split_tower(draft.config, draft.params)[1] if shares else draft.params
        params[DraftModel.name] = own
        forms += [Form(draft, view, "the draft", drafts=True) for view in shown]
    models = target.model, draft and draft.model, head and head.config
    sources = sources_of(config, *models, shares)
    for source in sources:
        if head is not None and isinstance(source, HeadSource):
            mesh, place = mesh_of(target.params), small_sharding(target.params)
            place = place if mesh is None else source.places(head.params, mesh)
            params[source.name] = put(head.params, place)
    program = build_program(target.model, sources, config)
    towers = target, *(draft if source.tower else None for source in sources)
    return Assembly(program, params, tuple(forms), towers, target)


def sources_of(
    config: EngineConfig,
    target: LanguageModel,
    draft: LanguageModel | None,
    head: KVHeadConfig | None,
    shares_tower: bool,
) -> tuple[Source, ...]:
    """Return the sources of drafts that the config's views name."""
    views = parse_views(config.views) if config.views else ()
    shown, sources = prompt_views(views), []
    if draft is not None and shown:
        members = tuple(Member(draft, view.pool, view.reads_images) for view in shown)
        sources.append(DraftModel(members, shares_tower))
    if head is not None:
        kind = Eagle3 if head.fused else OnePassHead if head.parallel else KVHeadSource
        sources.append(kind(head, config.gamma))
    if any(view.looks_up for view in views):
        sources.append(Lookup(target.text.vocab_size))
    return tuple(sources)


def build_program(
    target: LanguageModel, sources: Sequence[Source], config: EngineConfig
) -> Autoregressive | Speculator:
    """Return the program of a target with its sources of drafts; without any it decodes alone."""
    if not sources:
        return Autoregressive(target, config.width or 1)
    tree = None if config.tree is None else parse_tree(config.tree, config.gamma)
    scored = min(source.vocabulary for source in sources)
    if tree is not None and tree.width > scored:
        raise InputError(f"tree: {config.tree!r} has more branches than there are tokens, {scored}")
    for source in sources:
        if source.longest is not None and config.gamma > source.longest:
            raise InputError(
                f"gamma: {config.gamma} is more than the {source.longest} tokens that the draft "
                f"writes in one pass; give at most {source.longest}"
            )
    drafter = make_drafter(sources, config.gamma, target.text.vocab_size, tree)
    weighting = parse_weighting(config.weighting)
    block = drafter.nodes + 1
    # Nodes of a tree are in other cache slots than a chain's tokens, so that sums round otherwise.
    if config.width is not None and tree is not None:
        raise InputError(f"width: {config.width} with a tree; leave out width or tree")
    width = config.width or block
    if width < block:
        raise InputError(f"width: {width}, and a block has {block} tokens; give {block} or more")
    return Speculator(target, drafter, weighting, config.trace, width)


def collaboration(models: Sequence[LoadedModel], config: CollaborationConfig) -> Assembly:
    """Assemble collaborating models; a text model is shown a line break for an image.

    The same model may be listed more than once. With views M and T and `contrastive:beta=1`
    that is visual contrastive decoding (Leng et al. 2024), the blurred image being none.

    Raises InputError unless all have one vocabulary and one tokeniser.
    """
    combination, gammas = config.checked(len(models))
    names = config.views or tuple("M" if model.images else "T" for model in models)
    forms = tuple(
        Form(model, _member_view(name, model, number), f"model {number}")
        for number, (model, name) in enumerate(zip(models, names), start=1)
    )
    for number, model in enumerate(models, start=1):
        if words := model.model.text.draft_vocabulary:
            raise InputError(f"model {number}: scores {len(words)} tokens; export it with all")
    first, *others = models
    check_vocabulary("model 1", first, spare=0)
    for number, other in enumerate(others, start=2):
        sizes = [text_config(model.config).vocab_size for model in (first, other)]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"model {number} vocabulary: {sizes[1]} tokens and model 1's {sizes[0]}; "
                "models that write together need one vocabulary"
            )
        if other is not first:
            check_words(first.tokenizer, other.tokenizer, f"model {number}", "model 1")
    marks = {
        model.config.image_token_index for model in models if isinstance(model.config, LvlmConfig)
    }
    if len(marks) > 1:
        raise InputError(f"models: image_token_index {sorted(marks)} differ")
    lead = next((form.model for form in forms if form.view.reads_images), first)
    members = tuple(
        Member(form.model.model, form.view.pool, form.view.reads_images) for form in forms
    )
    proposer = config.default_proposer
    if config.method == "alternating":
        program: Program = Alternating(members, gammas, proposer)
    else:
        gamma = 0 if config.method == "standard" else gammas[proposer]
        program = OneProposer(members, gamma, proposer, bonus=config.method == "speculative")
    params = {"models": tuple(model.params for model in models), "combination": combination}
    towers = tuple(form.model if form.view.reads_images else None for form in forms)
    return Assembly(program, params, forms, towers, lead)


def _member_view(name: str, model: LoadedModel, number: int) -> View:
    """Return the view of a name, or raise InputError if a collaborating model cannot read it."""
    view = parse_view(name)
    refused = {
        "captions are for drafts": view.reads_captions,
        "KV heads are for drafts": view.reads_target,
        "lookup is for drafts": view.looks_up,
        "the slots counted are a target's": view.counts_slots,
        "it is a text model": view.reads_images and model.images is None,
    }
    for reason, holds in refused.items():
        if holds:
            raise InputError(f"views: model {number} cannot be shown {view.name}, {reason}; use T")
    return view

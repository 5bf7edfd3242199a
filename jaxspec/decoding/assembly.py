"""Assemble what an engine runs: a program, its parameters, and the forms of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxspec.config import KVHeadConfig, LvlmConfig, text_config
from jaxspec.decoding.alternating import Alternating
from jaxspec.decoding.compile_cache import Held
from jaxspec.decoding.drafters import make_drafter
from jaxspec.decoding.engine_config import CollaborationConfig, EngineConfig
from jaxspec.decoding.one_proposer import OneProposer
from jaxspec.decoding.program import Member, Program
from jaxspec.decoding.requests import EncodedRequest
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.tree import parse_tree
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError
from jaxspec.loading import LoadedModel, check_pair, check_vocabulary, check_words, same_tower
from jaxspec.models import LanguageModel, split_tower
from jaxspec.prompts.rows import PromptRow
from jaxspec.prompts.views import VIEWS, View, parse_view, parse_views, prompt_views
from jaxspec.sharding import mesh_of, put, shardings, small_sharding
from jaxspec.typing import Params


@dataclass(frozen=True)
class Form:
    """Pair a model of the program with the view in which it reads prompts."""

    model: LoadedModel
    view: View
    name: str
    """Name of the model in error messages."""
    spare: int | None = 0
    """Number of tokens past the last new one that the context must hold; None: no limit."""

    def check_context(self, request: EncodedRequest, row: PromptRow) -> None:
        """Raise InputError if prompt and answer exceed the model's context."""
        limit = text_config(self.model.config).max_position_embeddings
        if self.spare is None or len(row) + request.max_new_tokens + self.spare <= limit:
            return
        if self.spare:
            raise InputError(
                f"view {self.view.name}: {len(row)} prompt tokens and {request.max_new_tokens} new "
                f"ones pass the draft's {limit} trained positions; use context 'drop_view'"
            )
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
    head = None
    if any(view.reads_target for view in views):
        head = target.head
        if head is None:
            raise InputError("view kv: the target has no KV head; give one, or leave the view out")
        mesh, place = mesh_of(target.params), small_sharding(target.params)
        if mesh is not None:
            place = shardings(head.config.text_config, head.params, mesh)
        params["head"] = put(head.params, place)
    shares, forms = False, [form]
    draft = draft if shown else None
    if draft is not None:
        check_pair(target, draft, shown)
        draft = replace(
            draft, params=put(draft.params, small_sharding(target.params))
        ).sharing_tower(target)
        shares = same_tower(target, draft)
        # With a shared tower the features come from the target's.
        params["drafter"] = split_tower(draft.config, draft.params)[1] if shares else draft.params
        spare = config.gamma if config.context == "error" else None
        forms += [Form(draft, view, "the draft", spare) for view in shown]
    models = target.model, draft and draft.model, head and head.config
    program = build_program(*models, config, shares)
    towers = target, *(draft if tower else None for tower in program.towers[1:])
    return Assembly(program, params, tuple(forms), towers, target)


def build_program(
    target: LanguageModel,
    draft: LanguageModel | None,
    head: KVHeadConfig | None,
    config: EngineConfig,
    shares_tower: bool,
) -> Autoregressive | Speculator:
    """Return the program of a target with a draft, a KV head, lookup, or none of them."""
    size = target.text.vocab_size
    views = parse_views(config.views) if config.views else ()
    lookup = any(view.looks_up for view in views)
    readers = [draft] if draft is not None else []
    readers += [LanguageModel(head.text_config)] if head is not None else []
    if not readers and not lookup:
        return Autoregressive(target, config.width or 1)
    tree = None if config.tree is None else parse_tree(config.tree, config.gamma)
    scored = min((len(model.text.draft_vocabulary) or size for model in readers), default=size)
    if tree is not None and tree.width > scored:
        raise InputError(f"tree: {config.tree!r} has more branches than there are tokens, {scored}")
    shown = prompt_views(views) if draft is not None else ()
    reader = draft or target
    if head is not None:
        head.check_gamma(config.gamma)
    drafter = make_drafter(reader, shown, config.gamma, size, tree, config.context, head, lookup)
    weighting = parse_weighting(config.weighting)
    block = drafter.nodes + 1
    # Nodes of a tree are in other cache slots than a chain's tokens, so that sums round otherwise.
    if config.width is not None and tree is not None:
        raise InputError(f"width: {config.width} with a tree; leave out width or tree")
    width = config.width or block
    if width < block:
        raise InputError(f"width: {width}, and a block has {block} tokens; give {block} or more")
    return Speculator(target, drafter, weighting, shares_tower, config.trace, width)


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

"""Assemble what an engine runs: a program, its parameters, and the forms of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from jaxspec.config import text_config
from jaxspec.decoding.collaboration.alternating import Alternating
from jaxspec.decoding.collaboration.combination import default_proposer
from jaxspec.decoding.collaboration.one_proposer import OneProposer
from jaxspec.decoding.drafting.trees import make_drafter
from jaxspec.decoding.inputs import Member
from jaxspec.decoding.plans import Plan, longest_block, plans_of
from jaxspec.decoding.program import Program
from jaxspec.decoding.sources.source import Source
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.engine.compile_cache import Held
from jaxspec.engine.config import CollaborationConfig, EngineConfig
from jaxspec.engine.drafts import NOTHING, Mixture, mixture, sources_of
from jaxspec.engine.requests import EncodedRequest
from jaxspec.errors import InputError, warn_once
from jaxspec.loading.models import LoadedDraft, LoadedModel
from jaxspec.loading.pairs import check_group, check_pair, check_vocabulary, same_tower
from jaxspec.models.families import split_tower, text_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.rows import PromptRow
from jaxspec.prompts.views import VIEWS, Change, View, parse_view, parse_weights
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
    before: int = 0
    """Number of changes of the images whose features precede the view's."""

    def check_row(self, request: EncodedRequest, row: PromptRow) -> None:
        """Raise InputError if a token has no embedding, or the answer would exceed the context."""
        size = text_config(self.model.config).vocab_size
        largest = int(row.tokens[row.images < 0].max(initial=0))
        if largest >= size and not self.drafts:
            word = self.model.tokenizer.convert_ids_to_tokens(largest)
            raise InputError(
                f"prompt: {word!r} is token {largest}, but {self.name} has {size}; leave it out"
            )
        limit = text_config(self.model.config).context
        if len(row) + request.max_new_tokens <= limit:
            return
        if self.drafts:
            warn_once(
                f"{self.name}: prompts and answers pass its {limit} trained positions, where it "
                "may draft worse; answers stay the target's"
            )
            return
        raise InputError(
            f"prompt: {len(row)} tokens and {request.max_new_tokens} new ones are over "
            f"{self.name}'s context of {limit}; shorten the prompt or lower max_new_tokens"
        )


class Tower(NamedTuple):
    """Pair a model with the changes of the images that its tower reads."""

    model: LoadedModel
    changes: tuple[Change, ...] = (None,)

    def place(self, view: View) -> int:
        """Return the number of changes before the view's own."""
        return self.changes.index(view.pixels) if view.reads_images else 0


@dataclass(frozen=True)
class Assembly:
    """Hold a program with its parameters and the models that read its inputs."""

    program: Program
    params: Params
    forms: tuple[Form, ...]
    """Target's form, then the draft's for each view; or one for each collaborating model."""
    towers: tuple[Tower | None, ...]
    """Models of the program's towers, and what each reads."""
    lead: LoadedModel
    """Model whose tokeniser and chat template write the prompts."""
    mixture: Mixture = NOTHING
    """What drafts."""
    weights: tuple[float, ...] = ()
    """Weights of the first block, one for each part of the mixture."""
    plans: tuple[Plan, ...] = ()
    """Plans among which a policy chooses; () always runs the program's own loop."""

    @cached_property
    def held(self) -> Held:
        """Return the program with its parameters and their mesh, as compiled steps take them."""
        return Held(self.program, mesh_of(self.lead.params), self.params)


def speculation(
    target: LoadedModel, drafts: Sequence[LoadedDraft], config: EngineConfig
) -> Assembly:
    """Assemble a target with its drafts and lookup, or a target that decodes plainly.

    Raises InputError if draft and target do not share a tokeniser, a view needs what the draft
    lacks, or a head was made for another target.
    """
    check_vocabulary("target", target)
    parts = mixture(config.views, [draft.config for draft in drafts])
    mesh = mesh_of(target.params)
    chooses = config.auto and not (mesh is not None and mesh.is_multi_process)
    if chooses and drafts and config.views is None and config.weights is None:
        parts = parts._replace(lookup=True)
    params: dict[str, Any] = {"target": target.params}
    forms = [Form(target, VIEWS["M" if target.images else "T"], "the target")]
    draft, reader = next((draft for draft in drafts if isinstance(draft, LoadedModel)), None), None
    shares, trees = False, [draft.params for draft in drafts if draft.config is parts.head]
    if draft is not None:
        check_pair(target, draft, parts.views)
        draft = replace(
            draft, params=put(draft.params, small_sharding(target.params))
        ).sharing_tower(target)
        changes = dict.fromkeys(view.pixels for view in parts.views if view.reads_images)
        reader = Tower(draft, tuple(changes) or (None,))
        shares = reader.changes == (None,) and same_tower(target, draft)
        # With a shared tower the features come from the target's.
        trees = [split_tower(draft.params)[1] if shares else draft.params, *trees]
        forms += [Form(draft, view, "the draft", True, reader.place(view)) for view in parts.views]
    sources = sources_of(parts, target.model, config.length, shares)
    if chooses and sources:
        config = replace(config, gamma=longest_block(sources, config.width))
        alone = len(sources) == 1
        sources = tuple(source.planned(config.length, alone) for source in sources)
    for source, tree in zip(sources, trees):
        sharding = small_sharding(target.params) if mesh is None else source.places(tree, mesh)
        params[source.name] = put(tree, sharding)
    program = build_program(target.model, sources, config)
    plans: tuple[Plan, ...] = ()
    if chooses and isinstance(program, Speculator):
        plans = plans_of(program, config.width)
    towers = Tower(target), *(reader if source.tower else None for source in sources)
    weights: tuple[float, ...] = ()
    if sources:
        shares = parse_weights(config.weights, len(parts.names))
        weights = config.rule.first(shares, target.model.text.vocab_size)
    return Assembly(program, params, tuple(forms), towers, target, parts, weights, plans)


def build_program(
    target: LanguageModel, sources: Sequence[Source], config: EngineConfig
) -> Autoregressive | Speculator:
    """Return the program of a target with its sources of drafts; without sources it is plain."""
    if not sources:
        return Autoregressive(target, config.width or 1)
    tree = config.shape
    scored = min(source.vocabulary for source in sources)
    if tree is not None and tree.width > scored:
        raise InputError(f"tree: {config.tree!r} has more branches than there are tokens, {scored}")
    for source in sources:
        if source.longest is not None and config.length > source.longest:
            raise InputError(
                f"gamma: {config.length} is more than the {source.longest} tokens that the draft "
                f"writes in one pass; give at most {source.longest}"
            )
    drafter = make_drafter(sources, config.length, target.text.vocab_size, tree)
    width = config.padded(drafter.nodes + 1)
    return Speculator(target, drafter, config.rule, config.trace, width)


def with_proposer(
    models: Sequence[LoadedModel], config: CollaborationConfig
) -> CollaborationConfig:
    """Return the options with the number of the model that proposes, and its draft length."""
    combination, lengths = config.checked(len(models))
    if config.default_proposer != "auto":
        return config
    decoders = [text_params(model.config, model.params) for model in models]
    costs = [sum(leaf.size for leaf in jax.tree.leaves(params)) for params in decoders]
    proposer, gammas = default_proposer(combination, costs), list(lengths)
    longest = gammas.index(max(gammas))
    gammas[proposer], gammas[longest] = gammas[longest], gammas[proposer]
    return replace(config, default_proposer=proposer, gammas=tuple(gammas))


def collaboration(models: Sequence[LoadedModel], config: CollaborationConfig) -> Assembly:
    """Assemble collaborating models; a text model is shown a line break for an image.

    config: As `with_proposer` returns it.

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
        if vocabulary := model.model.text.draft_vocabulary:
            raise InputError(f"model {number}: scores {len(vocabulary)} tokens; export it with all")
    check_group(models)
    lead = next((form.model for form in forms if form.view.reads_images), models[0])
    members = tuple(
        Member(form.model.model, form.view.pool, form.view.reads_images) for form in forms
    )
    proposer = config.default_proposer
    assert proposer != "auto"
    if config.method == "alternating":
        program: Program = Alternating(members, gammas, proposer)
    else:
        gamma = 0 if config.method == "standard" else gammas[proposer]
        program = OneProposer(members, gamma, proposer, bonus=config.method == "speculative")
    params = {"models": tuple(model.params for model in models), "combination": combination}
    towers = tuple(
        Tower(form.model, (form.view.pixels,)) if form.view.reads_images else None for form in forms
    )
    return Assembly(program, params, forms, towers, lead)


def _member_view(name: str, model: LoadedModel, number: int) -> View:
    """Return the view of a name, or raise InputError if a collaborating model cannot read it."""
    view = parse_view(name)
    refused = {
        "captions are for drafts": view.reads_captions,
        "the slots counted are a target's": view.counts_slots,
        "it is a text model": view.reads_images and model.images is None,
    }
    for reason, holds in refused.items():
        if holds:
            raise InputError(f"views: model {number} cannot be shown {view.name}, {reason}; use T")
    return view

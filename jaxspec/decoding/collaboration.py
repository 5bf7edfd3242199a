"""The host edge of collaborative decoding: M models of one vocabulary answer requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args, overload

import jax
import numpy as np

from jaxspec.config import LvlmConfig, text_config
from jaxspec.data.prompts import bucket
from jaxspec.decoding.alternating import Alternating
from jaxspec.decoding.collaborative import CollaborativeState, Member, MemberPrompts, OneProposer
from jaxspec.decoding.combination import Combination, parse_combination
from jaxspec.decoding.compile_cache import Held, timed
from jaxspec.decoding.loading import LoadedModel, check_vocabulary, check_words, image_inputs
from jaxspec.decoding.memory import MemberSizes, MembersReport, plan_members
from jaxspec.decoding.requests import (
    BATCH_BUCKETS,
    IMAGE_BUCKETS,
    NEW_BUCKETS,
    PROMPT_BUCKETS,
    EncodedRequest,
    Request,
    Result,
    check_batch_size,
    decoded_images,
    each,
    encode,
    image_units,
    in_batches,
    prompt_encoder,
    prompt_row,
    sampling_options,
)
from jaxspec.decoding.views import Row, View, parse_view, stack_rows
from jaxspec.errors import InputError
from jaxspec.sampling import Sampling
from jaxspec.typing import Params

Method = Literal["alternating", "naive", "speculative", "standard"]
Program = Alternating | OneProposer
Prompts = tuple[MemberPrompts, ...]


@dataclass(frozen=True)
class CollaborationConfig:
    """How models write together."""

    combine: str | Combination = "weighted"
    """What they draw from: `weighted:0.6,0.4`, `contrastive:mu=0.1`, `logits:1.5,-0.5`, as `parse_combination` reads
    it, or a combination of one's own."""
    method: Method = "alternating"
    """`alternating` is CoS. `naive`: one model proposes; `speculative`: likewise with a bonus token; `standard`: no
    proposals. All write the same, at another pace."""
    gammas: tuple[int, ...] | None = None
    """Draft length of each model; of one proposer, its own alone counts. None: 1 each, which is never slower than
    `standard` where a pass over a few tokens takes as long as one over one (Corollary 3.7)."""
    proposer: int = 0
    """The default proposer, or the only one."""
    views: tuple[str, ...] | None = None
    """How each model is shown images; None shows them to all that see. See `jaxspec.decoding.views`, but for C."""
    batch_size: int = 8
    """Most requests in one program."""
    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    image_buckets: tuple[int, ...] = IMAGE_BUCKETS
    new_buckets: tuple[int, ...] = NEW_BUCKETS

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise InputError(f"method: {self.method!r} is unknown; use {', '.join(get_args(Method))}")
        if self.gammas is not None and (not self.gammas or min(self.gammas) < 1):
            raise InputError(f"gammas: {self.gammas} drafted tokens; give each model 1 or more")
        check_batch_size(self.batch_size)

    def checked(self, models: int) -> tuple[Combination, tuple[int, ...]]:
        """The combination and the draft lengths of so many models; InputError where something does not fit them."""
        if models < 2:
            raise InputError(f"collaboration: {models} model; give 2 or more, the same one twice if need be")
        if not 0 <= self.proposer < models:
            raise InputError(f"proposer: {self.proposer} of {models} models; give 0 to {models - 1}")
        for name, given in (("gammas", self.gammas), ("views", self.views)):
            if given is not None and len(given) != models:
                shown = ",".join(map(str, given))
                raise InputError(f"{name}: {shown} are {len(given)} for {models} models; give one a model")
        combine = self.combine
        return parse_combination(combine, models) if isinstance(combine, str) else combine, self.gammas or (1,) * models


@dataclass(frozen=True)
class MemberCounts:
    """Counts of one request, models by identity; see `CollaborationStats` for what they mean."""

    emitted: int
    verified: int
    calls: np.ndarray
    tested: np.ndarray
    accepted: np.ndarray
    overlap: np.ndarray
    passes: np.ndarray
    """Forward passes of the batch that the request ran in."""


@partial(jax.jit, static_argnames=("program", "new_slots"))
def run_prefill(
    program: Program, params: Params, prompts: Prompts, options: Sampling, new_slots: int
) -> CollaborativeState:
    return program.prefill(params, prompts, options, new_slots)


@partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def run_decode(program: Program, params: Params, state: CollaborativeState, options: Sampling) -> CollaborativeState:
    return program.decode(params, state, options)


@dataclass
class Collaboration:
    """Decodes requests with what several models say together; a text model is shown a line break for an image.

    The same model may stand in `models` more than once. With views M and T and `contrastive:beta=1` that is visual
    contrastive decoding (Leng et al. 2024), the blurred image being none.

    Raises InputError unless all have one vocabulary and one tokeniser.
    """

    models: Sequence[LoadedModel]
    config: CollaborationConfig = field(default_factory=CollaborationConfig)

    def __post_init__(self) -> None:
        combination, gammas = self.config.checked(len(self.models))
        self.views = self._views()
        first, *others = self.models
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
        marks = {m.config.image_token_index for m in self.models if isinstance(m.config, LvlmConfig)}
        if len(marks) > 1:
            raise InputError(f"models: image_token_index {sorted(marks)} differ; use models with one image token")
        self.lead = next((m for m, view in zip(self.models, self.views) if view.reads_images), first)
        """The model whose prompts these are."""
        self.encoder = prompt_encoder(self.lead)
        members = tuple(Member(m.model, view.pool) for m, view in zip(self.models, self.views))
        self.params = {"models": tuple(m.params for m in self.models), "combination": combination}
        self.program = make_program(self.config.method, members, gammas, self.config.proposer)

    @overload
    def generate(self, requests: Request | str) -> Result[MemberCounts]: ...
    @overload
    def generate(self, requests: Sequence[Request | str]) -> list[Result[MemberCounts]]: ...
    def generate(self, requests: Request | str | Sequence[Request | str]) -> Any:
        """Decode requests, or questions, batching those of one bucket; results in the order given, or one of one."""
        if isinstance(requests, Request | str):
            return self.generate([requests])[0]
        read, rows = self._read(requests)
        results: dict[int, Result[MemberCounts]] = {}
        every = each(self._sizes, read, rows)
        for sizes, chosen in in_batches(every, self.config.batch_size):
            done = self._run(sizes, [read[i] for i in chosen], [rows[i] for i in chosen])
            results.update(zip(chosen, done, strict=True))
        return [results[i] for i in range(len(read))]

    def prefill(self, requests: Sequence[Request | str]) -> CollaborativeState:
        """The state after prefill of requests of one bucket, as one batch."""
        read, rows = self._read(requests)
        sizes = self._sizes(read[0], rows[0])
        return run_prefill(self.program, self.params, *self._inputs(read, rows, sizes), sizes.new)

    def memory_report(self, requests: Sequence[Request | str]) -> MembersReport:
        """What decoding the largest batch of these requests will hold on the device, before it is allocated."""
        read, rows = self._read(requests)
        sizes = each(self._sizes, read, rows)
        units = tuple(map(max, zip(*(size.units for size in sizes), strict=True)))
        largest = MemberSizes(max(size.length for size in sizes), units, max(size.new for size in sizes))
        batch = bucket(min(len(read), self.config.batch_size), BATCH_BUCKETS, "batch")
        panels = {id(model): model.panel_bytes(self._rows_of_a_pass(batch)) for model in self.models}
        return plan_members(self.program, self.params, batch, largest, sum(panels.values()))

    def loop_params(self, batch: int) -> Params:
        """The parameters as the loop reads them, which has passes over a run of each row."""
        rows = self._rows_of_a_pass(batch)
        return {**self.params, "models": tuple(model.loop_params(rows) for model in self.models)}

    def _rows_of_a_pass(self, batch: int) -> int:
        return batch * self.program.spare_slots

    def _views(self) -> tuple[View, ...]:
        names = self.config.views or tuple("M" if model.images else "T" for model in self.models)
        views = tuple(map(parse_view, names))
        for number, (model, view) in enumerate(zip(self.models, views), start=1):
            refused = {
                "captions are for drafts": view.reads_captions,
                "KV heads are for drafts": view.reads_target,
                "it is a text model": view.reads_images and model.images is None,
            }
            if any(refused.values()):
                mend = next(reason for reason, holds in refused.items() if holds)
                raise InputError(f"views: model {number} cannot be shown {view.name}, {mend}; use T")
        return views

    def _read(self, requests: Sequence[Request | str]) -> tuple[list[EncodedRequest], list[list[Row]]]:
        """The requests as they will be decoded, and the prompt of each as each model reads it."""
        checked = encode(self.encoder, requests)
        return checked, each(self._rows, checked)

    def _rows(self, request: EncodedRequest) -> list[Row]:
        rows = [prompt_row(self.encoder, m, view, request.prompt) for m, view in zip(self.models, self.views)]
        for number, (model, row) in enumerate(zip(self.models, rows), start=1):
            limit = text_config(model.config).max_position_embeddings
            if len(row) + request.max_new_tokens > limit:
                raise InputError(
                    f"prompt: {len(row)} tokens and {request.max_new_tokens} new ones are over the context of "
                    f"model {number}, {limit}; shorten the prompt, give fewer images or lower max_new_tokens"
                )
        return rows

    def _sizes(self, request: EncodedRequest, rows: list[Row]) -> MemberSizes:
        config = self.config
        units = (
            image_units(m, request.prompt, config.image_buckets) if view.reads_images else 0
            for m, view in zip(self.models, self.views)
        )
        return MemberSizes(
            bucket(max(map(len, rows)), config.prompt_buckets, "prompt tokens"),
            tuple(units),
            bucket(request.max_new_tokens, config.new_buckets, "max_new_tokens"),
        )

    def _inputs(
        self, requests: list[EncodedRequest], rows: list[list[Row]], sizes: MemberSizes
    ) -> tuple[Prompts, Sampling]:
        """The requests as numpy arrays, padded to the sizes with rows that emit nothing."""
        batch = bucket(len(rows), BATCH_BUCKETS, "batch")
        spare = batch - len(rows)
        pictures = decoded_images(requests, spare)
        prompts = tuple(
            MemberPrompts(
                stack_rows([[row] for row in [*forms, *[forms[-1]] * spare]], sizes.length)[0],
                image_inputs(model, pictures, units),
            )
            for model, units, forms in zip(self.models, sizes.units, zip(*rows, strict=True), strict=True)
        )
        return prompts, sampling_options(requests, self.lead.config, batch)

    def _run(
        self, sizes: MemberSizes, requests: list[EncodedRequest], rows: list[list[Row]]
    ) -> list[Result[MemberCounts]]:
        prompts, options = self._inputs(requests, rows, sizes)
        hold = partial(Held, self.program, None)
        whole, looped = hold(self.params), hold(self.loop_params(len(options.temperature)))
        state, prefill_ms = timed(run_prefill, whole, prompts, options, static=(sizes.new,))
        state, decode_ms = timed(run_decode, looped, state, options)
        tokens, count, stats = jax.tree.map(np.asarray, (state.tokens, state.count, state.stats))
        return [
            Result(
                text=self.encoder.decode(tokens[i, : count[i]]),
                tokens=tuple(tokens[i, : count[i]].tolist()),
                stats=MemberCounts(
                    int(stats.emitted[i]),
                    int(stats.verified[i]),
                    stats.calls[i],
                    stats.tested[i],
                    stats.accepted[i],
                    stats.overlap[i],
                    stats.passes,
                ),
                prefill_ms=prefill_ms,
                decode_ms=decode_ms,
                batch=len(requests),
            )
            for i in range(len(requests))
        ]


def make_program(method: Method, members: tuple[Member, ...], gammas: tuple[int, ...], proposer: int = 0) -> Program:
    """The loop of a method."""
    if method == "alternating":
        return Alternating(members, gammas, proposer)
    gamma = 0 if method == "standard" else gammas[proposer]
    return OneProposer(members, gamma, proposer, bonus=method == "speculative")

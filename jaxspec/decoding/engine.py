"""The host edge: encode, bucket, place, compile once, run, decode.

Everything inside a bucket (prompt length, images, new tokens, batch) is one compiled program; lengths,
temperatures, limits, weights and keys are traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, overload

import jax
import numpy as np

from jaxspec.config import KVHeadConfig, text_config
from jaxspec.data.prompts import bucket
from jaxspec.decoding.adaptive_gamma import BLOCKS, NOTHING, gammas_up_to, init_gamma, measure_costs, update_prior
from jaxspec.decoding.compile_cache import Held, timed
from jaxspec.decoding.drafters import make_drafter
from jaxspec.decoding.engine_config import EngineConfig
from jaxspec.decoding.growth import grow, rooms
from jaxspec.decoding.loading import LoadedModel, check_pair, check_vocabulary, image_inputs, same_tower
from jaxspec.decoding.memory import MemoryReport, Sizes, plan_memory
from jaxspec.decoding.refill import refill_rows, take_in
from jaxspec.decoding.replay import RecordedTarget
from jaxspec.decoding.requests import (
    BATCH_BUCKETS,
    EncodedRequest,
    Request,
    Result,
    RowStats,
    decoded_images,
    each,
    encode,
    image_units,
    in_batches,
    prompt_encoder,
    prompt_row,
    sampling_options,
)
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import STRIDE, DecodeState, Pause, PromptBatch, place, rewound, whereabouts
from jaxspec.decoding.trace import trace_record
from jaxspec.decoding.tree import parse_tree
from jaxspec.decoding.views import (
    VIEWS,
    Caption,
    Captioner,
    Row,
    needs_captioner,
    parse_views,
    parse_weights,
    prompt_views,
    stack_rows,
    which_image,
)
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel, split_tower
from jaxspec.models.kv_head import head_rows, reads_as_text
from jaxspec.sampling import Sampling
from jaxspec.sharding import mesh_of, on_mesh, put, small_sharding
from jaxspec.typing import Params

__all__ = ["Engine", "EngineConfig", "LoadedModel", "Request", "Result", "RowStats"]

Program = Autoregressive | Speculator


@partial(jax.jit, static_argnames=("program", "new_slots"))
def run_prefill(program: Program, params: Params, batch: PromptBatch, options: Sampling, new_slots: int) -> DecodeState:
    return place(program.prefill(params, batch, options, new_slots))


@partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def run_decode(
    program: Program, params: Params, state: DecodeState, options: Sampling, pause: Pause | None = None
) -> DecodeState:
    return place(program.decode(params, state, options, pause))


@dataclass
class Engine:
    """Decodes requests with a target, and a draft where one is given. The output is the target's own.

    It runs where the target lies: on one device, or on the mesh that it was loaded onto, with the draft on each.

    Raises InputError if draft and target do not share a tokeniser, or a view needs what the draft lacks.
    """

    target: LoadedModel
    draft: LoadedModel | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    captioner: Captioner | None = None
    """For view C. It runs before prefill, on all images of a call at once: how long the captions are decides the
    bucket, and with it the size of the target's cache, so that no pass of the target can start before."""

    def __post_init__(self) -> None:
        check_vocabulary("target", self.target, spare=0)
        views = parse_views(self.config.views)
        self._views = prompt_views(views)
        if not self._views:
            self.draft = None
        self._captioned = self.draft is not None and needs_captioner(views, self.captioner)
        self.encoder = prompt_encoder(self.target)
        self.params = {"target": self.target.params}
        self._known: dict[int, tuple[Held, Held]] = {}
        self.mesh = mesh_of(self.target.params)
        target = self.target.model
        head = self._take_head() if len(views) > len(self._views) else None
        shares, reader = False, head and head.text_config
        if self.draft is not None:
            shares, reader = self._take_draft(self.draft), self.draft.config
        if reader is None:
            self.program: Program = Autoregressive(target)
            return
        tree = None if self.config.tree is None else parse_tree(self.config.tree, self.config.gamma)
        reader, size = LanguageModel(reader), target.text.vocab_size
        if tree is not None and tree.width > size:
            raise InputError(f"tree: {self.config.tree!r} branches {tree.width} times, and there are {size} tokens")
        drafter = make_drafter(reader, self._views, self.config.gamma, size, tree, self.config.context, head)
        weighting = parse_weighting(self.config.weighting)
        if isinstance(self.target, RecordedTarget) and not weighting.hard_labels:
            raise InputError(f"weighting {weighting}: learns from probabilities, and recorded answers have none")
        self.program = Speculator(
            target,
            drafter,
            weighting,
            shares,
            gammas_up_to(self.config.gamma) if self.config.adaptive_gamma else (),
            self.config.trace,
        )
        self._costs: dict[tuple[Sizes, int], np.ndarray] = {}
        self._earlier = NOTHING

    @property
    def _refills(self) -> bool:
        """Whether rows take in other requests; those of recorded answers cannot."""
        return self.config.refill and not isinstance(self.target, RecordedTarget)

    @property
    def _grows(self) -> bool:
        """Whether caches do."""
        config = self.config
        fixed = config.refill or config.adaptive_gamma or isinstance(self.target, RecordedTarget)
        return config.grow and not fixed

    @property
    def _block(self) -> int:
        """The most tokens that one block may give a row."""
        return self.config.gamma + 1 if isinstance(self.program, Speculator) else 1

    def _take_draft(self, draft: LoadedModel) -> bool:
        """Checks the draft and takes its parameters; whether it reads the target's image features."""
        check_pair(self.target, draft, self._views)
        draft = replace(draft, params=put(draft.params, small_sharding(self.target.params)))
        self.draft = draft = draft.sharing_tower(self.target)
        shares = same_tower(self.target, draft)
        # With a shared tower the features come from the target's.
        self.params["drafter"] = split_tower(draft.config, draft.params)[1] if shares else draft.params
        return shares

    def _take_head(self) -> KVHeadConfig:
        """The target's KV head, for the view that it is; takes its parameters."""
        head = self.target.head
        if head is None:
            raise InputError("view kv: the target has no KV head; give one, or leave the view out")
        if self._views and self.draft is None:
            raise InputError(f"views: {','.join(self.config.views)} shows prompts, and there is no draft; use kv alone")
        self.params["head"] = put(head.params, small_sharding(self.target.params))
        return head.config

    @overload
    def generate(self, requests: Request | str) -> Result[RowStats]: ...
    @overload
    def generate(self, requests: Sequence[Request | str]) -> list[Result[RowStats]]: ...
    def generate(self, requests: Request | str | Sequence[Request | str]) -> Any:
        """Decode requests, or questions, batching those of one bucket; results in the order given, or one of one."""
        if isinstance(requests, Request | str):
            return self.generate([requests])[0]
        read, captions, rows = self._read(requests)
        results: dict[int, Result[RowStats]] = {}
        every = each(self._sizes, read, rows)
        for sizes, chosen in in_batches(every, len(read) if self._refills else self.config.batch_size):
            *_, done = self._run(sizes, [read[i] for i in chosen], [rows[i] for i in chosen])
            results.update(zip(chosen, done, strict=True))
        spent = [sum(caption.ms for caption in told) for told in captions]
        return [replace(results[i], caption_ms=spent[i]) for i in range(len(read))]

    def stream(self, request: Request | str) -> Iterator[Result[RowStats]]:
        """Yield the answer as far as it is written, every few tokens, and last the whole, as `generate` gives it.

        A text begins with the one before: a letter is held back until it is whole. Who stops reading stops decoding.
        """
        (read,), (told,), (rows,) = self._read([request])
        text, whole, spent = "", None, sum(caption.ms for caption in told)
        for (found,) in self._run(self._sizes(read, rows), [read], [rows], STRIDE):
            text = self.encoder.continued(text, found.tokens)
            whole = replace(found, caption_ms=spent)
            yield replace(whole, text=text)
        assert whole is not None
        yield whole

    def check(self, request: Request) -> None:
        """Raises InputError where the request is too long for the target or the buckets, or an image is none."""
        (read,), _, (rows,) = self._read([request])
        decoded_images([read], 0)
        self._sizes(read, rows)

    def prefill(self, requests: Sequence[Request | str]) -> DecodeState:
        """The state after prefill of at most `batch_size` requests as one batch, in the largest of their buckets."""
        read, _, rows = self._read(requests)
        sizes = self._largest(read, rows)
        held = Held(self.program, self.mesh, self._params(read))
        return timed(run_prefill, held, *self._inputs(read, rows, sizes), static=(sizes.new,))[0]

    def memory_report(self, requests: Sequence[Request | str]) -> MemoryReport:
        """What decoding the largest batch of these requests will hold on the device, before it is allocated."""
        read, _, rows = self._read(requests)
        sizes = self._largest(read, rows)
        batch = bucket(min(len(requests), self.config.batch_size), BATCH_BUCKETS, "batch")
        rows = self._rows_of_a_pass(batch)
        panels = sum(model.panel_bytes(rows) for model in self._loaded().values())
        waits = self._refills and len(requests) > self.config.batch_size
        fresh = bucket(refill_rows(self.config.batch_size), BATCH_BUCKETS, "batch") if waits else 0
        before = rooms(sizes.new, self._block)[:-1] if self._grows else []
        return plan_memory(self.program, self.params, batch, sizes, panels, fresh, max(before, default=0))

    def _largest(self, requests: list[EncodedRequest], rows: list[list[Row]]) -> Sizes:
        sizes = each(self._sizes, requests, rows)
        if not sizes:
            raise InputError("requests: none are given; give one or more")
        return Sizes(*(max(column) for column in zip(*sizes, strict=True)))

    def _read(
        self, requests: Sequence[Request | str]
    ) -> tuple[list[EncodedRequest], list[list[Caption]], list[list[Row]]]:
        """The requests as they will be decoded, the captions of each one's images, and its prompt in each form."""
        checked = each(self._checked, encode(self.encoder, requests))
        images = [image for request in checked for image in request.prompt.images]
        if self._captioned:
            assert self.captioner is not None
            made = iter(self.captioner.caption([image for own in decoded_images(checked, 0) for image in own]))
        else:
            made = iter([Caption("")] * len(images))
        captions = [list(islice(made, len(request.prompt.images))) for request in checked]
        return checked, captions, each(self._rows, checked, captions)

    def _checked(self, request: EncodedRequest) -> EncodedRequest:
        """The request; to a recorded target, for no more tokens than the recorded answer has."""
        if isinstance(self.target, RecordedTarget):
            if request.temperature > 0:
                raise InputError(f"temperature {request.temperature}: recorded answers are greedy; give 0")
            known = len(self.target.answer(request.prompt))
            request = replace(request, max_new_tokens=min(request.max_new_tokens, known))
        return request

    def _rows(self, request: EncodedRequest, captions: list[Caption]) -> list[Row]:
        """The prompt as the target reads it, then in each view."""
        forms = [(self.target, VIEWS["M" if self.target.images else "T"])]
        if self.draft is not None:
            forms += [(self.draft, view) for view in self._views]
        told = [caption.text for caption in captions]
        rows = [prompt_row(self.encoder, model, view, request.prompt, told) for model, view in forms]
        self._check_context(request, rows)
        return rows

    def _check_context(self, request: EncodedRequest, rows: list[Row]) -> None:
        limit = text_config(self.target.config).max_position_embeddings
        need = len(rows[0]) + request.max_new_tokens
        if need > limit:
            raise InputError(
                f"prompt: {len(rows[0])} tokens and {request.max_new_tokens} new ones are over the target's context "
                f"of {limit}; shorten the prompt, give fewer images or lower max_new_tokens"
            )
        if self.draft is None or self.config.context != "error":
            return
        limit = text_config(self.draft.config).max_position_embeddings
        for view, row in zip(self._views, rows[1:], strict=True):
            if len(row) + request.max_new_tokens + self.config.gamma > limit:
                raise InputError(
                    f"view {view.name}: {len(row)} prompt tokens and {request.max_new_tokens} new ones pass the "
                    f"draft's {limit} trained positions; leave the view out or use context 'drop_view' or 'extrapolate'"
                )

    def _sizes(self, request: EncodedRequest, rows: list[Row]) -> Sizes:
        sizes = Sizes(
            length=bucket(max(len(row) for row in rows), self.config.prompt_buckets, "prompt tokens"),
            units=image_units(self.target, request.prompt, self.config.image_buckets),
            view_units=image_units(self.draft, request.prompt, self.config.image_buckets),
            new=bucket(request.max_new_tokens, self.config.new_buckets, "max_new_tokens"),
        )
        if not isinstance(self.program, Speculator) or self.program.drafter.head is None:
            return sizes
        text = len(reads_as_text(self.program.drafter.head, self._shown(request, rows[0])))
        return sizes._replace(
            text=bucket(text, self.config.prompt_buckets, "prompt tokens"),
            images=bucket(len(request.prompt.images), self.config.image_buckets, "images of one prompt"),
        )

    def _shown(self, request: EncodedRequest, row: Row) -> np.ndarray:
        """Which image each slot of the target's row shows, -1 for text."""
        images, reader = request.prompt.images, self.target.images
        slots = [reader.slots((x.height, x.width), None, len(images)) for x in images] if reader else []
        return which_image(row, [len(part.sources) for part in slots])

    def _run(
        self, sizes: Sizes, requests: list[EncodedRequest], rows: list[list[Row]], stride: int | None = None
    ) -> Iterator[list[Result[RowStats]]]:
        """Decodes requests of one bucket, `batch_size` at once; if there are more, the next take free rows.

        Yields their results; with a stride, results so far each time that the longest answer has so many tokens more.
        """
        most = self.config.batch_size
        batch, options = self._inputs(requests[:most], rows[:most], sizes)
        width = len(options.temperature)
        held = self._held(self._params(requests[:most]), width)
        if batch.gamma is not None:
            costs = self._measured_costs(sizes, held, batch, options)
            batch = batch.replace(gamma=init_gamma(costs, width, self._earlier))
        room, *larger = rooms(sizes.new, self._block) if self._grows else [sizes.new]
        prefill = partial(timed, run_prefill, held[0], static=(room,))
        state, prefill_ms = prefill(batch, options)
        decode_ms, found, longest, few = 0.0, {}, 1, refill_rows(most)
        busy = {row: row for row in range(min(most, len(requests)))}  # the request that each row decodes
        waiting = list(range(len(busy), len(requests)))
        while busy:
            until = min(width - len(busy) + few, width) if waiting else width
            full = room - self._block + 1 if larger else room + 1
            pause = Pause(*np.asarray([until, min(full, longest + (stride or sizes.new))], np.int32))
            state, ms = timed(run_decode, held[1], state, options, pause)
            decode_ms += ms
            told = jax.tree.map(np.asarray, (state.done, state.tokens, state.count, state.stats, state.trace))
            free = [row for row in busy if told[0][row]]
            found |= {busy.pop(row): self._result(row, *told[1:]) for row in free}
            if stride or not (busy or waiting):
                known = found | {i: self._result(row, *told[1:]) for row, i in busy.items()}
                times = {"prefill_ms": prefill_ms, "decode_ms": decode_ms, "batch": len(requests)}
                yield [Result(**known[i], **times) for i in sorted(known)]
            for places in (free[start : start + few] for start in range(0, min(len(free), len(waiting)), few)):
                taken, waiting = waiting[: len(places)], waiting[len(places) :]
                fresh, its_options = self._inputs([requests[i] for i in taken], [rows[i] for i in taken], sizes, few)
                ready, ms = prefill(fresh, its_options)
                prefill_ms += ms
                busy |= dict(zip(places, taken))
                nowhere = [width] * (len(ready.count) - len(taken))
                put = np.asarray(places[: len(taken)] + nowhere, np.int32)
                with on_mesh(self.mesh):
                    state, options = take_in(state, options, ready, its_options, put)
            longest = max((int(told[2][row]) for row in busy), default=0)
            if longest >= full:
                state, ms = timed(grow, Held(larger[0] - room, self.mesh, state))
                decode_ms += ms
                room, *larger = larger
        if state.gamma is not None:
            self._earlier = update_prior(self._earlier, state.gamma)

    def _result(self, row: int, tokens: Any, count: Any, stats: Any, trace: Any) -> dict[str, Any]:
        """What a row has come to, of a `Result`."""
        said = tokens[row, : count[row]].tolist()
        counts = (stats.drafted_at[row], stats.accepted_at[row], stats.histogram[row])
        return {
            "text": self.encoder.decode(said),
            "tokens": tuple(said),
            "stats": RowStats(int(stats.steps[row]), int(stats.emitted[row]), *counts),
            "trace": trace and trace_record(trace, row, count[row], self.encoder.pieces(said)),
        }

    def _measured_costs(
        self, sizes: Sizes, held: tuple[Held, Held], batch: PromptBatch, options: Sampling
    ) -> np.ndarray:
        """Milliseconds of blocks of each length at these sizes, by the very program that is to run."""
        key = sizes, len(options.temperature)
        if key not in self._costs:
            assert isinstance(self.program, Speculator)
            assert batch.gamma is not None
            few = min(sizes.new, BLOCKS * (self.config.gamma + 1))
            limits = np.full_like(options.max_new_tokens, few)
            endless = options.replace(max_new_tokens=limits, eos=np.full_like(options.eos, -1))

            state, _ = timed(run_prefill, held[0], batch, endless, static=(sizes.new,))
            start = whereabouts(state)

            never = Pause(*np.asarray([key[1], few + 1], np.int32))

            def run(costs: np.ndarray) -> tuple[float, int]:
                nonlocal state
                given = rewound(state, start).replace(gamma=init_gamma(costs, key[1]))
                state, spent = timed(run_decode, held[1], given, endless, never)
                return spent, int(state.stats.steps.max())

            self._costs[key] = measure_costs(self.program.gammas, run)
        return self._costs[key]

    def _held(self, params: Params, batch: int) -> tuple[Held, Held]:
        """The program with the parameters as prefill reads them, and as the loop does."""
        known = self._known.get(batch)
        if known is None or known[0].params is not params:
            hold = partial(Held, self.program, self.mesh)
            known = self._known[batch] = hold(params), hold(self.loop_params(params, batch))
        return known

    def loop_params(self, params: Params, batch: int) -> Params:
        """The engine's parameters as its loop reads them, which has passes over a block of each row."""
        rows = self._rows_of_a_pass(batch)
        return {**params, **{name: model.loop_params(rows) for name, model in self._loaded().items()}}

    def _loaded(self) -> dict[str, LoadedModel]:
        """The models whose weights the loop reads."""
        models = {"target": self.target, "drafter": self.draft}
        return {n: m for n, m in models.items() if m is not None and not isinstance(m, RecordedTarget)}

    def _rows_of_a_pass(self, batch: int) -> int:
        return batch * max(self.program.spare_slots, 1)

    def _params(self, requests: list[EncodedRequest]) -> Params:
        """The parameters; those of a recorded target are the answers to these requests."""
        if not isinstance(self.target, RecordedTarget):
            return self.params
        batch = bucket(len(requests), BATCH_BUCKETS, "batch")
        return self.params | {"target": self.target.table([request.prompt for request in requests], batch)}

    def _inputs(
        self, requests: list[EncodedRequest], rows: list[list[Row]], sizes: Sizes, least: int = 1
    ) -> tuple[PromptBatch, Sampling]:
        """The requests as numpy arrays, padded to the sizes and to `least` rows with rows that emit nothing."""
        spare = bucket(max(len(rows), least), BATCH_BUCKETS, "batch") - len(rows)
        rows = rows + [rows[-1]] * spare
        pictures = decoded_images(requests, spare)
        prompts = stack_rows(rows, sizes.length)
        batch = PromptBatch(prompts[0], image_inputs(self.target, pictures, sizes.units))
        if isinstance(self.program, Speculator):
            gammas, own = self.program.gammas, self.program.reads_images
            weights = parse_weights(self.config.weights, len(self.config.views))
            batch = batch.replace(
                views=prompts[1:],
                view_images=image_inputs(self.draft, pictures, sizes.view_units) if own and self.draft else None,
                weights=np.tile(np.asarray(weights, np.float32), (len(rows), 1)),
                gamma=init_gamma(np.ones(len(gammas)), len(rows)) if gammas else None,
            )
            if self.program.drafter.head is not None:
                shown = [self._shown(request, row[0]) for request, row in zip(requests, rows)]
                shown += shown[-1:] * spare
                head = head_rows(self.program.drafter.head, shown, sizes.text, sizes.images)
                batch = batch.replace(head=head)
        return batch, sampling_options(requests, self.target.config, len(rows))

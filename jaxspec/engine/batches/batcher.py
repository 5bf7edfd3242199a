"""Turn requests into a prefilled batch: read -> size -> stack -> prefill.

A request is *read* into token rows, one for each form in which the program's models see the
prompt. Its *sizes* are rounded up to buckets, since each bucket is a compiled program. Requests of
similar sizes are *stacked* into one batch of numpy arrays and *prefilled* together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from jaxspec.cache import KVCache
from jaxspec.data.images import MOST_DECODED
from jaxspec.decoding.collaboration.combination import check_settings
from jaxspec.decoding.inputs import PromptBatch, Prompts
from jaxspec.decoding.settings import Processing
from jaxspec.decoding.sources.source import Buckets
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import resized_cache, run_prefill, run_tower
from jaxspec.engine.assembly import Assembly
from jaxspec.engine.batches.fitting import in_batches, largest
from jaxspec.engine.batches.states import Together
from jaxspec.engine.compile_cache import Held, timed
from jaxspec.engine.config import BATCH_BUCKETS, Batching, EngineConfig
from jaxspec.engine.memory import Sizes
from jaxspec.engine.policy import Policy, cost_file
from jaxspec.engine.requests import (
    TOP,
    EncodedRequest,
    Request,
    decoded_images,
    each,
    encode,
)
from jaxspec.errors import InputError, located, warn_once
from jaxspec.loading.images import image_inputs, image_tiles
from jaxspec.loading.models import prompt_encoder
from jaxspec.prompts.captions import Caption, Captioner
from jaxspec.prompts.rows import Showing, bucket, part_of, prompt_row, stack_rows
from jaxspec.sampling import Sampling
from jaxspec.sharding import on_mesh

FIRST, FACTOR = 128, 4
"""Slots for new tokens in a first cache, and the growth factor of a full cache."""


@dataclass
class Batcher:
    """Read, size, stack and prefill requests for one program."""

    assembly: Assembly
    config: Batching
    captioner: Captioner | None = None
    """Captioner of view C, called for a few of the images at a time."""
    most = sys.maxsize
    """Maximum requests that share a batch, in whose rows they take turns."""

    def __post_init__(self) -> None:
        self.program, self.mesh = self.assembly.program, self.assembly.held.mesh
        held, plans = self.assembly.held, self.assembly.plans
        self.plans = [replace(held, program=plan) for plan in plans]
        """Each plan with the program's parameters."""
        self.policy = Policy(plans, cost_file(plans, held)) if plans else None
        self.encoder = prompt_encoder(self.assembly.lead)
        settings = self.assembly.lead.settings
        self.defaults: dict[str, Any] = {}
        """Values that generation_config.json sets for requests."""
        self.note = ""
        """Line that names these values, a warning before the first answer."""
        if settings is not None and self.config.generation_config == "auto":
            self.defaults, self.note = settings.defaults, settings.applied_line
            with located(settings.file):
                Request("", **self.defaults)

    @property
    def eos(self) -> tuple[int, ...]:
        """Return the ids that end an answer."""
        return self.encoder.stops

    def read(
        self, requests: Sequence[Request | str], refused: dict[int, str] | None = None
    ) -> list[EncodedRequest]:
        """Return the requests with captions, token rows for each form, and sizes, once.

        refused: Takes the error of each request that cannot be read, by index, which is then left
          out; None raises the first one.
        """
        warn_once(self.note)
        if refused is None:
            encoded = encode(self.encoder, requests, self.defaults)
            return _alike(self._with_rows(encoded, self.captioner))
        accepted = []
        for i, request in enumerate(requests):
            try:
                encoded = encode(self.encoder, [request], self.defaults)
                decoded_images(encoded)  # raises for one that cannot be read
                accepted += self._with_rows(encoded, self.captioner)
            except InputError as error:
                refused[i] = str(error)
        return _alike(accepted)

    def read_examples(self, requests: Sequence[Request | str]) -> list[EncodedRequest]:
        """Return examples with empty captions, and with sizes that have room for longer ones.

        A draft that reads captions gets as many slots as the target's prompt, with its images.
        """
        warn_once(self.note)
        examples = _alike(self._with_rows(encode(self.encoder, requests, self.defaults), None))
        if not any(form.view.reads_captions for form in self.assembly.forms):
            return examples
        return [replace(example, sizes=self._with_room(example.sizes)) for example in examples]

    def _with_rows(
        self, encoded: Sequence[EncodedRequest], captioner: Captioner | None
    ) -> list[EncodedRequest]:
        """Return the requests with token rows and sizes; those that have them stay as they are."""
        fresh = [request for request in encoded if not request.rows]
        captions = _captions(fresh, captioner)
        parts = [[*islice(captions, len(request.prompt.images))] for request in fresh]
        written = iter(each(self._written, fresh, parts))
        return [request if request.rows else next(written) for request in encoded]

    def _written(self, request: EncodedRequest, captions: list[Caption]) -> EncodedRequest:
        """Return the request with its token rows, one for each form, and its sizes."""
        request.settings.check_tokens(self.assembly.lead.model.text.vocab_size)
        if request.settings.grammar and self.mesh is not None and self.mesh.is_multi_process:
            # Each process would number its grammars, and be asked for all rows.
            raise InputError("response_format: the mesh has several processes; leave it out")
        check_settings(self.assembly.params.get("combination"), request.settings)
        texts, rows = [caption.text for caption in captions], []
        limits = request.image_limits
        target_images = self.assembly.lead.images_within(limits)
        for form in self.assembly.forms:
            images = form.model.images_within(limits) if form.view.reads_images else None
            showing = Showing(form.view, self.encoder, images, target_images, form.before)
            rows.append(prompt_row(showing, request.prompt, texts))
            form.check_row(request, rows[-1])
        ms = sum(caption.ms for caption in captions)
        request = replace(request, rows=tuple(rows), caption_ms=ms)
        return replace(request, sizes=self._sizes(request))

    def _sizes(self, request: EncodedRequest) -> Sizes:
        """Return the buckets of the prompt, its images and new tokens, and of each source."""
        program, prompt, limits = self.program, request.prompt, request.image_limits
        buckets = Buckets(self.config.prompt_buckets, self.config.image_buckets)
        lengths, slot_images = iter(map(len, request.rows)), request.rows[0].images
        longest = max(islice(lengths, len(program.members)))
        length = bucket(longest, buckets.prompt, "prompt tokens")
        tiles = tuple(
            image_tiles(tower.model, prompt, buckets.images, limits, tower.changes) if tower else 0
            for tower in self.assembly.towers
        )
        new = bucket(request.max_new_tokens, self.config.new_buckets, "max_new_tokens")
        sources = tuple(
            source.sizes([*islice(lengths, len(source.forms))], slot_images, buckets)
            for source in program.sources
        )
        return Sizes(length, tiles, new, sources)

    def _with_room(self, sizes: Sizes) -> Sizes:
        """Return the sizes where each source reads as many slots as the target's prompt has."""
        sources = tuple(
            tuple(max(size, sizes.length) for size in each) if source.forms else each
            for source, each in zip(self.program.sources, sizes.sources, strict=True)
        )
        return sizes._replace(sources=sources)

    def batches(self, requests: Sequence[EncodedRequest]) -> list[list[int]]:
        """Return the indices of the requests that share a batch, batch by batch.

        The draft does not count, so that answers at one width do not depend on it.
        """
        members = len(self.program.members)
        return in_batches([request.sizes.of_members(members) for request in requests], self.most)

    def largest(self, requests: Sequence[EncodedRequest]) -> Sizes:
        """Return the bucket that holds all requests."""
        if not requests:
            raise InputError("requests: []; give one or more")
        return largest(request.sizes for request in requests)

    def rows(self, requests: int) -> int:
        """Return the number of rows of a batch for this number of requests."""
        most = self.config.batch_size
        return min(bucket(min(requests, most), BATCH_BUCKETS, "batch"), most)

    def widths(self, rows: int) -> list[int]:
        """Return the numbers of rows that a live batch of at most `rows` may have.

        On a mesh there is one number, and also at one width, since sums round by the rows.
        """
        if self.mesh is not None or self.fixed:
            return [rows]
        return [count for count in BATCH_BUCKETS if count < rows] + [rows]

    @property
    def fixed(self) -> bool:
        """Return whether answers must not depend on sizes that change while they decode."""
        return isinstance(self.config, EngineConfig) and self.config.width is not None

    def rooms(self, sizes: Sizes) -> list[int]:
        """Return the slots for new tokens of the first caches and of each larger ones.

        All except the last are larger than the tokens of a block: 1,024 new tokens give [128, 512,
        1024]. At one width caches do not grow, because sums round by their size.
        """
        rooms = [FIRST]
        while rooms[-1] < sizes.new:
            rooms.append(FACTOR * rooms[-1])
        smaller = [] if self.fixed else rooms[:-1]
        return [*(room for room in smaller if room > self.program.most_tokens), sizes.new]

    def held(self, requests: Sequence[EncodedRequest]) -> Held:
        """Return the program with its parameters, which are the same for all requests."""
        return self.assembly.held

    def together(self, requests: Sequence[EncodedRequest]) -> Together:
        """Return the fields that all prefills of these requests share."""
        held = self.held(requests[: self.config.batch_size])
        top = [request.logprobs for request in requests if request.logprobs is not None]
        logprobs = bucket(max(top), TOP, "logprobs") if top else None
        processing = Processing.of([request.settings for request in requests], self.eos)
        return Together(self.largest(requests), held, self.eos, logprobs, processing)

    def prefill(
        self, together: Together, requests: Sequence[EncodedRequest], options: Sampling, room: int
    ) -> tuple[DecodeState, float]:
        """Prefill requests and return their state, and the milliseconds.

        Args:
          options: Options of each row; those past the requests repeat the last prompt.
          room: Slots for new tokens.
        """
        sizes, past = together.sizes, together.past
        width = len(options.temperature)
        prompts, count = (requests[:1], 1) if together.one_prompt else (requests, width)
        batch = self.inputs(prompts, sizes, count)
        if past is not None:
            batch = self._behind(past, requests[0], sizes.length + room, batch)
        (state, _), ms = timed(run_prefill, together.held, batch, options, static=(room,))
        return state, ms

    def _behind(
        self, past: KVCache, request: EncodedRequest, slots: int, batch: PromptBatch
    ) -> PromptBatch:
        """Return the batch with only those slots of its one prompt that `past` does not hold."""
        row, start = request.rows[0], int(np.asarray(past.length)[0])
        past = self.resized(past, slots + self.program.spare_slots)
        width = bucket(len(row) - start, self.config.prompt_buckets, "prompt tokens")
        return batch.replace(target=part_of(row, start, width), whole=batch.target, past=past)

    def resized(self, past: KVCache, slots: int) -> KVCache:
        """Return a cache with `slots` slots, see `KVCache.resized`."""
        with on_mesh(self.mesh):
            return resized_cache(slots, past)

    def features(self, request: EncodedRequest, tiles: int) -> tuple[Any, float]:
        """Return what the target's tower makes of a request's images, and the milliseconds."""
        pictures, limits = decoded_images([request]), [request.image_limits]
        images = image_inputs(self.assembly.lead, pictures, tiles, limits)
        return timed(run_tower, self.assembly.held, images)

    def inputs(
        self, requests: Sequence[EncodedRequest], sizes: Sizes, count: int, features: Any = None
    ) -> PromptBatch:
        """Return the prompts as numpy arrays, padded to the sizes and to `count` rows.

        features: What the target's tower made of the images, which it then does not read again.
        """
        spare = count - len(requests)
        padded = [*requests, *[requests[-1]] * spare]
        pictures = [*decoded_images(requests), *[[]] * spare]
        limits = [request.image_limits for request in requests]
        first, *others = self.assembly.towers
        towers = [first if features is None else None, *others]
        images = [
            tower and image_inputs(tower.model, pictures, tiles, limits, tower.changes)
            for tower, tiles in zip(towers, sizes.tiles, strict=True)
        ]
        forms, members = zip(*(request.rows for request in padded)), len(self.program.members)
        rows = [stack_rows(form, sizes.length) for form in islice(forms, members)]
        weights, sources = None, list[Any]()
        if self.assembly.weights:
            weights = np.tile(np.asarray(self.assembly.weights, np.float32), (count, 1))
        slot_images = [request.rows[0].images for request in padded]
        for source, tiles, source_sizes in zip(
            self.program.sources, images[members:], sizes.sources
        ):
            views = [*islice(forms, len(source.forms))]
            mrope = any(row.rotary is not None for row in chain(*views))
            stacked = tuple(stack_rows(view, source_sizes[0], mrope) for view in views)
            sources.append(source.inputs(stacked, tiles, slot_images, source_sizes))
        batch = self.program.inputs(rows, images[:members], weights, tuple(sources))
        return batch.replace(features=features)

    def scored(
        self, request: EncodedRequest, tokens: Sequence[int]
    ) -> tuple[tuple[Prompts, ...], np.ndarray]:
        """Return each member's prompt followed by the answer, and the prompt's last slot."""
        rows = request.rows[: len(self.program.members)]
        for form, row in zip(self.assembly.forms, rows):
            form.check_row(replace(request, max_new_tokens=len(tokens)), row)
        width = bucket(max(map(len, rows)) + len(tokens), self.config.prompt_buckets, "tokens")
        pictures = decoded_images([request])
        prompts = []
        for row, tower, tiles in zip(rows, self.assembly.towers, request.sizes.tiles):
            stacked = stack_rows([row.followed_by(tokens)], width)
            limits = [request.image_limits]
            images = tower and image_inputs(tower.model, pictures, tiles, limits, tower.changes)
            prompts.append(Prompts(stacked, images))
        return tuple(prompts), np.asarray([len(row) - 1 for row in rows], np.int32)


def _captions(requests: Sequence[EncodedRequest], captioner: Captioner | None) -> Iterator[Caption]:
    """Yield a caption for each image of the requests, "" without a captioner.

    At most `MOST_DECODED` images are decoded at once.
    """
    named = [(request.name, image) for request in requests for image in request.prompt.images]
    if captioner is None:
        yield from [Caption("")] * len(named)
        return
    for start in range(0, len(named), MOST_DECODED):
        images = []
        for name, picture in named[start : start + MOST_DECODED]:
            with located(name):
                images.append(picture.rgb())
        captions = captioner.caption(images)
        if len(captions) != len(images):
            counts = f"{len(captions)} captions of {len(images)} images"
            raise InputError(f"captioner: {counts}; let it return one an image")
        yield from captions


def _alike(requests: Sequence[EncodedRequest]) -> list[EncodedRequest]:
    """Return the requests in one bucket for new tokens: batches do not depend on how long their
    answers may get.
    """
    new = max((request.sizes.new for request in requests), default=0)
    return [replace(request, sizes=request.sizes._replace(new=new)) for request in requests]

"""The engine: reads requests, sizes and places them, prefills, decodes and collects, for any program.

Everything inside a bucket (prompt length, images, new tokens, batch) is one compiled program; lengths,
temperatures, limits, weights and keys are traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, overload

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.cache import KVCache
from jaxspec.cluster import spread
from jaxspec.decoding.assembly import chosen_views, collaboration, speculation
from jaxspec.decoding.compile_cache import Held, executable, timed
from jaxspec.decoding.engine_config import BATCH_BUCKETS, CollaborationConfig, EngineConfig
from jaxspec.decoding.memory import MemoryReport, Sizes, plan_memory
from jaxspec.decoding.requests import (
    EncodedRequest,
    Request,
    Result,
    all_greedy,
    decoded_images,
    each,
    encode,
    in_batches,
    sampling_options,
)
from jaxspec.decoding.running import (
    STRIDE,
    RunningBatch,
    grow,
    larger_cache,
    refill_rows,
    rooms,
    run_decode,
    run_logprobs,
    run_prefill,
)
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import DecodeState, Pause, PromptBatch, Prompts
from jaxspec.errors import InputError, check_counts
from jaxspec.loading import LoadedModel, image_inputs, image_tiles, prompt_encoder
from jaxspec.models.kv_head import head_rows, reads_as_text
from jaxspec.prompts.captions import Caption, Captioner
from jaxspec.prompts.rows import bucket, prompt_row, stack_rows, which_image
from jaxspec.prompts.views import needs_captioner, parse_views, parse_weights
from jaxspec.sampling import Sampling
from jaxspec.sharding import mesh_of, on_mesh, replicated

__all__ = ["CollaborationConfig", "Engine", "EngineConfig", "LoadedModel", "Request", "Result"]


@dataclass
class Engine:
    """Decodes requests with a target, and a draft where one is given; or as several models write together.

    The output is the target's own, or that of the models' combination. It runs where the (first) target lies: on one
    device, or on the mesh that it was loaded onto, with the draft on each.

    Raises InputError if the models do not share a tokeniser, or a view needs what its model lacks.
    """

    target: LoadedModel | Sequence[LoadedModel]
    """Several write together."""
    draft: LoadedModel | None = None
    config: Any = None
    """An `EngineConfig`, or for several models a `CollaborationConfig`; the default is either's."""
    captioner: Captioner | None = None
    """For view C. It runs before prefill, on all images of a call at once: how long the captions are decides the
    bucket, and with it the size of the target's cache, so that no pass of the target can start before."""

    def __post_init__(self) -> None:
        self._captioned, alone = False, isinstance(self.target, LoadedModel)
        models = [self.target] if alone else self.target
        if not isinstance(models, Sequence) or not all(isinstance(m, LoadedModel) for m in models):
            raise InputError(f"target: {self.target!r:.60}; give what LoadedModel.load returns")
        if not isinstance(self.draft, LoadedModel | None):
            kind = type(self.draft).__name__
            raise InputError(f"draft: {kind}; give a LoadedModel, and options as config=...")
        if self.config is not None and not isinstance(
            self.config, EngineConfig if alone else CollaborationConfig
        ):
            kinds = "one target has an EngineConfig, several models a CollaborationConfig"
            raise InputError(f"config: {type(self.config).__name__}; {kinds}")
        if isinstance(self.target, LoadedModel):
            config = self.config or EngineConfig()
            views = chosen_views(self.target, self.draft, config.views)
            self.config = replace(config, views=views)
            self.assembly = speculation(self.target, self.draft, self.config)
            self._captioned = (
                needs_captioner(parse_views(views), self.captioner) if views else False
            )
        else:
            if self.draft is not None:
                raise InputError(
                    "draft: models that write together propose to each other; leave it out"
                )
            self.config = self.config or CollaborationConfig()
            self.assembly = collaboration(self.target, self.config)
        self.lead = self.assembly.lead
        """The model whose tokens and template prompts are written with: the target."""
        self.program, self.params = self.assembly.program, self.assembly.params
        self.encoder = prompt_encoder(self.lead)
        self.mesh = mesh_of(self.lead.params)
        self._known: Held | None = None

    @overload
    def generate(self, requests: Request | str) -> Result: ...
    @overload
    def generate(self, requests: Sequence[Request | str]) -> list[Result]: ...
    def generate(self, requests: Request | str | Sequence[Request | str]) -> Any:
        """Decode requests, or questions, batching those of like sizes; results in the order given, or one of one."""
        if isinstance(requests, Request | str):
            return self.generate([requests])[0]
        return spread(self._generate, requests) if self.config.spread else self._generate(requests)

    def _generate(self, requests: Sequence[Request | str]) -> list[Result]:
        read = self._read(requests)
        results: dict[int, Result] = {}
        for chosen in self._batches(read):
            *_, done = self._run([read[i] for i in chosen])
            results.update(zip(chosen, done, strict=True))
        return [results[i] for i in range(len(read))]

    def stream(self, request: Request | str) -> Iterator[Result]:
        """Yield the answer as far as it is written, every few tokens, and last the whole, as `generate` gives it.

        A text begins with the one before: a letter is held back until it is whole, and so is what may become a string
        to stop at. Who stops reading stops decoding.
        """
        (read,) = self._read([request])
        text, whole = "", None
        for (whole,) in self._run([read], STRIDE):
            longer = self.encoder.continued(text, whole.tokens)
            begun = (
                n for stop in read.stop for n in range(1, len(stop)) if longer.endswith(stop[:n])
            )
            text = longer[: max(len(longer) - max(begun, default=0), len(text))]
            yield replace(whole, text=text) if len(text) < len(whole.text) else whole
        assert whole is not None
        yield whole

    def samples(self, request: Request | str, count: int) -> list[Result]:
        """Draw several answers to one prompt, which is read once; sample i is that of the request with seed + i."""
        check_counts(count=count)
        (read,) = self._read([request])
        if read.temperature == 0:
            raise InputError("temperature: 0 gives every sample the same answer; give more than 0")
        most = min(count, BATCH_BUCKETS[-1])
        seeds = [replace(read, seed=(read.seed + i) % 2**32) for i in range(count)]
        parts = (seeds[start : start + most] for start in range(0, count, most))
        return [
            result for part in parts for *_, done in [self._run(part, prompts=1)] for result in done
        ]

    def logprobs(self, request: Request | str, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probabilities [T] that the target gives to an answer's tokens, at temperature 1, unfiltered.

        Of several models, those of their combination.
        """
        if not len(tokens):
            raise InputError("tokens: none are given; give the token ids of an answer")
        (read,) = self._read(
            [replace(Request(request) if isinstance(request, str) else request, max_new_tokens=1)]
        )
        alone = isinstance(self.program, Autoregressive | Speculator)  # then drafts have no say
        rows = read.rows[:1] if alone else read.rows
        for form, row in zip(self.assembly.forms, rows):
            form.check_context(replace(read, max_new_tokens=len(tokens)), row)
        width = bucket(max(map(len, rows)) + len(tokens), self.config.prompt_buckets, "tokens")
        prompts = []
        pictures = decoded_images([read], 0)
        for row, model, tiles in zip(rows, self.assembly.towers, read.sizes.tiles):
            (form,) = stack_rows([[row.followed_by(tokens)]], width)
            prompts.append(
                Prompts(form, None if model is None else image_inputs(model, pictures, tiles))
            )
        starts = np.asarray([len(row) - 1 for row in rows], np.int32)
        held, said = Held(self.program, self.mesh, self.params), np.asarray([tokens], np.int32)
        return np.asarray(timed(run_logprobs, held, tuple(prompts), said, starts)[0])

    def check(self, request: Request) -> None:
        """Raise InputError where the request is too long for the target or the buckets, or an image is none."""
        decoded_images(self._read([request]), 0)

    def prefill(self, requests: Sequence[Request | str]) -> DecodeState:
        """Return the state after prefill of at most `batch_size` requests as one batch, in the largest of their
        buckets."""
        read = self._read(requests)
        sizes = self._largest(read)
        return timed(
            run_prefill, self._held(read), *self._inputs(read, sizes), static=(sizes.new,)
        )[0]

    def warmup(self, requests: Sequence[Request | str]) -> None:
        """Compile all that requests like these need, so that none of their kind waits for it later.

        Where it takes long, a terminal shows how far it is.
        """
        read, most = self._read(requests), self.config.batch_size
        kinds: dict[Any, list[EncodedRequest]] = {}
        for chosen in self._batches(read):
            some = [read[i] for i in chosen]
            width = bucket(min(len(some), most), BATCH_BUCKETS, "batch")
            kinds.setdefault((self._largest(some), all_greedy(some), width, len(some) > most), some)
        steps = sum(2 * len(self._rooms(sizes)) + waits for sizes, _, _, waits in kinds)
        pause = Pause(np.int32(0), np.int32(0))  # type: ignore[arg-type]
        with tqdm(total=steps, unit="program", desc="compiling", delay=1, disable=None) as bar:
            for (sizes, greedy, _, waits), some in kinds.items():
                held = self._held(some[:most])
                room, *larger = self._rooms(sizes)
                if waits:  # for the rows that take the places of those that are done
                    self._start(sizes, held, greedy, some[:1], refill_rows(most), room)
                    bar.update()
                state, options, _ = self._start(sizes, held, greedy, some[:most], 1, room)
                executable(run_decode, held, state, options, pause)
                bar.update(2)
                for size in larger:
                    state, _ = timed(grow, Held(size - room, self.mesh, state))
                    executable(run_decode, held, state, options, pause)
                    bar.update(2)
                    room = size

    def memory_report(self, requests: Sequence[Request | str]) -> MemoryReport:
        """Return what decoding the largest batch of these requests will hold on the device, before it is allocated."""
        read = self._read(requests)
        sizes, most = self._largest(read), self.config.batch_size
        batch = bucket(min(len(read), most), BATCH_BUCKETS, "batch")
        waits = self._refills and len(read) > most
        fresh = bucket(refill_rows(most), BATCH_BUCKETS, "batch") if waits else 0
        smaller = max(self._rooms(sizes)[:-1], default=0)
        return plan_memory(self.program, self.params, batch, sizes, fresh, smaller)

    def _batches(self, read: list[EncodedRequest]) -> list[list[int]]:
        """Return which requests run together, or take each other's places."""
        most = len(read) if self._refills else self.config.batch_size
        return in_batches([request.sizes for request in read], most)

    @property
    def _refills(self) -> bool:
        """Whether rows take other requests."""
        return self.config.refill

    @property
    def _grows(self) -> bool:
        """Whether caches begin with room for few new tokens."""
        return self.config.grow and not self.config.refill

    def _rooms(self, sizes: Sizes) -> list[int]:
        """Return room for new tokens that caches begin with, and those that they grow to."""
        return rooms(sizes.new, self.program.most_tokens) if self._grows else [sizes.new]

    def _run(
        self, requests: list[EncodedRequest], stride: int | None = None, prompts: int | None = None
    ) -> Iterator[list[Result]]:
        """Decode a batch of requests, or samples of the first `prompts` of them.

        Yields their results; with a stride, results so far each time that the longest answer has so many tokens more.
        """
        batch = self._begin(requests, prompts)
        while batch.busy:
            batch.decode(self.encoder, stride)
            if stride or not (batch.busy or batch.waiting):
                yield batch.results()
            batch.refill()
            batch.grow()

    def _begin(
        self,
        requests: list[EncodedRequest],
        prompts: int | None = None,
        past: KVCache | None = None,
    ) -> RunningBatch:
        """Place and prefill a batch of requests; `past` holds the beginning of the only one's prompt."""
        sizes, most = self._largest(requests), len(requests) if prompts else self.config.batch_size
        held = self._held(requests[:most])
        start = partial(self._start, sizes, held, all_greedy(requests), prompts=prompts, past=past)
        return RunningBatch(
            requests, most, held, start, self._rooms(sizes), self.program.most_tokens
        )

    def _read(self, requests: Sequence[Request | str]) -> list[EncodedRequest]:
        """Return the requests as they will be decoded: with captions, their prompts in each form, and sizes."""
        read = encode(self.encoder, requests)
        images = [image for request in read for image in request.prompt.images]
        if self._captioned:
            assert self.captioner is not None
            made = iter(
                self.captioner.caption([image for own in decoded_images(read, 0) for image in own])
            )
        else:
            made = iter([Caption("")] * len(images))
        captions = [list(islice(made, len(request.prompt.images))) for request in read]
        read = each(self._written, read, captions)
        if not self._grows:
            return read
        new = max((request.sizes.new for request in read), default=0)
        return [replace(request, sizes=request.sizes._replace(new=new)) for request in read]

    def _written(self, request: EncodedRequest, captions: list[Caption]) -> EncodedRequest:
        """Return the request with its prompt in each form, and the bucket that all of them fit in."""
        config, told, rows = self.config, [caption.text for caption in captions], []
        for form in self.assembly.forms:
            rows.append(
                prompt_row(self.encoder, form.model.images, form.view, request.prompt, told)
            )
            form.check_context(request, rows[-1])
        lengths = [len(row) for row in rows]
        views = max(lengths[1:], default=0) if isinstance(self.program, Speculator) else 0
        sizes = Sizes(
            length=bucket(
                lengths[0] if views else max(lengths), config.prompt_buckets, "prompt tokens"
            ),
            tiles=tuple(
                image_tiles(model, request.prompt, config.image_buckets)
                for model in self.assembly.towers
            ),
            new=bucket(request.max_new_tokens, config.new_buckets, "max_new_tokens"),
            views=bucket(views, config.prompt_buckets, "prompt tokens of a view") if views else 0,
        )
        request = replace(
            request, rows=tuple(rows), caption_ms=sum(caption.ms for caption in captions)
        )
        if isinstance(self.program, Speculator) and self.program.drafter.head is not None:
            text = len(reads_as_text(self.program.drafter.head, self._shown(request)))
            sizes = sizes._replace(
                text=bucket(text, config.prompt_buckets, "prompt tokens"),
                images=bucket(
                    len(request.prompt.images), config.image_buckets, "images of one prompt"
                ),
            )
        return replace(request, sizes=sizes)

    def _largest(self, requests: list[EncodedRequest]) -> Sizes:
        if not requests:
            raise InputError("requests: none are given; give one or more")
        length, tiles, *rest = zip(*(request.sizes for request in requests), strict=True)
        return Sizes(max(length), tuple(map(max, zip(*tiles, strict=True))), *map(max, rest))

    def _shown(self, request: EncodedRequest) -> np.ndarray:
        """Return which image each slot of the target's row shows, -1 for text."""
        images, reader = request.prompt.images, self.lead.images
        slots = (
            [reader.slots((x.height, x.width), None, len(images)) for x in images] if reader else []
        )
        return which_image(request.rows[0], [len(part.sources) for part in slots])

    def _held(self, requests: list[EncodedRequest]) -> Held:
        """Return the program with its parameters, which are the same for all requests."""
        if self._known is None or self._known.params is not self.params:
            self._known = Held(self.program, self.mesh, self.params)
        return self._known

    def _start(
        self,
        sizes: Sizes,
        held: Held,
        greedy: bool,
        requests: Sequence[EncodedRequest],
        least: int,
        room: int,
        prompts: int | None = None,
        past: KVCache | None = None,
    ) -> tuple[DecodeState, Sampling, float]:
        """Prefill requests: the state, their options, and milliseconds.

        `greedy` are those of the loop alone, so that one prefill serves both kinds of it.
        """
        batch, options = self._inputs(requests, sizes, least, prompts)
        if past is not None:
            missing = sizes.length + room + self.program.spare_slots - past.slots
            kept = int(np.asarray(past.length)[0])
            if missing > 0:
                with on_mesh(self.mesh):
                    past = larger_cache(missing, past)
            rest = requests[0].rows[0][kept:]
            width = bucket(len(rest), self.config.prompt_buckets, "prompt tokens")
            batch = batch.replace(target=stack_rows([[rest]], width)[0], past=past)
        if (
            self.mesh is not None
        ):  # else the compiler splits options as it likes, and refilled ones differ
            options = jax.device_put(options, replicated(self.mesh))
        state, ms = timed(run_prefill, held, batch, options, static=(room,))
        return state, options.replace(greedy=greedy), ms

    def _inputs(
        self,
        requests: Sequence[EncodedRequest],
        sizes: Sizes,
        least: int = 1,
        prompts: int | None = None,
    ) -> tuple[PromptBatch, Sampling]:
        """Return the requests as numpy arrays, padded to the sizes and to `least` rows with rows that emit nothing.

        Where they are samples of the first `prompts` of them, only those are read.
        """
        width = bucket(max(len(requests), least), BATCH_BUCKETS, "batch")
        options = sampling_options(requests, self.lead.config, width)
        if prompts:
            requests = requests[:prompts]
        count = prompts or width
        padded = [*requests, *[requests[-1]] * (count - len(requests))]
        rows = stack_rows(
            [list(request.rows) for request in padded], sizes.length, sizes.views or None
        )
        pictures = decoded_images(requests, count - len(requests))
        images = [
            None if model is None else partial(image_inputs, model, pictures, tiles)
            for model, tiles in zip(self.assembly.towers, sizes.tiles, strict=True)
        ]
        batch = PromptBatch(rows[0], images[0] and images[0]())
        if isinstance(self.program, Autoregressive):
            return batch, options
        if not isinstance(self.program, Speculator):
            others = tuple(
                Prompts(form, read and read())
                for form, read in zip(rows[1:], images[1:], strict=True)
            )
            return batch.replace(others=others), options
        weights = parse_weights(self.config.weights, len(self.config.views))
        head = self.program.drafter.head
        batch = batch.replace(
            views=rows[1:],
            view_images=images[1]() if self.program.reads_images and images[1] else None,
            weights=np.tile(np.asarray(weights, np.float32), (count, 1)),
            head=head
            and head_rows(
                head, [self._shown(request) for request in padded], sizes.text, sizes.images
            ),
        )
        return batch, options

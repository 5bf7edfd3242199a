"""Make the options of a batch's rows, and states: of empty rows, and with other rows inserted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.settings import LARGEST, Processing
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import insert_rows
from jaxspec.engine.compile_cache import Held, timed
from jaxspec.engine.memory import Sizes, abstract_inputs, abstract_prefill
from jaxspec.engine.requests import EncodedRequest
from jaxspec.runtime import usual_settings
from jaxspec.sampling import Sampling
from jaxspec.sharding import replicated


class Together(NamedTuple):
    """Hold the fields that all prefills of one running batch share."""

    sizes: Sizes
    """Bucket of all requests."""
    held: Held
    """Program with its parameters."""
    eos: tuple[int, ...]
    """Ids that end an answer."""
    logprobs: int | None
    """Number of likeliest tokens to record, see `Sampling`."""
    processing: Processing | None
    """Form of the processors; None if no request has any."""
    one_prompt: bool = False
    """Whether the requests are samples of one prompt, which is prefilled once."""
    past: KVCache | None = None
    """Cache of an earlier turn, whose slots begin the only prompt."""

    def options(self, requests: Sequence[EncodedRequest], rows: int) -> Sampling:
        """Return the options of `rows` rows; those past the requests emit nothing."""
        # Without a mesh the compiler chooses a placement.
        options, mesh = self.host_options(requests, rows), self.held.mesh
        return options if mesh is None else jax.device_put(options, replicated(mesh))

    def host_options(self, requests: Sequence[EncodedRequest], rows: int) -> Sampling:
        """Return the same as numpy arrays."""
        options = sampling_options(requests, self.eos, rows).replace(logprobs=self.logprobs)
        if self.processing is None:
            return options
        settings = [request.settings for request in requests]
        return options.replace(processors=self.processing.processors(settings, self.eos, rows))

    def limits(self, request: EncodedRequest) -> dict[str, tuple[int, int]]:
        """Return how much of each setting a request needs, and how much this form has room for."""
        settings, room = request.settings, self.processing or Processing(0, 0, False)
        biases = settings.biases(self.eos)
        before = max((len(bias.prefix) for bias in biases), default=0)
        needed, recorded = (0 if n is None else n + 1 for n in (request.logprobs, self.logprobs))
        return {
            "log probabilities a token": (needed, recorded),
            "logit_bias": (len(biases), room.biases),  # bans are biases too
            "tokens of a bad word": (before + 1, room.prefix + 1),
            "no_repeat_ngram_size": (settings.no_repeat_ngram_size, LARGEST if room.ngrams else 0),
            "settings of scores": (len(settings.changed), LARGEST if self.processing else 0),
        }


def sampling_options(requests: Sequence[EncodedRequest], eos: Sequence[int], rows: int) -> Sampling:
    """Return the requests' options as numpy arrays, padded to `rows` rows that emit nothing.

    eos: Ids that end an answer.
    """

    def column(values: list[Any], dtype: Any, fill: Any) -> np.ndarray:
        return np.asarray(values + [fill] * (rows - len(values)), dtype)

    fields = {
        "temperature": column([r.temperature for r in requests], np.float32, 0),
        "top_k": column([min(r.top_k, LARGEST) for r in requests], np.int32, 0),
        "top_p": column([r.top_p for r in requests], np.float32, 1),
        "max_new_tokens": column([r.max_new_tokens for r in requests], np.int32, 0),
        "eos": np.asarray(eos or (-1,), np.int32),
        # What `jax.random.key` makes of a seed.
        "key_data": column([(0, r.seed) for r in requests], np.uint32, (0, 0)),
    }
    return Sampling(**fields)


Rows = tuple[DecodeState, Sampling]
"""State and options of the same rows."""


class States:
    """Make states whose prompts and answers have the sizes of one batch."""

    def __init__(self, together: Together) -> None:
        self.together = together
        self._shapes: dict[tuple[int, Sizes], DecodeState] = {}
        """Shapes by the number of rows and their sizes."""
        self.ms = 0.0
        """Milliseconds of all insertions."""

    def empty(self, rows: int, sizes: Sizes) -> Rows:
        """Return rows of these sizes without any request."""
        held, key, options = self.together.held, (rows, sizes), self.together.options([], rows)
        if key not in self._shapes:
            inputs, _ = abstract_inputs(held.program, rows, sizes)
            arrays = held.params, inputs, options
            self._shapes[key], _ = abstract_prefill(held.program, *arrays, sizes.new)
        with usual_settings():
            empty = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._shapes[key]
            )
        return empty.replace(done=~empty.done), options

    def inserted(self, old: Rows, fresh: Rows, rows: Sequence[int], logits: Any = None) -> Rows:
        """Return the old rows with the first fresh ones at these places.

        logits: Logits from which the fresh options draw first tokens; None keeps those drawn.
        """
        (state, options), (new, new_options) = old, fresh
        dropped = [len(state.done)] * (len(new.done) - len(rows))
        places = np.asarray([*rows, *dropped], np.int32)
        arrays = state, options, new, new_options, places, logits
        inserted, ms = timed(insert_rows, self.together.held, *arrays)
        self.ms += ms
        return inserted

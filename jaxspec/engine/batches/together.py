"""Hold what the prefills of one running batch share, and make the options of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.settings import LARGEST, Processing
from jaxspec.engine.compile_cache import Held
from jaxspec.engine.memory import Sizes
from jaxspec.engine.requests import EncodedRequest
from jaxspec.sampling import Sampling


class Together(NamedTuple):
    """Hold the fields that all prefills of one running batch share."""

    sizes: Sizes
    """Bucket of all requests."""
    held: Held
    """Program with its parameters."""
    logprobs: int | None
    """Number of likeliest tokens to record, see `Sampling`."""
    processing: Processing | None
    """Form of the processors; None if no request has any."""
    one_prompt: bool = False
    """Whether the requests are samples of one prompt, which is prefilled once."""
    past: KVCache | None = None
    """Cache of an earlier turn, whose slots begin the only prompt."""

    def options(
        self, requests: Sequence[EncodedRequest], eos: Sequence[int], batch: int
    ) -> Sampling:
        """Return the requests' options, as `sampling_options`, in the form of this batch."""
        options = sampling_options(requests, eos, batch).replace(logprobs=self.logprobs)
        if self.processing is None:
            return options
        settings = [request.settings for request in requests]
        return options.replace(processors=self.processing.processors(settings, eos, batch))

    def limits(self, request: EncodedRequest, eos: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Return how much of each setting a request needs, and how much this form has room for."""
        settings, room = request.settings, self.processing or Processing(0, 0, False)
        biases = settings.biases(eos)
        before = max((len(bias.prefix) for bias in biases), default=0)
        own, recorded = (0 if n is None else n + 1 for n in (request.logprobs, self.logprobs))
        return {
            "log probabilities a token": (own, recorded),
            "logit_bias": (len(biases), room.biases),  # bans are biases too
            "tokens of a bad word": (before + 1, room.prefix + 1),
            "no_repeat_ngram_size": (settings.no_repeat_ngram_size, LARGEST if room.ngrams else 0),
            "settings of scores": (len(settings.changed), LARGEST if self.processing else 0),
        }


def sampling_options(
    requests: Sequence[EncodedRequest], eos: Sequence[int], batch: int
) -> Sampling:
    """Return the requests' options as numpy arrays, padded to `batch` rows that emit nothing.

    eos: Ids that end an answer.
    """

    def column(values: list[Any], dtype: Any, fill: Any) -> np.ndarray:
        return np.asarray(values + [fill] * (batch - len(values)), dtype)

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

"""Read a request's settings of scores on the host, and write them as traced arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from jaxspec.decoding.grammars import Grammar
from jaxspec.errors import InputError, is_number
from jaxspec.prompts.rows import bucket
from jaxspec.sampling import Biases, Processors

LARGEST = 2**31 - 1  # the largest int32
HOTTEST = 1e30
"""Largest number that float32 scores can be divided by, or moved by, without overflow."""
BIASES = (0, 8, 64, 512, 4096, 32768, 262144)
"""Numbers of biased tokens to compile for."""
PREFIX = (0, 4, 16, 64)
"""Numbers of tokens before the last one of a bad word to compile for."""

Word = str | Sequence[int]
"""Text, or its token ids."""


class Bias(NamedTuple):
    """Hold one entry of `sampling.Biases`."""

    token: int
    value: float
    until: int
    prefix: tuple[int, ...]


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number from 0 on."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def count_within(least: int, most: int) -> Callable[[object], bool]:
    """Return the test whether a value is a whole number in a range."""
    return lambda value: is_count(value) and least <= value <= most


def within(least: float, most: float) -> Callable[[object], bool]:
    """Return the test whether a value is a number in a range."""
    return lambda value: is_number(value) and least <= value <= most  # type: ignore[operator]


def _are_tokens(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_count, value))


def _is_text(value: object) -> bool:
    """Return whether a value is a string without half a character, which no tokeniser reads."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _are_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        bool(word) and (_is_text(word) or _are_tokens(word)) for word in value
    )


def _are_amounts(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        is_count(token) and within(-HOTTEST, HOTTEST)(amount) for token, amount in value.items()
    )


_TOKENS = _are_tokens, "a list of token ids"
_PENALTY = within(-HOTTEST, HOTTEST), "a number"
RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "min_p": (within(0, 1), "0 (any) to 1"),
    "repetition_penalty": (within(1e-6, 1e6), "1 (none) or another number above 0"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "no_repeat_ngram_size": (count_within(0, LARGEST), f"0 (none) to {LARGEST}"),
    "min_new_tokens": (count_within(0, LARGEST), f"0 (any) to {LARGEST}"),
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "bad_words": (_are_words, "a list of texts or of lists of token ids"),
    "logit_bias": (_are_amounts, "{token id: number}"),
}
"""Setting -> whether a value is valid, and the advice for another value."""


@dataclass(frozen=True)
class Settings:
    """Hold how one request's scores change by the tokens before them, see `decoding.processors`.

    Fields are those of `Request`; the defaults change nothing. Bad words are token ids.
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    response_format: Grammar | None = None

    @property
    def changed(self) -> list[str]:
        """Return the names of the fields that change something."""
        none = ("repetition_penalty", 1)
        return [name for name, value in vars(self).items() if value and (name, value) != none]

    @property
    def grammar(self) -> int:
        """Return the number of the grammar; 0 for none."""
        return 0 if self.response_format is None else self.response_format.number

    def biases(self, eos: Sequence[int]) -> list[Bias]:
        """Return what is added to scores of tokens; `eos` ends an answer.

        As in transformers, an EOS that is a bad word still ends an answer.
        """
        bans = [word for word in self.bad_words if [*word] not in [[token] for token in eos]]
        early = eos if self.min_new_tokens else ()
        return [
            *(Bias(token, amount, LARGEST, ()) for token, amount in self.logit_bias.items()),
            *(Bias(token, -math.inf, LARGEST, ()) for token in self.suppress_tokens),
            *(Bias(token, -math.inf, 1, ()) for token in self.begin_suppress_tokens),
            *(Bias(token, -math.inf, self.min_new_tokens, ()) for token in early),
            *(Bias(word[-1], -math.inf, LARGEST, tuple(word[:-1])) for word in bans),
        ]

    def check_tokens(self, count: int) -> None:
        """Raise InputError for a token id that a vocabulary of `count` does not have."""
        tokens = {
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
            "bad_words": [token for word in self.bad_words for token in word],
            "logit_bias": self.logit_bias,
        }
        for name, ids in tokens.items():
            for token in ids:
                if token >= count:
                    raise InputError(f"{name}: token {token}; give ids from 0 to {count - 1}")


class Processing(NamedTuple):
    """Hold what the compiled form of processors depends on, for all requests of a batch."""

    biases: int
    """Maximum biases of a request."""
    prefix: int
    """Maximum tokens before a biased one."""
    ngrams: bool
    """Whether any request bans n-grams."""

    @classmethod
    def of(cls, settings: Sequence[Settings], eos: Sequence[int]) -> Processing | None:
        """Return the form that serves all requests; None if none of them has a processor."""
        if not any(request.changed for request in settings):
            return None
        biases = [request.biases(eos) for request in settings]
        ngrams = any(request.no_repeat_ngram_size for request in settings)
        longest = max((len(bias.prefix) for row in biases for bias in row), default=0)
        count = bucket(max(map(len, biases)), BIASES, "biased tokens")
        return cls(count, bucket(longest, PREFIX, "tokens of a bad word"), ngrams)

    def processors(
        self, settings: Sequence[Settings], eos: Sequence[int], batch: int
    ) -> Processors:
        """Return the processors as numpy arrays, padded to `batch` rows that change nothing."""
        rows = [*settings, *[Settings()] * (batch - len(settings))]

        def column(name: str, dtype: Any = np.float32) -> Any:
            return np.asarray([getattr(row, name) for row in rows], dtype)

        shape = batch, self.biases
        tokens, until = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        values, prefix = np.zeros(shape, np.float32), np.full((*shape, self.prefix), -1, np.int32)
        for row, request in enumerate(rows):
            for i, bias in enumerate(request.biases(eos)):
                tokens[row, i], values[row, i], until[row, i] = bias[:3]
                prefix[row, i, self.prefix - len(bias.prefix) :] = bias.prefix
        arrays: Any = tokens, values, until, prefix
        grammars: Any = np.asarray([row.grammar for row in rows], np.int32)
        return Processors(
            repetition=column("repetition_penalty"),
            presence=column("presence_penalty"),
            frequency=column("frequency_penalty"),
            min_p=column("min_p"),
            biases=Biases(*arrays),
            ngram=column("no_repeat_ngram_size", np.int32) if self.ngrams else None,
            grammar=grammars if grammars.any() else None,
        )

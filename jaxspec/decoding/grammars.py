"""Keep an answer in a form: JSON, a JSON schema, one of several texts, or a regular expression.

The law is the target's, masked: at each place only the tokens behind which the answer can still
come to its end in this form, and an EOS only where it has. llguidance knows these tokens, on the
host. A compiled loop asks for them by a callback, which is a pure function of the tokens before a
score. So drafts are masked as the target is, in chains and trees, and verification stays exact.

A model that reasons before its answer does so freely, except that it may not end there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import InputError, first_line, needing
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.typing import Array, Bool, Int

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ALL = np.uint32(2**32 - 1)
"""Word of a mask that allows its 32 tokens."""
LONGEST = 100_000
"""Maximum characters of a form."""
_BLANK = r"( |\n[ \t]{0,24})?"
"""Blank text in JSON, as models write it: without a bound one could write nothing else."""


def _is_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, str) and x for x in value)


def _has_schema(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("schema"), Mapping)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: value is None,
    "json_object": lambda value: value is None,
    "json_schema": _has_schema,
    "regex": lambda value: isinstance(value, str),
    "choice": lambda value: bool(value) and _is_texts(value),
}
"""Type of a form -> whether its field of the same name is valid."""
ADVICE = (
    '{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}}, '
    '{"type": "choice", "choice": ["yes", "no"]} or {"type": "regex", "regex": "[0-9]+"}'
)


def is_form(value: object) -> bool:
    """Return whether a value is a `Request.response_format`."""
    if not isinstance(value, Mapping):
        return False
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMS:
        return False
    return value.keys() <= {"type", kind} and _FORMS[kind](value.get(kind))


class Grammar:
    """Say which tokens may follow the tokens of an answer.

    Args:
      form: See `Request.response_format`; any except text.
      prompt: Prompt of the answer, which may end within its reasoning.

    Attributes:
      number: Number of this grammar in a compiled program; more than 0.
    """

    def __init__(self, form: Mapping[str, Any], encoder: PromptEncoder, prompt: Prompt) -> None:
        eos = encoder.stops or (() if encoder.eos is None else (encoder.eos,))
        if not eos:
            raise InputError("response_format: the tokeniser has no EOS; leave it out")
        try:
            jax.local_devices(backend="cpu")
        except RuntimeError:
            mend = "add cpu to JAX_PLATFORMS, next to the accelerator"
            raise InputError(f"response_format: JAX has no CPU backend; {mend}") from None
        with needing("response_format", "serve"):
            self._matcher = _matcher(encoder.tokenizer, tuple(eos), _compiled(form))
        self._size = len(encoder.tokenizer)
        self._eos, self._ends = frozenset(eos), bool(encoder.stops)
        self._walks: dict[int, _Walk] = {}
        """Where each row of a batch is."""
        self._reasons, self._may_reason, self._marks = False, False, (-1, -1)
        if splitter := encoder.splitter(prompt):
            self._reasons, self._marks = splitter.reasons, splitter.ids
            self._may_reason = splitter.begin == len(prompt.tokens)
        self.number = next(_NUMBERS)
        _GRAMMARS[self.number] = self

    def mask(self, row: int, tokens: Sequence[int], words: int) -> np.ndarray:
        """Return the mask of the tokens that may follow, one bit each, as `words` words.

        Behind an EOS that ends answers any token may follow: what is drafted there is cut. Only an
        EOS may follow an EOS that ends none, and where no token continues the form.
        """
        answer, mask = self._after_reasoning(tokens), np.full(words, ALL)
        if answer is None:
            for token in self._eos:
                _set_bit(mask, token, False)
            return mask
        if not self._eos.isdisjoint(answer):
            return mask if self._ends else self._only_eos(mask)
        if (walk := self._walks.get(row)) is None:  # a matcher is copied only once a row
            walk = self._walks[row] = _Walk(self._matcher, self._size)
        mask[:] = 0
        if (bits := walk.to(answer)) is not None:
            mask[: len(bits)] = bits[:words]
        if self._may_reason and not tokens:
            _set_bit(mask, self._marks[0], True)
        return mask if mask.any() else self._only_eos(mask)

    def _only_eos(self, mask: np.ndarray) -> np.ndarray:
        """Return the mask with which only an EOS may follow."""
        mask[:] = 0
        for token in self._eos:
            _set_bit(mask, token, True)
        return mask

    def _after_reasoning(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens behind the reasoning; None within it."""
        first, last = self._marks
        begin = 1 if self._may_reason and tokens[:1] == [first] else 0
        if not (begin or self._reasons):
            return tokens
        return tokens[tokens.index(last) + 1 :] if last in tokens[begin:] else None

    def is_whole(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens, up to an EOS, are an answer of the form.

        They are not where no token led on: where the vocabulary lacks one, or llguidance gave up.
        """
        answer = self._after_reasoning(tokens)
        if answer is None:
            return False
        matcher, form = self._matcher.deep_copy(), [t for t in answer if t not in self._eos]
        return matcher.try_consume_tokens(form) == len(form) and matcher.is_accepting()


class _Walk:
    """Follow one answer, whose drafted tokens are often taken back."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self.start, self.size = matcher, size
        self.begin()

    def begin(self) -> None:
        """Return to the beginning of the answer."""
        self.matcher = self.start.deep_copy()
        self.tokens: list[int] = []
        self.mask: np.ndarray | None = None
        """Mask behind these tokens; None before it is asked for."""

    def to(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Return the mask behind these tokens; None for tokens that are not of the form."""
        if self.matcher.is_error():  # it stays so, though perhaps only a draft was too much
            self.begin()
        same = min(len(self.tokens), len(tokens))
        if self.tokens[:same] != tokens[:same]:
            pairs = zip(self.tokens, tokens)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < len(self.tokens):
            self.matcher.rollback(len(self.tokens) - same)
            del self.tokens[same:]
            self.mask = None
        fresh = list(takewhile(lambda token: 0 <= token < self.size, tokens[same:]))
        if fresh:
            fresh = fresh[: self.matcher.try_consume_tokens(fresh)]
            self.tokens += fresh
            self.mask = None
        if len(self.tokens) < len(tokens):
            return None
        if self.mask is None:
            mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint32)
            # Where no token leads on, llguidance offers token 0, and does not take it.
            none = mask[0] == 1 and not mask[1:].any() and not self.matcher.validate_tokens([0])
            self.mask = np.zeros_like(mask) if none else mask
        return self.mask


_GRAMMARS: WeakValueDictionary[int, Grammar] = WeakValueDictionary()
"""Grammars of requests that are not answered yet, by number."""
_NUMBERS = count(1)
_LOCK = threading.Lock()  # a program may ask twice at a time, and a matcher follows one of them


def allowed_tokens(
    numbers: Int[Array, " B"],
    tokens: Int[Array, "B C"],
    count: Int[Array, " B"],
    drafted: Int[Array, "B N"],
    before: Bool[Array, "#B T N"],
    size: int,
) -> Bool[Array, "B T V"]:
    """Return which of `size` tokens may follow, by the rows' grammars.

    Args:
      numbers: Number of each row's grammar; 0 for none.
      tokens, count, drafted, before: See `History`.
    """
    words = -(-size // 32)
    shape = jax.ShapeDtypeStruct((len(numbers), before.shape[1], words), jnp.uint32)
    masks = jax.pure_callback(
        partial(_masks, words), shape, numbers, tokens, count, drafted, before
    )
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*masks.shape[:2], -1)[..., :size] == 1


def _masks(words: int, *arrays: Any) -> np.ndarray:
    """Return the masks [B, T, words] that a program asks for."""
    numbers, tokens, count, drafted, before = map(np.asarray, arrays)
    masks = np.full((len(numbers), before.shape[1], words), ALL)
    with _LOCK:
        for row, number in enumerate(numbers.tolist()):
            if (grammar := _GRAMMARS.get(number)) is None:
                continue
            committed = tokens[row, : count[row]].tolist()
            for node, visible in enumerate(before[row % len(before)]):
                answer = [*committed, *drafted[row, visible].tolist()]
                masks[row, node] = grammar.mask(row, answer, words)
    return masks


def _set_bit(mask: np.ndarray, token: int, allowed: bool) -> None:
    """Set a token's bit."""
    if 0 <= token < 32 * len(mask):
        bit = np.uint32(1 << token % 32)
        mask[token // 32] = mask[token // 32] | bit if allowed else mask[token // 32] & ~bit


def _compiled(form: Mapping[str, Any]) -> str:
    """Return the grammar of a form in llguidance's language."""
    from llguidance import LLMatcher

    kind = form["type"]
    value: Any = form.get(kind)
    try:
        if kind == "regex":
            text = LLMatcher.grammar_from_regex(value)
        elif kind == "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            text = LLMatcher.grammar_from_lark(f"start: {texts}")
        else:
            schema = {"type": "object"} if value is None else value["schema"]
            rules: Any = {"whitespace_pattern": _BLANK}
            text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=rules)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"response_format: {first_line(error)}; give JSON") from None
    if len(text) > LONGEST:
        raise InputError(f"response_format: {len(text)} characters; give at most {LONGEST}")
    return text


@lru_cache(maxsize=64)
def _matcher(tokenizer: Any, eos: tuple[int, ...], grammar: str) -> LLMatcher:
    """Return a matcher to copy, at the beginning of an answer."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_vocabulary(tokenizer, eos), grammar, log_level=0)
    if matcher.is_error():
        reason = first_line(ValueError(matcher.get_error()))
        raise InputError(f"response_format: {reason}; change it")
    return matcher


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, eos: tuple[int, ...]) -> LLTokenizer:
    """Return what llguidance knows of a tokeniser, which takes seconds."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=list(eos))
    except ValueError as error:
        raise InputError(f"response_format: tokeniser: {first_line(error)}; leave it out") from None

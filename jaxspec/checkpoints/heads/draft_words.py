"""Convert draft vocabularies of public heads: `d2t`, and `t2d` for heads that read it.

`d2t` [words] is the target's id of each draft word less its index, and `t2d` [V] whether a token is
a draft word. Readers of `t2d` put the draft words in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.config import RotaryConfig
from jaxspec.errors import InputError

_BY_WORD = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Tensors with a row for each draft word."""


def draft_words(
    title: str, stored: Mapping[str, StoredTensor], text: RotaryConfig
) -> tuple[int, ...]:
    """Return the target's ids of a head's draft words; () for all tokens in their order.

    Args:
      title: Name of the head's kind, for errors.
      stored: The head's tensors.
      text: Its decoder, with as many draft words as config.json says.

    Raises InputError where `d2t` is missing, or no list of the target's tokens.
    """
    if "d2t" not in stored:
        if text.draft_vocabulary:
            raise InputError(f"{title}: the files lack d2t, the draft vocabulary; fetch it")
        return ()
    offsets, size = stored["d2t"], len(text.draft_vocabulary) or None
    wrong = f"{offsets.file}: d2t {offsets.dtype} {list(offsets.shape)}"
    if len(offsets.shape) != 1 or not offsets.whole_numbers:
        raise InputError(f"{wrong} is not a list of integers; fetch the head again")
    count = offsets.shape[0]
    if size not in (None, count) or not 0 < count <= text.vocab_size:
        number = size or f"1 to {text.vocab_size}"
        raise InputError(f"{wrong} has not {number} tokens, as config.json says; fetch both again")
    tokens = np.arange(count) + offsets.read()
    if tokens.min() < 0 or tokens.max() >= text.vocab_size:
        worst = tokens.min() if tokens.min() < 0 else tokens.max()
        raise InputError(f"{wrong} names token {worst} of {text.vocab_size}; fetch the head again")
    if len(np.unique(tokens)) < count:
        raise InputError(f"{wrong} names a token twice; fetch the head again")
    return () if np.array_equal(tokens, np.arange(text.vocab_size)) else tuple(tokens.tolist())


def with_words(text: RotaryConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a head's tensors with `d2t` and `t2d`, and with its draft words in their order."""
    vocabulary = np.asarray(text.draft_vocabulary or range(text.vocab_size), np.int64)
    order = np.argsort(vocabulary)
    ordered = {
        name: np.ascontiguousarray(tensors[name][order]) for name in _BY_WORD if name in tensors
    }
    d2t, t2d = (
        vocabulary[order] - np.arange(len(vocabulary)),
        np.isin(np.arange(text.vocab_size), vocabulary),
    )
    return {**tensors, **ordered, "d2t": d2t, "t2d": t2d}

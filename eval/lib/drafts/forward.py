"""Run a model once over a prompt and its answer, and find where two answers part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxspec.data.images import to_rgb
from jaxspec.engine.engine import LoadedModel
from jaxspec.loading.images import image_inputs
from jaxspec.loading.models import prompt_encoder
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import Showing, prompt_row, stack_rows
from jaxspec.prompts.views import VIEWS
from jaxspec.typing import Array, Params

PASS = 128
"""Forward passes round their number of tokens up to a multiple of this."""


@dataclass(frozen=True)
class Divergence:
    """Locate where an answer first differs from the reference."""

    index: int
    """Number of equal tokens before it."""
    expected: int | None
    """The reference's token; None if the reference ended."""
    actual: int | None
    """The answer's token; None if the answer ended."""
    logit_gap: float | None
    """Logit of `expected` minus logit of `actual`, in one full forward pass of the target over the
    tokens before."""


def divergence(
    target: LoadedModel, prompt: Prompt, expected: Sequence[int], answer: Sequence[int]
) -> Divergence | None:
    """Return where `answer` first differs from `expected`, and the logit gap; None if equal."""
    for i, (right, token) in enumerate(zip(expected, answer)):
        if right != token:
            logits = forward_logits(target, prompt, expected[:i])
            return Divergence(i, right, token, float(logits[right] - logits[token]))
    if len(expected) == len(answer):
        return None
    i = min(len(expected), len(answer))
    right, token = (tokens[i] if i < len(tokens) else None for tokens in (expected, answer))
    return Divergence(i, right, token, None)


def forward_logits(target: LoadedModel, prompt: Prompt, answer: Sequence[int]) -> np.ndarray:
    """Return the target's logits [V] after prompt and answer, from one pass over all tokens."""
    rows, images = whole_row(target, prompt, answer)
    return np.asarray(_last_logits(LanguageModel(target.config), target.params, rows, images))


def whole_row(
    target: LoadedModel, prompt: Prompt, answer: Sequence[int]
) -> tuple[PromptRows, dict[str, Any] | None]:
    """Return a prompt and its answer as inputs of one pass."""
    reader, pictures = target.images, tuple(map(to_rgb, prompt.images))
    view, prompt = VIEWS["M" if reader else "T"], replace(prompt, images=pictures)
    row = prompt_row(Showing(view, prompt_encoder(target), reader, reader), prompt)
    row = row.followed_by(answer)
    rows = stack_rows([row], -(-len(row) // PASS) * PASS)
    if reader is None:
        return rows, None
    sizes = [(image.height, image.width) for image in pictures]
    tiles = sum(reader.tiles(size, len(sizes)) for size in sizes)
    return rows, image_inputs(target, [pictures], tiles)


@partial(jax.jit, static_argnums=0)
def _last_logits(
    model: LanguageModel, params: Params, rows: PromptRows, images: dict[str, Array] | None
) -> Array:
    features = None if images is None else model.encode(params, images)
    embeds = model.embed(params, rows, features)
    return model.prefill(params, embeds, rows, rows.tokens.shape[1])[0][0]

"""The blocks of a head, from one pass of training's attention over the target's own answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.exactness import whole_row
from jaxspec.config import HeadConfig
from jaxspec.data.images import to_rgb
from jaxspec.loading.models import LoadedHead, LoadedModel, prompt_encoder
from jaxspec.models.heads.blocks import corrected, embedder, pick, read_blocks, read_whole
from jaxspec.models.heads.borrowed import joined
from jaxspec.models.heads.head_slots import HeadRows
from jaxspec.models.heads.kinds import module_of
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.prompts.encoder import Prompt


def blocks_of_head(
    target: LoadedModel, head: LoadedHead, prompt: Prompt, answer: Sequence[int], gamma: int
) -> tuple[int, int]:
    """Return an answer's blocks of at most `gamma` drafts, and its tokens after the first.

    The answer must be the target's greedy one.
    """
    agrees = _agreement(target, head, prompt, answer, gamma)
    at, steps, end = 0, 0, len(answer) - 1
    while at < end:
        at += min(int(np.cumprod(agrees[at]).sum()) + 1, end - at)
        steps += 1
    return steps, end


def _agreement(
    target: LoadedModel, head: LoadedHead, prompt: Prompt, answer: Sequence[int], gamma: int
) -> np.ndarray:
    """Return whether step s of a draft from token t equals the answer's token t + s + 1, [T, J]."""
    rows, images = whole_row(target, prompt, answer)
    begin = int(rows.length[0]) - len(answer)
    prompts = module_of(head.config).slots(
        [_shown(target, prompt)], rows.tokens.shape[1], len(prompt.images)
    )
    # The head reads the answer too, as far as a draft's beginning: its slots are text.
    if prompts is not None:
        prompts.text[0, (prompts.text[0] >= 0).sum() :][: len(answer)] = np.arange(
            begin, begin + len(answer)
        )
    params = {"target": target.params, "head": head.params}
    agrees = _drafted(target.model, head.config, gamma, params, rows, images, prompts)[0, begin:][
        : len(answer)
    ]
    last = np.arange(len(answer))[:, None] + np.arange(1, gamma + 1)
    return np.asarray(agrees) & (last < len(answer))


def _shown(target: LoadedModel, prompt: Prompt) -> np.ndarray:
    """Return the image that each slot of a prompt shows, -1 for text."""
    assert target.images is not None
    sizes = [(image.height, image.width) for image in map(to_rgb, prompt.images)]
    counts = iter([len(target.images.slots(size, None, len(sizes)).sources) for size in sizes])
    image, number, shown = prompt_encoder(target).image_token, -1, []
    for token in prompt.tokens.tolist():
        number += token == image
        shown += [number] * next(counts) if token == image else [-1]
    return np.asarray(shown)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _drafted(
    model: LanguageModel,
    config: HeadConfig,
    gamma: int,
    params: dict[str, Any],
    rows: PromptRows,
    images: dict[str, Any] | None,
    prompts: HeadRows | None,
) -> jax.Array:
    """Return `_agreement` for drafts that begin at each token of a row, [1, L, J]."""
    features = None if images is None else model.encode(params["target"], images)
    reading = read_whole(model, params["target"], rows, features, config)
    length = rows.tokens.shape[1]
    at = np.minimum(np.arange(length)[None, :, None] + np.arange(gamma + 1), length - 1)
    block = jnp.asarray(at[..., :-1])
    hidden = read_blocks(config, params["head"], params["target"], reading, rows, block, prompts)
    embed = embedder(config, params["head"], params["target"])
    drafts = LanguageModel(config.text_config)
    own = joined(params["head"], params["target"], drafts.text.draft_vocabulary)

    def best(step: tuple[jax.Array, jax.Array]) -> jax.Array:
        scores = corrected(config, params["head"], drafts.scores(own, step[0]), step[1], embed)
        return fill_vocabulary(drafts.text, scores).argmax(-1)

    inputs = hidden, pick(rows.tokens, block)
    steps = jax.lax.map(best, tuple(jnp.moveaxis(x, 2, 0) for x in inputs))
    return jnp.moveaxis(steps, 0, 2) == rows.tokens[:, at[0]][..., 1:]

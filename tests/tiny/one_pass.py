"""Compare the blocks of a head: as decoding drafts them, and as one pass of training's attention
over the target's own answer predicts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.lib.drafts.forward import whole_row
from jaxspec import Engine, EngineConfig, Request
from jaxspec.data.images import to_rgb
from jaxspec.decoding.sources.source import Committed
from jaxspec.engine.batches.states import sampling_options
from jaxspec.heads.blocks import corrected, embedder, joined, pick, read_blocks, read_whole
from jaxspec.heads.config import HeadConfig
from jaxspec.loading.models import LoadedHead, LoadedModel, prompt_encoder
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import image_spans
from jaxspec.verification import Draft
from tests.tiny.requests import page


def drafted_blocks(
    engine: Engine, request: Request, count: int
) -> Iterator[tuple[list[int], Draft]]:
    """Yield the answer before each of a request's first `count` blocks, and its draft.

    Of some blocks more is accepted than of others, and no token ends the answer.
    """
    state = engine.prefill([request]).replace(done=jnp.zeros(1, bool))
    options = sampling_options(engine.batcher.read([request]), (), 1)
    spec, params = engine.assembly.program, engine.assembly.params

    @jax.jit
    def block(state: Any) -> tuple[Draft, Any]:
        committed = Committed(params, state.tokens, state.count, state.target, spec.drafter.reads)
        draft, _ = spec.drafter.draft(committed, state.drafter, jnp.ones((1, 1)), options)
        return draft, spec.step(params, state, options)

    emitted = set()
    for _ in range(count):
        answer = np.asarray(state.tokens)[0, : int(state.count[0])].tolist()
        draft, state = block(state)
        emitted.add(int(state.count[0]) - len(answer))
        yield answer, draft
    assert len(emitted) > 1, emitted


def target_states(target: LoadedModel, head: LoadedHead, prompt: Prompt, answer: list[int]) -> Any:
    """Return a row of the target, its embeddings, and the states that a head reads."""
    rows, images = whole_row(target, prompt, answer)
    model, kept = target.model, head.config.target_states

    @jax.jit
    def read(images: Any) -> Any:
        embeds = model.embed(target.params, rows, model.encode(target.params, images))
        return embeds, model.read(target.params, embeds, rows, rows.tokens.shape[1], kept)[1].hidden

    return rows, *(np.asarray(leaf, np.float64)[0] for leaf in read(images))


def check_draft(draft: Draft, scores: np.ndarray, temperature: float, atol: float) -> None:
    """Check a draft's first distributions against scores."""
    probs = np.exp((scores - scores.max(-1, keepdims=True)) / temperature)
    probs /= probs.sum(-1, keepdims=True)
    np.testing.assert_allclose(draft.view_probs[0, 0, : len(probs)], probs, atol=atol)


def check_training_pass(
    headed: Callable[[tuple[int, ...]], tuple[LoadedModel, LoadedHead]],
    config: EngineConfig,
    new: int,
) -> None:
    """Check that the blocks of the training pass are those of decoding.

    They follow the target's own answers, whose three likeliest tokens the head drafts.

    headed: Returns the target, and a head with a draft vocabulary; () for all tokens.
    new: Tokens of an answer.
    """
    plain = Engine(headed(())[0], None, config)
    prompts = [
        plain.encoder.prompt(text, [page(0)])
        for text in ("What?", "Tell me more.", "Who is it?", "a")
    ]
    answers = [
        result.tokens for result in plain.generate([Request(prompt, new) for prompt in prompts])
    ]
    counts = Counter(token for answer in answers for token in answer)
    target, head = headed(tuple(sorted(token for token, _ in counts.most_common(3))))
    engine, total = Engine(target, head, config), np.zeros(2, int)
    for prompt, answer in zip(prompts, answers, strict=True):
        result = engine.generate(Request(prompt, new))
        agrees, steps, at = _agreement(target, head, prompt, answer, config.gamma), 0, 0
        while at < len(answer) - 1:
            at += min(int(np.cumprod(agrees[at]).sum()) + 1, len(answer) - 1 - at)
            steps += 1
        blocks = steps, at
        assert blocks == (result.stats.steps, result.stats.emitted)
        assert result.tokens == answer
        total += blocks
    assert 0 < total[0] < total[1]


def _agreement(
    target: LoadedModel, head: LoadedHead, prompt: Prompt, answer: Sequence[int], gamma: int
) -> np.ndarray:
    """Return whether step s of a draft from token t equals the answer's token t + s + 1, [T, J]."""
    rows, images = whole_row(target, prompt, answer)
    begin = int(rows.length[0]) - len(answer)
    spans = image_spans([_shown(target, prompt)], len(prompt.images))
    params = {"target": target.params, "head": head.params}
    agrees = _drafted(target.model, head.config, gamma, params, rows, images, spans)[0, begin:][
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
    spans: jax.Array,
) -> jax.Array:
    """Return `_agreement` for drafts that begin at each token of a row, [1, L, J]."""
    features = None if images is None else model.encode(params["target"], images)
    (reading,) = read_whole(model, params["target"], rows, features, config)
    length = rows.tokens.shape[1]
    at = np.minimum(np.arange(length)[None, :, None] + np.arange(gamma + 1), length - 1)
    block = jnp.asarray(at[..., :-1])
    hidden = read_blocks(config, params["head"], params["target"], reading, rows, block, spans)
    embed = embedder(config, params["head"], params["target"])
    drafts = LanguageModel(config.text_config)
    own = joined(params["head"], params["target"], drafts.text.draft_vocabulary)

    def best(step: tuple[jax.Array, jax.Array]) -> jax.Array:
        scores = corrected(config, params["head"], drafts.scores(own, step[0]), step[1], embed)
        return fill_vocabulary(drafts.text, scores).argmax(-1)

    inputs = hidden, pick(rows.tokens, block)
    steps = jax.lax.map(best, tuple(jnp.moveaxis(x, 2, 0) for x in inputs))
    return jnp.moveaxis(steps, 0, 2) == rows.tokens[:, at[0]][..., 1:]

"""Compare the blocks of a head: as decoding drafts them, and as one pass of training's attention
over the target's own answer predicts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from jaxspec.loading.images import image_inputs
from jaxspec.loading.models import LoadedHead, LoadedModel, prompt_encoder
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import Showing, image_spans, prompt_row, stack_rows
from jaxspec.prompts.views import VIEWS
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
    """Check that the training pass accepts as many tokens of each block as decoding does.

    Blocks follow the target's own answers, whose three likeliest tokens the head drafts. Prompts
    show 2, 0, 1 and 1 images, and decode in one batch.

    headed: Returns the target, and a head with a draft vocabulary; () for all tokens.
    new: Tokens of an answer.
    """
    one_size = {"prompt_buckets": config.prompt_buckets[-1:]}
    config = replace(config, image_buckets=config.image_buckets[-1:], **one_size)
    plain = Engine(headed(())[0], None, config)
    prompts = [
        plain.encoder.prompt(text, [to_rgb(page(i)) for i in range(images)])
        for text, images in (("What?", 2), ("Tell me more.", 0), ("Who is it?", 1), ("a", 1))
    ]
    requests = [Request(prompt, new) for prompt in prompts]
    answers = [result.tokens for result in plain.generate(requests)]
    counts = Counter(token for answer in answers for token in answer)
    target, head = headed(tuple(sorted(token for token, _ in counts.most_common(3))))
    results, total = Engine(target, head, config).generate(requests), np.zeros(2, int)
    assert {result.batch for result in results} == {len(requests)}
    agreements = _agreements(target, head, prompts, answers, config.gamma)
    for agrees, answer, result in zip(agreements, answers, results, strict=True):
        steps = at = 0
        while at < len(answer) - 1:
            at += min(int(np.cumprod(agrees[at]).sum()) + 1, len(answer) - 1 - at)
            steps += 1
        blocks = steps, at
        assert blocks == (result.stats.steps, result.stats.emitted)
        assert result.tokens == answer
        total += blocks
    assert 0 < total[0] < total[1]


def _agreements(
    target: LoadedModel,
    head: LoadedHead,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    gamma: int,
) -> Iterator[np.ndarray]:
    """Yield whether step s of a draft from token t equals each answer's token t + s + 1, [T, J]."""
    assert target.images is not None
    showing = Showing(VIEWS["M"], prompt_encoder(target), target.images, target.images)
    whole = [prompt_row(showing, prompt).followed_by(x) for prompt, x in zip(prompts, answers)]
    rows = stack_rows(whole, max(map(len, whole)))
    sizes = [[(image.height, image.width) for image in prompt.images] for prompt in prompts]
    tiles = max(sum(target.images.tiles(size, len(each)) for size in each) for each in sizes)
    images = image_inputs(target, [prompt.images for prompt in prompts], tiles)
    spans = image_spans(
        [_shown(target, *each) for each in zip(prompts, sizes)], max(map(len, sizes))
    )
    params = {"target": target.params, "head": head.params}
    agrees = np.asarray(_drafted(target.model, head.config, gamma, params, rows, images, spans))
    for row, answer in enumerate(answers):
        begin = len(whole[row]) - len(answer)
        last = np.arange(len(answer))[:, None] + np.arange(1, gamma + 1)
        yield agrees[row, begin : len(whole[row])] & (last < len(answer))


def _shown(target: LoadedModel, prompt: Prompt, sizes: list[tuple[int, int]]) -> np.ndarray:
    """Return the image that each slot of a prompt shows, -1 for text."""
    assert target.images is not None
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
    """Return `_agreements` for drafts that begin at each token of a row, [B, L, J]."""
    features = None if images is None else model.encode(params["target"], images)
    (reading,) = read_whole(model, params["target"], rows, features, config)
    length = rows.tokens.shape[1]
    at = np.minimum(np.arange(length)[None, :, None] + np.arange(gamma + 1), length - 1)
    block = jnp.broadcast_to(at[..., :-1], (len(rows.tokens), length, gamma))
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

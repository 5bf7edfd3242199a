"""Time models with random weights: passes, images and mixtures.

Times depend on shapes and not on the values of weights, so no checkpoint is read and no pair needs
training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from eval.lib.output.tables import Record
from eval.lib.standins.synthetic import random_params
from eval.lib.times.passes import (
    Passes,
    Roofline,
    greedy_options,
    measure_roofline,
    pass_work,
    rewound,
    time_loops,
)
from jaxspec.cache import init_cache
from jaxspec.config import ModelConfig, text_config
from jaxspec.decoding.drafting.drafter import Drafter
from jaxspec.decoding.drafting.rules import parse_weighting
from jaxspec.decoding.drafting.trees import make_drafter
from jaxspec.decoding.inputs import Member, PromptBatch
from jaxspec.decoding.sources.draft_model import DraftModel, ViewRows
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import run_prefill
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import image_zeros
from jaxspec.models.inputs import PromptRows, in_order
from jaxspec.models.int8 import Weights
from jaxspec.models.language_model import LanguageModel
from jaxspec.runtime import parse_dtype
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Params


@dataclass(frozen=True)
class LatencyConfig:
    """Choose the shapes to time; presets under `configs/latency/` are instances."""

    target: ModelConfig
    draft: ModelConfig
    dtype: str
    shapes: tuple[tuple[int, int], ...]
    """(B, S): batch size of the target, and filled slots of the cache."""
    gammas: tuple[int, ...] = (1, 3, 5, 7, 10)
    """Draft lengths of the passes over blocks."""
    views: tuple[int, ...] = (1, 2, 4)
    """Numbers of views R of the draft passes, which have R*B rows."""
    images: tuple[int, ...] = (0, 1, 2, 5)
    """Numbers of images in the prompts whose encoding and prefill are timed; empty for text models.
    """
    prompt: int = 72
    """Text tokens in those prompts."""
    answers: Mapping[int, int] = field(default_factory=dict)
    """New tokens of their answers, by number of images; others have `new`."""
    gamma: int = 5
    """Draft length of the loops at forced acceptance."""
    forced: tuple[float, ...] = (2.29, 3.0)
    """Their tokens per pass: TABED's measured average, and a better draft."""
    context: int = 648
    """Prompt tokens of those loops: an image of 576 and a question."""
    new: int = 128
    """New tokens of those loops."""
    repeats: int = 20
    probe_megabytes: int = 1024
    probe_side: int = 8192
    papers: Mapping[str, str] = field(default_factory=dict)
    """Papers' numbers for these shapes, by the kind of rows above them."""
    target_weights: Weights | None = None
    """int8 quantises the target's layers; only `eval.compiled` reads this, and what follows."""
    tree: str | None = None
    """Tree of the drafts; None drafts chains."""
    head_vocabulary: int = 8192
    """Tokens that an EAGLE-3 head scores."""


@dataclass(frozen=True)
class Pair:
    """Hold target and draft of a preset, on the device."""

    config: LatencyConfig

    @cached_property
    def target(self) -> LoadedModel:
        return self._random(self.config.target, 0)

    @cached_property
    def draft(self) -> LoadedModel:
        return self._random(self.config.draft, 1)

    def _random(self, config: ModelConfig, seed: int) -> LoadedModel:
        params = random_params(config, self.dtype, seed)
        return LoadedModel(config, params, None, None)  # pyright: ignore[reportArgumentType]

    @cached_property
    def roofline(self) -> Roofline:
        return measure_roofline(self.dtype, self.config.probe_megabytes, self.config.probe_side)

    @property
    def dtype(self) -> jnp.dtype:
        return parse_dtype(self.config.dtype)

    def passes(self, model: LoadedModel, batch: int, slots: int, tokens: int) -> Passes:
        """Return passes of up to `tokens` tokens a row over a cache with `slots` filled slots."""
        cache = init_cache(model.model.text, batch, slots + tokens, self.dtype)
        cache = cache.replace(length=jnp.full(batch, slots, jnp.int32))
        return Passes(model.model.extend, model.params, cache, batch)

    def drafter(self, views: int) -> Drafter:
        """Return a drafter with so many equal views."""
        source = DraftModel((Member(self.draft.model, reads_images=False),) * views)
        return make_drafter([source], self.config.gamma, self.target.model.text.vocab_size)

    def prompts(self, batch: int, views: int) -> PromptBatch:
        """Return rows of `context` tokens."""
        length, vocabulary = self.config.context, text_config(self.config.draft).vocab_size
        tokens = jnp.arange(batch * length).reshape(batch, -1) % vocabulary
        rows = PromptRows(tokens.astype(jnp.int32), jnp.full(batch, length, jnp.int32))
        weights = jnp.full((batch, views), 1 / views, jnp.float32)
        return PromptBatch(rows, None, weights, (ViewRows((rows,) * views, None),))

    def image_prompt(self, model: LoadedModel, images: int) -> tuple[PromptRows, Array | None]:
        """Return a prompt with so many images and a text, and the images' features."""
        slots = images * getattr(model.config, "image_tokens", 0)
        tokens = jnp.arange(self.config.prompt + slots)[None] % model.model.text.vocab_size
        rows = PromptRows(tokens, jnp.full(1, tokens.shape[1], jnp.int32))
        if not images:
            return rows, None
        width = model.config.vision_config.hidden_size  # type: ignore[union-attr]
        features = jnp.zeros((1, images, slots // images, width), self.dtype)
        return rows.replace(sources=in_order(jnp.arange(tokens.shape[1])[None] < slots)), features

    @property
    def params(self) -> Params:
        return {"target": self.target.params, DraftModel.name: self.draft.params}


def measure_passes(pair: Pair, batch: int, slots: int) -> list[Record]:
    """Time T_p(B, S, gamma+1) and T_q(R*B, S) of a shape, with shares of the roofline."""
    config, roofline = pair.config, pair.roofline
    target = pair.passes(pair.target, batch, slots, max(config.gammas) + 1)
    calls = {
        f"target {tokens}": target.over(tokens)
        for tokens in (1, *(gamma + 1 for gamma in config.gammas))
    }
    for views in config.views:
        calls[f"draft {views}"] = pair.passes(pair.draft, views * batch, slots, 1).over(1)
    ms = time_loops(calls, config.repeats, f"passes, B = {batch}, S = {slots}")
    work = pass_work(text_config(config.target), pair.dtype.itemsize, batch, 1, target.state.slots)
    gbps, tflops = work.bytes / ms["target 1"] / 1e6, work.flops / ms["target 1"] / 1e9
    return [
        {"kind": "passes", "batch": batch, "slots": slots, "target_ms": ms["target 1"]}
        | {"verify_ms": {str(gamma): ms[f"target {gamma + 1}"] for gamma in config.gammas}}
        | {"draft_ms": {str(views): ms[f"draft {views}"] for views in config.views}}
        | {"effective_gbps": gbps, "copy_share": gbps / roofline.copy_gbps}
        | {"read_share": gbps / roofline.read_gbps}
        | {"matmul_share": tflops / roofline.matmul_tflops, "roofline": vars(roofline)}
    ]


def count_flops(config: LatencyConfig) -> list[Record]:
    """Count FLOPs from shapes: of the target's passes, and of a token of 1, 2 ... draft views."""
    target, draft = text_config(config.target), text_config(config.draft)
    passes = [("target", target, 1, 1), ("target", target, 1, config.gamma)]
    passes += [("draft", draft, views, 1) for views in config.views]
    return [
        {"kind": "flops", "model": name, "views": rows, "tokens": tokens}
        | {"weights_gflops": pass_work(text, 1, rows, tokens, 0).flops / 1e9}
        | {"gflops": pass_work(text, 1, rows, tokens, config.context).flops / 1e9}
        for name, text, rows, tokens in passes
    ]


def measure_images(pair: Pair) -> list[Record]:
    """Time tower and prefill of target and draft by a prompt's images, in milliseconds.

    The target's decoding is counted from a pass over the slots that are filled halfway through.
    """
    config = pair.config
    answers = {images: config.answers.get(images, config.new) for images in config.images}
    calls: dict[str, Callable[[int], Any]] = {}
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        weighted = model.model, model.params
        for images in config.images if model.model.has_vision else (0,):
            if images:
                pixels = image_zeros(model.config, 1, images)
                calls[f"{name} tower {images}"] = _repeated(_run_encode, *weighted, pixels)
            prompt = pair.image_prompt(model, images)
            calls[f"{name} prefill {images}"] = _repeated(_run_prefill, *weighted, *prompt)
            if name == "target":
                slots = prompt[0].tokens.shape[1] + answers[images] // 2
                calls[f"target decoding {images}"] = pair.passes(model, 1, slots, 1).over(1)
    ms = time_loops(calls, config.repeats, "images")
    # The first token of an answer is prefill's.
    ms |= {f"target decoding {i}": ms[f"target decoding {i}"] * (answers[i] - 1) for i in answers}
    stages = dict.fromkeys(key.rpartition(" ")[0] for key in calls)
    return [
        {"kind": "images", "images": images, "answer": answers[images]}
        | {f"{stage.replace(' ', '_')}_ms": ms.get(f"{stage} {images}") for stage in stages}
        for images in config.images
    ]


def _repeated(run: Callable[..., Array], *args: Any) -> Callable[[int], Array]:
    """Return `call(n)`, which runs a program n times."""
    return lambda times: [run(*args) for _ in range(times)][-1]


@partial(jax.jit, static_argnums=0)
def _run_encode(model: LanguageModel, params: Params, pixels: dict[str, Array]) -> Array:
    return model.encode(params, pixels)


@partial(jax.jit, static_argnums=0)
def _run_prefill(
    model: LanguageModel, params: Params, rows: PromptRows, features: Array | None
) -> Array:
    embeds = model.embed(params, rows, features)
    logits, cache = model.prefill(params, embeds, rows, rows.tokens.shape[1])
    return logits + cache.k[-1][0, 0, 0, 0] * 0


def measure_mixtures(pair: Pair, rules: Sequence[str], batch: int = 1) -> list[Record]:
    """Time a block by views and weighting, interleaved, in milliseconds.

    `share` is the time that the rule adds to a block of the same views with static weights, as a
    share of that block; `state_bytes` is the size of its state for each row.
    """
    options = greedy_options(batch, pair.config.new)
    calls, rows = {}, []
    for views in pair.config.views:
        for rule in ("static", *rules) if views > 1 else ("static",):
            program = Speculator(pair.target.model, pair.drafter(views), parse_weighting(rule))
            prompts = pair.prompts(batch, views)
            state, _ = run_prefill(program, pair.params, prompts, options, pair.config.new)
            calls[f"{views} {rule}"] = blocks(program, pair.params, state, options)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.weighting)) // batch
            row = {"kind": "mixtures", "batch": batch, "views": views, "rule": rule}
            rows.append(row | {"state_bytes": size})
    ms = time_loops(calls, pair.config.repeats, f"mixtures, B = {batch}")
    for row in rows:
        block = ms[f"{row['views']} {row['rule']}"]
        row |= {"block_ms": block, "share": block / ms[f"{row['views']} static"] - 1}
        row |= {"times_one_view": block / ms["1 static"]}
    return rows


def blocks(
    program: Speculator, params: Params, state: DecodeState, options: Sampling
) -> Callable[[int], Any]:
    """Return `call(n)`, which runs n blocks from one state, all over the same slots.

    Each call hands the state to the next: a copy of the caches would take a good part of a block's
    time.
    """
    states = [jax.tree.map(jnp.copy, state)]

    def call(times: int) -> Array:
        states[0] = _run_blocks(program, params, states[0], options, times)
        return states[0].tokens

    return call


@partial(jax.jit, static_argnames="program", donate_argnames="state")
def _run_blocks(
    program: Speculator, params: Params, state: DecodeState, options: Sampling, times: int
) -> DecodeState:
    def step(_: int, now: DecodeState) -> DecodeState:
        after = program.step(params, now, options)
        target, drafter = rewound(after.target, state.target), rewound(after.drafter, state.drafter)
        return after.replace(count=state.count, done=state.done, target=target, drafter=drafter)

    return jax.lax.fori_loop(0, times, step, state)

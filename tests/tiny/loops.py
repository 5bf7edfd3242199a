"""Draw random prompts and options of their rows, and run both programs compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.inputs import PromptBatch
from jaxspec.decoding.settings import Processing, Settings
from jaxspec.decoding.sources.draft_model import ViewRows
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import DecodeState
from jaxspec.engine.assembly import build_program
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.drafts import mixture, sources_of
from jaxspec.heads.config import HeadConfig
from jaxspec.models.inputs import PromptRows, in_order
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.rows import image_spans
from jaxspec.sampling import Sampling
from jaxspec.typing import Params
from tests.tiny.models import EOS, VOCABULARY

NEWLINE, PATCHES = 4, 4
CAPTION = [5, 3, 5]
"""The caption of every image."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options that halve the time to compile; these programs run for milliseconds."""


def prompts(
    lengths: list[int],
    images: list[int],
    views: tuple[str, ...],
    seed: int = 0,
    image: int = VOCABULARY - 1,
    head: HeadConfig | None = None,
) -> PromptBatch:
    """Return random prompts; row b starts with `images[b]` images, and the views differ in the
    tokens that replace them.
    """
    count, names = len(views), views
    views = tuple(view for view in views if view not in ("head", "lookup"))
    rng = np.random.default_rng(seed)
    stands = {"M": [image] * PATCHES, "P": [image] * (PATCHES // 4), "T": [NEWLINE], "C": CAPTION}
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ("M", *views)}
    for length, pages in zip(lengths, images, strict=True):
        text = rng.integers(3, image, length)
        for name, view in rows.items():
            view.append(np.concatenate([[1], *[stands[name]] * pages, text]).astype(np.int32))
    width = max(len(row) for view in rows.values() for row in view) + 3
    pixels = rng.normal(size=(len(lengths), max(*images, 1), 8, 8, 3)).astype(np.float32)
    shown = [
        np.where(row == image, (np.cumsum(row == image) - 1) // PATCHES, -1) for row in rows["M"]
    ]
    forms = {k: stack(v, width, image if k in ("M", "P") else None) for k, v in rows.items()}
    tiles, inputs = {"pixels": jnp.asarray(pixels)}, []
    if views:
        inputs.append(ViewRows(tuple(forms[v] for v in views), tiles))
    if head is not None:
        inputs.append(
            jnp.asarray(image_spans(shown, max(*images, 1))) if head.reads_spans else None
        )
    if "lookup" in names:
        inputs.append(None)
    return PromptBatch(forms["M"], tiles, jnp.full((len(lengths), count), 1 / count), tuple(inputs))


def view_rows(batch: PromptBatch) -> tuple[PromptRows, ...]:
    """Return the prompts that the draft reads."""
    return batch.sources[0].rows


def blind(batch: PromptBatch) -> PromptBatch:
    """Return the batch for a draft that has no tower of its own."""
    first, *rest = batch.sources or (None,)
    return (
        batch.replace(sources=(first.replace(images=None), *rest))
        if isinstance(first, ViewRows)
        else batch
    )


def stack(rows: list[np.ndarray], width: int, image: int | None) -> PromptRows:
    """Return right-padded rows; the slots of `image` show the images' features in order."""
    tokens = jnp.stack([np.pad(row, (0, width - len(row))) for row in rows])
    length = jnp.asarray([len(row) for row in rows], jnp.int32)
    return PromptRows(tokens, length, None if image is None else in_order(tokens == image))


def full_pass(
    model: LanguageModel, params: Params, tokens: jax.Array, pixels: jax.Array
) -> jax.Array:
    """Return the logits [B, L, V] of whole rows, whose image slots show their features in order."""
    length = jnp.full(len(tokens), tokens.shape[1])
    rows = PromptRows(tokens, length, in_order(tokens == model.config.image_token_index))
    return model.score(params, rows, model.encode(params, {"pixels": pixels}))


def weighted(batch: PromptBatch, *weights: float) -> PromptBatch:
    return batch.replace(
        weights=jnp.broadcast_to(jnp.asarray(weights, jnp.float32), batch.weights.shape)
    )


def take(batch: PromptBatch, options: Sampling, rows: list[int]) -> tuple[PromptBatch, Sampling]:
    """Return these rows of a batch, in this order, with the same padding."""
    at = np.asarray(rows)
    chosen = jax.tree.map(lambda x: x[at], options.replace(eos=None)).replace(eos=options.eos)
    return jax.tree.map(lambda x: x[at], batch), chosen


def sampling(
    batch: int,
    temperature: float | list[float] = 0.0,
    new: int | list[int] = 20,
    seed: int = 0,
    eos: tuple[int, ...] = (EOS, -1),
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    settings: Sequence[Settings] = (),
) -> Sampling:
    """Return options of `batch` rows; a list gives each row its own, and settings are repeated."""
    form = Processing.of(settings, eos) if settings else None
    rows = [settings[row % len(settings)] for row in range(batch)] if settings else []
    return Sampling(
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch,)),
        top_k=jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (batch,)),
        top_p=jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), (batch,)),
        max_new_tokens=jnp.broadcast_to(jnp.asarray(new, jnp.int32), (batch,)),
        eos=jnp.asarray(eos, jnp.int32),
        key_data=jax.random.key_data(jax.random.split(jax.random.key(seed), batch)),
        processors=form and jax.tree.map(jnp.asarray, form.processors(rows, eos, batch)),
        greedy=not np.any(temperature),
    )


def speculator(
    target: LanguageModel,
    draft: LanguageModel,
    views: tuple[str, ...],
    gamma: int,
    weighting: str = "static",
    tree: str | None = None,
    head: HeadConfig | None = None,
    shares_tower: bool = False,
) -> Speculator:
    """Return the program of a mixture, whose parts `views` names as tables do."""
    views = tuple(view for view in views if view != "head")
    config = EngineConfig(views=views, gamma=gamma, weighting=weighting, tree=tree)
    drafts = [draft.config] * bool({*views} - {"lookup"}) + ([] if head is None else [head])
    return build_program(
        target, sources_of(mixture(views, drafts), target, gamma, shares_tower), config
    )


def params_of(
    spec: Speculator, target: Params, draft: Params = None, head: Params = None
) -> Params:
    """Return the parameters of a program, by its sources' names."""
    own = {source.name: draft if source.forms else head for source in spec.sources}
    return {"target": target} | {name: params for name, params in own.items() if params is not None}


def run_plain(
    model: LanguageModel, params: Params, batch: PromptBatch, options: Sampling, new: int
) -> DecodeState:
    batch = batch.replace(sources=(), weights=None)
    return _run_plain(model, params, batch, options, new)


@partial(jax.jit, static_argnums=(0, 4), compiler_options=QUICK)
def _run_plain(
    model: LanguageModel, params: Params, batch: PromptBatch, options: Sampling, new: int
) -> DecodeState:
    plain, held = Autoregressive(model), {"target": params}
    return plain.decode(held, plain.prefill(held, batch, options, new)[0], options)


@partial(jax.jit, static_argnums=(0, 4), compiler_options=QUICK)
def run_speculative(
    spec: Speculator, params: Params, batch: PromptBatch, options: Sampling, new: int
) -> DecodeState:
    return spec.decode(params, spec.prefill(params, batch, options, new)[0], options)


def outputs(state: DecodeState) -> list[list[int]]:
    return [
        row[:n].tolist()
        for row, n in zip(np.asarray(state.tokens), np.asarray(state.count), strict=True)
    ]

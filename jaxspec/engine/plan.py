"""Estimate the memory and least times of decoding on any devices, only from configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from jaxspec.config import ModelConfig
from jaxspec.decoding.sources.source import Buckets
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.engine.assembly import build_program
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.drafts import DraftConfig, mixture, sources_of
from jaxspec.engine.memory import MemoryReport, Sizes, at_place, bytes_held, plan_memory
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.making import new_head
from jaxspec.loading.pairs import check_views
from jaxspec.models.families import abstract_params, towers_alike
from jaxspec.models.int8 import Weights, int8_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import abstract_mesh, shardings
from jaxspec.typing import Params


class Chip(NamedTuple):
    """Describe a device by its maker's data sheet."""

    kind: str
    """Part of its `device_kind` in JAX."""
    gib: float
    """Memory."""
    gbps: float
    """Its bandwidth."""
    tflops: float
    """Products of bfloat16 matrices (T4: float16) without sparsity."""


CHIPS = {
    "v3": Chip("TPU v3", 16, 450, 61.5),
    "v4": Chip("TPU v4", 32, 1228, 275),
    "v5e": Chip("TPU v5 lite", 16, 819, 197),
    "v5p": Chip("TPU v5", 95, 2765, 459),
    "v6e": Chip("TPU v6", 32, 1640, 918),
    "t4": Chip("T4", 16, 320, 65),
    "l40s": Chip("L40S", 48, 864, 362),
    "l4": Chip("L4", 24, 300, 121),
    "a100-40gb": Chip("A100-SXM4-40GB", 40, 1555, 312),
    "a100": Chip("A100", 80, 2039, 312),
    "h100": Chip("H100", 80, 3350, 989),
    "h200": Chip("H200", 141, 4800, 989),
    "b200": Chip("B200", 180, 8000, 2250),
}
"""Figures for one JAX device, from cloud.google.com/tpu/docs and NVIDIA's data sheets (SXM). A kind
whose name is part of another's comes after it."""


def chip_of(device: Any) -> Chip | None:
    """Return the data sheet of a device, or None for kinds not in the table."""
    return next((chip for chip in CHIPS.values() if chip.kind in device.device_kind), None)


def abstract_program(
    target: ModelConfig,
    drafts: Sequence[DraftConfig],
    config: EngineConfig,
    dtype: Any,
    weights: Weights | None = None,
    draft_weights: Weights | None = None,
) -> tuple[Autoregressive | Speculator, Params]:
    """Return the program of these models, and its parameters as shapes.

    Without drafts the target decodes by itself. A draft whose tower has the
    target's shapes shares it.

    Args:
      weights, draft_weights: "int8" for a target or drafts that are quantised as they are loaded.
    """
    parts, model = mixture(config.views, drafts), LanguageModel(target)
    if parts.model is not None and model.has_vision:
        check_views(target, parts.model, parts.views)
    shares = parts.model is not None and towers_alike(target, parts.model)
    sources = sources_of(parts, model, config.length, shares)
    shapes = {source.name: source.shapes(dtype) for source in sources}
    if draft_weights is not None:
        shapes = {name: jax.eval_shape(int8_params, shape) for name, shape in shapes.items()}
    params = {"target": abstract_params(target, dtype, weights)}
    params |= {name: shape for name, shape in shapes.items() if shape}
    return build_program(model, sources, config), params


def usual_head(target: ModelConfig, **options: Any) -> HeadConfig:
    """Return the KV head of `train.recipe kv_llava15_7b`: 64 slots an image, if sizes are fixed.

    options: More fields.
    """
    tokens = getattr(target, "image_tokens", None)
    pooled = {} if tokens is None else {"image_slots": min(64, tokens), "slot_bias": True}
    return new_head(target, **pooled, **options)


def sizes_of(program: Autoregressive | Speculator, prompt: int, tiles: int, new: int) -> Sizes:
    """Return the sizes of rows with these prompt slots, image tiles and new tokens."""
    tiles = tiles if program.target.has_vision else 0
    counted = tuple(tiles if tower else 0 for tower in program.towers)
    slot_images = np.zeros(0, int)
    buckets = Buckets((prompt,), (tiles,))
    sources = tuple(
        source.sizes([prompt] * len(source.forms), slot_images, buckets)
        for source in program.sources
    )
    return Sizes(prompt, counted, new, sources)


def split_over(
    program: Autoregressive | Speculator, params: Params, mesh: Mesh | AbstractMesh
) -> Params:
    """Return the shapes placed as in an engine: target and head split, the draft replicated."""
    places: dict[str, Any] = {"target": shardings(program.target.config, params["target"], mesh)}
    for source in program.sources:
        if source.name in params:
            places[source.name] = source.places(params[source.name], mesh)
    return at_place(params, places)


@dataclass(frozen=True)
class Estimate:
    """Hold the memory of one device, and the bytes that it reads."""

    memory: MemoryReport
    plain: int
    """Bytes of a token of plain decoding, of every row: weights and cache once."""
    block: int
    """Bytes of a block: its drafting, and the target's pass."""

    def speedup(self, tokens_per_pass: float) -> float:
        """Return the speed-up over plain decoding at this many tokens per pass, if memory-bound."""
        return tokens_per_pass * self.plain / self.block


def estimate_decoding(
    program: Autoregressive | Speculator, params: Params, devices: int, batch: int, sizes: Sizes
) -> Estimate:
    """Estimate the memory and the bytes of decoding on this many devices."""
    if devices > 1:
        params = split_over(program, params, abstract_mesh(model=devices))
    report = plan_memory(program, params, batch, sizes)
    plain = bytes_held(read_by_pass(params["target"])) + report.target_cache
    gamma, drafted = program.most_tokens - 1, 0
    for source, cache in zip(program.sources, report.draft_caches, strict=True):
        cache += int(source.target_share * report.target_cache)
        weights = bytes_held(read_by_pass(source.weights(params)))
        drafted += source.passes(gamma) * (weights + cache)
    return Estimate(report, plain, plain + drafted)


def read_by_pass(params: Params) -> list[Any]:
    """Return the parameters that a pass reads whole: no tower, and embeddings only where tied.

    Of those for all layers it reads a row a token.
    """
    sight = ("vision_tower", "vision_embedder", "visual", "multi_modal_projector", "embed_vision")
    leaves: Any = flatten_dict(params, sep="/")
    passed = (*sight, "kv_projector", "image_newline")
    tied = not any("lm_head" in path for path in leaves)
    rows = "embed_tokens_per_layer" if tied else "embed_tokens"
    return [
        leaf for path, leaf in leaves.items() if not path.startswith(passed) and rows not in path
    ]
